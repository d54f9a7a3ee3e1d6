"""The kernels of state-space models on one GPU beside those of peers (benchmarks/peers/kernels.py), on the same inputs
in one process: outputs and gradients are compared first, then both are timed. benchmarks/state_space.py starts it for
each of its rows; alone:

python benchmarks/state_space_ops.py scan --out rows.jsonl

On a CPU the sizes are small, and beside our references is plain torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import kernels as peers

from phalanx.bench.floors import REFERENCE, Floor, Rates, dtype_on, how_often, implementations, size_of
from phalanx.bench.ops import tensors_of
from phalanx.bench.samples import SAMPLES, Draw, OpSample, conv_sample, scan_sample
from phalanx.bench.timing import measure
from phalanx.ops.delta.delta import DELTA
from phalanx.ops.op import Op, refused
from phalanx.ops.optimizer import orthogonal
from phalanx.ops.optimizer.symmetric import SYMMETRIC
from phalanx.ops.scan.conv1d import CONV1D
from phalanx.ops.scan.gated_norm import GATED_NORM
from phalanx.ops.scan.rows import StateSlots
from phalanx.ops.scan.scan import SCAN
from phalanx.ops.scan.step import CONV1D_STEP, SCAN_STEP, StepInputs, conv1d_step, scan_step

Call = Callable[[], Tensor]


class Peer(NamedTuple):
    """by: its name and version; raises Missing."""

    by: Callable[[], str]
    call: Call


def mamba(call: Call, what: str = "") -> Peer:
    return Peer(lambda: peers.mamba()[0] + what, call)


def fla(call: Call) -> Peer:
    return Peer(lambda: peers.fla()[0], call)


def plain(call: Call) -> Peer:
    return Peer(lambda: "plain torch", call)


@dataclass(frozen=True)
class Contest:
    """Ours and peers on the same inputs. leaves: whose gradients are compared."""

    sample: OpSample
    leaves: tuple[Tensor, ...]
    others: tuple[Peer, ...]

    def ours(self) -> Tensor:
        return tensors_of(self.sample.call.run())[0]


def scan_contest(draw: Draw, groups: int) -> Contest:
    sample = scan_sample(draw, groups=groups)
    s = sample.call.args[0]
    steps = peers.Steps(s.x, s.dt, s.a, s.b, s.c, s.d)
    others = [mamba(lambda n=n: peers.mamba_scan(steps, n), f", chunks of {n}") for n in (256, 128)]
    if draw.device.type != "cuda":
        others = [plain(lambda: peers.plain_scan(steps))]
    return Contest(sample, (s.x, s.dt, s.a, s.b, s.c, s.d), tuple(others))


def conv_contest(draw: Draw) -> Contest:
    sample = conv_sample(draw)
    x, weight, bias = sample.call.args
    fast, slow = fla(lambda: peers.fla_conv(*given())), plain(lambda: peers.plain_conv(*given()))

    def given() -> tuple[Tensor, Tensor, Tensor]:
        return x, weight.flatten(1), bias

    return Contest(sample, (x, weight, bias), (fast if draw.device.type == "cuda" else slow,))


def norm_contest(draw: Draw) -> Contest:
    sample = SAMPLES["gated_norm"](draw)
    x, gate, weight, groups, _ = sample.call.args
    given = x, gate, weight, groups.here, groups.eps
    fast, slow = mamba(lambda: peers.mamba_norm(*given)), plain(lambda: peers.plain_norm(*given))
    return Contest(sample, (x, gate, weight), (fast if draw.device.type == "cuda" else slow,))


def delta_contest(draw: Draw) -> Contest:
    sample = SAMPLES["delta"](draw)
    s = sample.call.args[0]
    given = s.q, s.k, s.v, s.decay, s.beta
    fast, slow = fla(lambda: peers.fla_delta(*given)), plain(lambda: peers.plain_delta(*given))
    return Contest(sample, given, (fast if draw.device.type == "cuda" else slow,))


CONTESTS: dict[str, Callable[[Draw], Contest]] = {
    "scan": lambda draw: scan_contest(draw, 8),
    "scan1": lambda draw: scan_contest(draw, 1),
    "delta": delta_contest,
    "conv": conv_contest,
    "norm": norm_contest,
}


OPS: dict[str, tuple[Op, ...]] = {
    "scan": (SCAN,),
    "scan1": (SCAN,),
    "delta": (DELTA,),
    "conv": (CONV1D,),
    "norm": (GATED_NORM,),
    "step": (CONV1D_STEP, SCAN_STEP),
    "muon-ops": (SYMMETRIC,),
}


def results_of(call: Call, leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and gradients."""
    for leaf in leaves:
        leaf.grad = None
    y = call()
    y.backward(dy)
    found = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    for leaf in leaves:
        leaf.grad = None
    return found


