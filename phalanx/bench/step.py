"""`bench step`: a config's real training step, timed like the peers in benchmarks/peers, with memory by kind and the
step budget."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.devices import find_device
from phalanx.base.garbage import settled
from phalanx.base.placement import Placement
from phalanx.base.sizes import size_text
from phalanx.bench.ceilings import Ceilings, measure_ceilings
from phalanx.bench.timing import Times
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.data.loader import Prefetcher, train_loader
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.forecast.flops import flops_of, step_flops
from phalanx.nn.objective import make_objective
from phalanx.observe.memory_errors import reported
from phalanx.observe.out_of_memory import held
from phalanx.observe.profile import Recording
from phalanx.observe.step_budget import Budget, advice, read_budget
from phalanx.planning.order import micro_batches
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import Batch
from phalanx.text.cache import ChatUse, use_text

LR = 1e-5  # small, because mock tokens teach nothing and every step should do the same work
TRACED = 2  # steps of the budget, after one that warms the profiler up


def bench_step(
    placement: Placement, config: dict[str, Any], steps: int, warmup: int, out: str | None, trace: str | None
) -> None:
    """One rank of the benchmark; rank 0 prints, and writes `out` (JSON) and `trace` (Chrome/Perfetto) if requested.
    Without warm-up there are only the timed steps: no step budget, unless its trace is requested."""
    budgeted = warmup > 0 or trace is not None
    run = long_enough(load_run(base=config), warmup + steps + (TRACED + 1) * budgeted)
    use = ChatUse(make_objective(run.task).train_on, run.model.media)
    run = replace(run, data=use_text(run.data, run.dir, run.model.vocab_size, train_on=use))
    began = time.perf_counter()
    with joined(run, placement) as state, batches_of(run, state) as next_batches:
        built = time.perf_counter()
        ceilings = measure_ceilings(run, state.mesh.device)
        if placement.rank == 0:
            print(
                f"joined and built in {built - began:.1f} s, ceilings in {time.perf_counter() - built:.1f} s",
                flush=True,
            )
        if (
            state.mesh.device.type == "cuda"
        ):  # the warm-up counts: what CUDA graphs use afterwards is not seen as allocated
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(state.mesh.device)
        losses: list[Tensor] = []

        def step() -> None:
            losses[:] = [train_step(state, next_batches(), LR).loss]

        for _ in range(warmup):
            step()
        times = timed_steps(state, step, steps)
        peak, loss = peak_bytes(state), losses[0].item()
        budget = traced(state, step, times.median, trace) if budgeted else None
        result = Result(run, state, times, peak, ceilings, budget, loss)
        if placement.rank == 0:
            print("\n".join(result.lines()), flush=True)
            if out:
                Path(out).write_text(json.dumps(result.as_dict(), indent=1), encoding="utf-8")


@contextmanager
def joined(run: Run, placement: Placement, weights: bool = True) -> Iterator[State]:
    """Everything a rank trains with, without a folder; with initial weights, unless the caller loads others."""
    with ExitStack() as after:
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement))))
        plan = make_plan(run, placement.world_size)
        watched = after.enter_context(reported(plan, mesh))
        watched.state = build(plan, mesh)
        if weights:
            init_weights(watched.state.model)
        watched.state.model.train()
        with settled():
            yield watched.state


def long_enough(run: Run, steps: int) -> Run:
    """The run with at least as many steps as will be made, and batches of full size from the start."""
    length: dict[str, Any] = {"steps": max(run.train.last_step, steps), "tokens": None}
    return replace(run, train=replace(run.train, **length, rampup=None, eval_interval=None, eval_samples=64))


@contextmanager
def batches_of(run: Run, state: State) -> Iterator[Callable[[], list[Batch]]]:
    """A function that returns a step's micro-batches, with new tokens each time, prepared as in the training loop."""
    mesh, t = state.mesh, run.train
    count = t.global_batch // (t.micro_batch * mesh.dp.size)
    loader = train_loader(
        run.data,
        seq_length=t.seq_length,
        seed=t.seed,
        vocab_size=run.model.vocab_size,
        samples=t.last_step * t.global_batch,
        reading=reading_of(run),
    )
    order = micro_batches(run, loader, 0, 0, mesh.dp.size, mesh.dp.index)
    with Prefetcher(
        loader, order, depth=max(8, 2 * count), pin_memory=mesh.device.type == "cuda", part=mesh.part
    ) as ready:
        yield lambda: [next(ready).to(mesh.device) for _ in range(count)]