def difference(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest of ||a - b|| / ||b||; NaN where one is not finite or has not as many tensors."""
    if len(found) != len(truth):
        return float("nan")
    rel = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, truth)]
    return float("nan") if any(each != each for each in rel) else max(rel)


def contest_rows(name: str, draw: Draw, repeats: int, only_compile: bool) -> list[dict[str, Any]]:
    device, rows, made = draw.device, list[dict[str, Any]](), CONTESTS[name](draw)
    dy = torch.randn(made.ours().shape, device=device).to(draw.dtype)
    own = implementations(made.sample.op, made.sample.given)
    calls: list[tuple[str, Call, Any]] = [(f"phalanx {by}", made.ours, alone) for by, alone in own.items()]
    for peer in made.others:
        try:
            peer.call()
            calls.append((peer.by(), peer.call, nullcontext))
        except Exception as why:  # packages that are not ours, for whatever reason
            rows.append({"row": name, "by": "peer", "missing": f"{type(why).__name__}: {why}"[:300]})
    with calls[0][2]():
        truth = results_of(made.ours, made.leaves, dy)
    forward, both = floors_of(made, draw)
    for by, call, alone in calls:
        if only_compile and by.endswith(REFERENCE):
            continue
        with alone():
            apart = difference(results_of(call, made.leaves, dy), truth)
            if only_compile:
                continue
            row = {"row": name, "by": by, "difference": apart}
            row |= timed(call, made.leaves, dy, device, how_often(by, device, repeats))
        row |= {"forward_floor_ms": 1e3 * forward.seconds, "both_floor_ms": 1e3 * both.seconds, "floor": both.text}
        took = row.get("both_graph_ms", row["both_ms"])  # of the device, where that is known
        rows.append(row | {"share": 1e3 * both.seconds / took, "shape": made.sample.call.shape})
    return rows


def timed(
    call: Call, leaves: Sequence[Tensor], dy: Tensor, device: torch.device, often: dict[str, int]
) -> dict[str, float]:
    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        call().backward(dy)

    one, two = (measure(each, device, **often) for each in (forward, both))
    found = {"forward_ms": one.median, "both_ms": two.median, "both_low_ms": two.low, "both_high_ms": two.high}
    if device.type == "cuda":  # without the host, as in training
        with suppress(RuntimeError):  # what waits for the device cannot be captured
            found["both_graph_ms"] = measure(graphed(both, device), device, **often).median
    return {key: 1e3 * seconds for key, seconds in found.items()}


def floors_of(made: Contest, draw: Draw) -> tuple[Floor, Floor]:
    """Forward, and forward and backward."""
    sample, rates = made.sample, Rates.measured(draw.device, draw.dtype)
    read = size_of(tensors_of([*sample.call.args, *sample.call.kwargs.values()]))
    out, grads = size_of([made.ours()]), size_of(made.leaves)
    forward = Floor((read + out) / rates.copy, sample.forward_flop / rates.gemm)
    more = Floor((read + out + grads) / rates.copy, sample.backward_flop / rates.gemm)
    return forward, Floor(forward.nbytes + more.nbytes, forward.matmuls + more.matmuls)


# ---- one token of each sequence


@dataclass(frozen=True)
class StepSizes:
    """Nemotron-H-8B's layers with a scan, and sequences."""

    layers: int = 24
    sequences: int = 256
    heads: int = 128
    width: int = 64
    groups: int = 8
    state: int = 128
    taps: int = 4

    @property
    def channels(self) -> int:
        return self.heads * self.width + 2 * self.groups * self.state


class StepLayer:
    """What one layer keeps of each sequence, in fp32, and its small weights. `kept` (S, taps - 1, channels) are the
    convolution's last inputs in our layout, `kept_by_channel` (S, channels, taps) in flash-linear-attention's."""

    def __init__(self, z: StepSizes, draw: Draw):
        self.z = z
        self.states = draw.normal(z.sequences, z.heads, z.width, z.state, grad=False, dtype=torch.float32)
        self.kept = draw.normal(z.sequences, z.taps - 1, z.channels, grad=False)
        self.kept_by_channel = F.pad(self.kept.mT, (1, 0)).contiguous()
        self.weight = draw.normal(z.channels, 1, z.taps, grad=False)
        self.conv_bias = draw.normal(z.channels, grad=False)
        self.bias, self.d, self.a_log = (draw.normal(z.heads, grad=False, dtype=torch.float32) for _ in range(3))
        self.mixed, self.dt = (
            draw.normal(z.sequences, z.channels, grad=False),
            draw.normal(z.sequences, z.heads, grad=False),
        )

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.z
        x, b, c = mixed.split((z.heads * z.width, *(z.groups * z.state,) * 2), -1)
        return x.unflatten(-1, (-1, z.width)), b.unflatten(-1, (-1, z.state)), c.unflatten(-1, (-1, z.state))

    def ours(self, slots: Tensor, fresh: Tensor) -> Tensor:
        mixed = conv1d_step(self.mixed, StateSlots(self.kept, slots, fresh), self.weight, self.conv_bias)
        x, b, c = self.parts(mixed)
        inputs = StepInputs(x, self.dt, b, c, self.bias, self.a_log, self.d)
        return scan_step(inputs, StateSlots(self.states, slots, fresh))

    def theirs(self) -> Tensor:
        mixed = peers.fla_conv_step(self.mixed, self.kept_by_channel, self.weight.flatten(1), self.conv_bias)
        x, b, c = self.parts(mixed)
        return peers.mamba_step(peers.Steps(x, self.dt, -self.a_log.exp(), b, c, self.d, self.bias), self.states)

    @property
    def nbytes(self) -> int:
        """That must be read and written."""
        moved = size_of([self.states, self.kept]) * 2 + size_of([self.mixed, self.dt, self.weight, self.conv_bias])
        return moved + self.z.sequences * self.z.heads * self.z.width * self.mixed.element_size()


def step_rows(draw: Draw, repeats: int, only_compile: bool) -> list[dict[str, Any]]:
    device = draw.device
    z = StepSizes(layers=1 if only_compile else 24) if device.type == "cuda" else StepSizes(2, 4, 4, 16, 2, 16)
    slots, fresh = torch.arange(z.sequences, device=device), torch.zeros(z.sequences, dtype=torch.bool, device=device)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        layers = [StepLayer(z, draw) for _ in range(z.layers)]
        ours, theirs = (
            (lambda: [each.ours(slots, fresh) for each in layers]),
            (lambda: [each.theirs() for each in layers]),
        )
        calls: list[tuple[str, Callable[[], Any], float]] = [("phalanx", ours, 0.0)]
        by = "mamba-ssm + fla"
        try:
            by = f"{peers.mamba()[0]} + {peers.fla()[0]}"
            if device.type != "cuda":
                raise peers.Missing("their kernels need a GPU")
            calls.append((by, theirs, step_difference(layers[0], slots, fresh)))
        except Exception as why:  # packages that are not ours, for whatever reason
            rows.append({"row": "step", "by": by, "missing": f"{type(why).__name__}: {why}"[:300]})
        if only_compile:
            ours()
            return rows
        floor = Floor(sum(each.nbytes for each in layers) / Rates.measured(device, draw.dtype).copy, 0.0)
        for by, call, apart in calls:
            took = measure(graphed(call, device), device, repeats=repeats, batch=1)
            row = {"row": "step", "by": by, "shape": f"{z.layers} layers, {z.sequences} sequences", "difference": apart}
            row |= {"forward_ms": 1e3 * took.median, "forward_floor_ms": 1e3 * floor.seconds, "floor": floor.text}
            rows.append(row | {"share": floor.seconds / took.median})
    return rows


def step_difference(layer: StepLayer, slots: Tensor, fresh: Tensor) -> float:
    """Of outputs and states after two tokens, ours from the states that theirs began with."""
    states, kept = layer.states.clone(), layer.kept.clone()
    theirs = [layer.theirs(), layer.theirs(), layer.states.clone()]
    layer.states.copy_(states)
    ours = [layer.ours(slots, fresh), layer.ours(slots, fresh), layer.states.clone()]
    layer.kept.copy_(kept)
    return difference(ours, theirs)


def graphed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Its replay as a CUDA graph, as generation runs it; on a CPU the call itself."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- orthogonalisation

W1_LAYERS = 8


def muon_rows(draw: Draw, repeats: int, only_compile: bool) -> list[dict[str, Any]]:
    """A layer of W1 in each form (with symmetric halves where a kernel has them: not by the reference), beside
    torch.optim.Muon's iteration on the same matrices, and its whole step of as many layers as W1 has."""
    sample, device, together = SAMPLES["muon"](draw), draw.device, orthogonal.TOGETHER
    (matrices,) = sample.call.args
    rates, rows = Rates.measured(device, torch.bfloat16), list[dict[str, Any]]()
    floor = Floor(2.0 * size_of(matrices) / rates.copy, sample.forward_flop / rates.gemm)
    calls: list[tuple[str, Callable[[], list[Tensor]], int, Any]] = []
    for by, alone in implementations(sample.op, sample.given).items():
        for form, count in (("Gram", together), ("direct", 1)):
            calls.append((f"phalanx {by}, {form}", lambda: [m for g in sample.call.run() for m in g], count, alone))
    try:
        calls.insert(0, ("torch.optim.Muon", torchs_iteration(matrices), together, nullcontext))
    except Exception as why:  # its name is private
        rows.append({"row": "muon-ops", "by": "peer", "missing": f"{type(why).__name__}: {why}"[:300]})
    truth = [each.float() for each in calls[0][1]()]
    for by, call, count, alone in calls:
        orthogonal.TOGETHER = count
        try:
            with alone():
                apart = difference(call(), truth)
                if only_compile:
                    continue
                took = measure(call, device, repeats=repeats)
        finally:
            orthogonal.TOGETHER = together
        row = {"row": "muon-ops", "by": by, "shape": "a layer of W1", "difference": apart, "floor": floor.text}
        row |= {"forward_ms": 1e3 * took.median, "forward_floor_ms": 1e3 * floor.seconds}
        rows.append(row | {"share": floor.seconds / took.median})
    if not only_compile:
        took = measure(torchs_step(matrices), device, warmup=1, repeats=min(repeats, 5), batch=1)
        whole = Floor(W1_LAYERS * floor.nbytes, W1_LAYERS * floor.matmuls)
        row = {"row": "muon-step", "by": f"torch.optim.Muon.step, {W1_LAYERS} layers", "floor": whole.text}
        rows.append(row | {"forward_ms": 1e3 * took.median, "share": whole.seconds / took.median})
    return rows


def torchs_iteration(matrices: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    from torch.optim._muon import _zeropower_via_newtonschulz as iterate

    how = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
    return lambda: [iterate(each, *how) for group in matrices for each in group]


def torchs_step(matrices: Sequence[Tensor]) -> Callable[[], Any]:
    params = []
    for each in [m for _ in range(W1_LAYERS) for group in matrices for m in group]:
        params.append(torch.nn.Parameter(torch.zeros_like(each)))
        params[-1].grad = each.clone()
    return torch.optim.Muon(params, lr=1e-4).step


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("row", choices=tuple(OPS))
    reader.add_argument("--without-peers", action="store_true")
    reader.add_argument("--only-compile", action="store_true", help="compile and compare, time nothing")
    reader.add_argument("--repeats", type=int, default=10)
    reader.add_argument("--out", help="append the results to this file, a line of JSON each")
    asked = reader.parse_args()
    if asked.without_peers:
        peers.ARCHIVES = Path("/no peers were asked for")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    draw = Draw(device, dtype_on(device))
    if asked.row == "step":
        rows = step_rows(draw, asked.repeats, asked.only_compile)
    elif asked.row == "muon-ops":
        rows = muon_rows(draw, asked.repeats, asked.only_compile)
    else:
        rows = contest_rows(asked.row, draw, asked.repeats, asked.only_compile)
    if device.type == "cuda":
        wrong = refused(OPS[asked.row], device, draw.dtype)
        rows += [
            {"row": asked.row, "by": f"phalanx {op}", "failed": f"not used here: {why}"} for op, why in wrong.items()
        ]
    for row in rows:
        print(json.dumps(row), flush=True)
        if asked.out:
            with open(asked.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