def timed_steps(state: State, step: Callable[[], None], count: int) -> Times:
    """Host clock around each whole step, with the device idle at both ends; for each step the slowest rank's time."""
    wait(state)
    seconds = []
    for _ in range(count):
        wait(state)
        began = time.perf_counter()
        step()
        wait(state)
        seconds.append(time.perf_counter() - began)
    slowest = state.mesh.world.all_reduce(
        torch.tensor(seconds, dtype=torch.float64, device=state.mesh.device), "max"
    ).wait()
    return Times.of(slowest.tolist())


def wait(state: State) -> None:
    if state.mesh.device.type == "cuda":
        torch.cuda.synchronize(state.mesh.device)


def peak_bytes(state: State) -> int | None:
    """Peak bytes of tensors on the fullest rank, including the first step; None on a CPU, which does not count them."""
    if state.mesh.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(state.mesh.device) + state.mesh.shared_bytes
    own = torch.tensor([peak], dtype=torch.int64, device=state.mesh.device)
    return int(state.mesh.world.all_reduce(own, "max").wait().item())


def traced(state: State, step: Callable[[], None], plain_s: float, keep: str | None) -> Budget | None:
    """The step budget, on rank 0; all ranks take part, rank 0 records."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        recording = Recording(state, keep or Path(folder) / "trace.json")
        if state.mesh.rank == 0:
            recording.start()
        try:
            step()
            for number in range(TRACED):
                with recording.step(number):
                    step()
            recording.stop()
        finally:
            recording.abandon()
        return read_budget(recording.path, plain_s) if state.mesh.rank == 0 else None


@dataclass(frozen=True)
class Result:
    """The result of a benchmark of steps, on rank 0."""

    run: Run
    state: State
    times: Times
    peak: int | None
    ceilings: Ceilings
    budget: Budget | None
    loss: float  # of the last timed step, a mean over tokens

    @property
    def tokens(self) -> int:
        return self.run.train.global_batch * self.run.train.seq_length

    @property
    def ranks(self) -> int:
        return self.state.mesh.grid.world

    @property
    def flops(self) -> float:
        """FLOP/s of one rank."""
        return step_flops(self.run) / self.times.median / self.ranks

    @property
    def device(self) -> str:
        device = self.state.mesh.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    @property
    def mfu(self) -> float | None:
        known = find_device(self.device)
        peak = known.peak(self.run.train.precision) if known else None
        return self.flops / peak if peak else None

    def memory(self) -> dict[str, int]:
        """Bytes of rank 0 by kind; what the peak holds beyond the kinds we own is activations and working space."""
        kinds = held(self.state)
        return kinds if self.peak is None else {**kinds, "activations and working": self.peak - sum(kinds.values())}

    def lines(self) -> list[str]:
        g, t = self.state.mesh.grid, self.run.train
        mfu = "n/a (no data-sheet peak known)" if self.mfu is None else f"{100 * self.mfu:.1f} % of the data-sheet peak"
        peak = "n/a on a CPU" if self.peak is None else size_text(self.peak)
        rate = self.tokens / self.times.median / self.ranks
        kinds = ", ".join(f"{name} {size_text(b)}" for name, b in self.memory().items())
        return [
            f"{self.ranks} x {self.device}, torch {torch.__version__}, {g.text}, {t.precision}, "
            f"{t.global_batch} x {t.seq_length} tokens a step, micro-batch {t.micro_batch}",
            f"step {self.times.ms} ms, median (least-most) of {self.times.repeats}; loss of the last {self.loss:.4f}",
            f"tokens/s/GPU {rate:,.0f}, {self.flops / 1e12:.4g} TFLOP/s, MFU {mfu}, "
            f"{100 * self.flops / self.ceilings.gemm:.1f} % of measured GEMM",
            f"peak memory {peak}; by kind: {kinds}",
            f"FLOP per step: {flops_of(self.run).text(self.tokens)}",
            *self.ceilings.lines(),
            *([] if self.budget is None else [*self.budget.lines(), advice(self.budget, self.run)]),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "torch": torch.__version__,
            "ranks": self.ranks,
            "config": to_dict(self.run),
            "step": self.times.as_dict(),
            "loss": self.loss,
            "tokens_per_s_per_gpu": self.tokens / self.times.median / self.ranks,
            "flops": self.flops,
            "mfu": self.mfu,
            "share_of_gemm": self.flops / self.ceilings.gemm,
            "peak_bytes": self.peak,
            "memory": self.memory(),
            "ceilings": self.ceilings.as_dict(),
            "budget": None if self.budget is None else self.budget.as_dict(),
        }
