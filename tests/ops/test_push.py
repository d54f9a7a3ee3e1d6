"""Tokens pushed to their experts: the exchange against the formula it computes, its kernels against their plain
twins, what it writes where."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from phalanx.comm.dry import DryAxis
from phalanx.comm.mesh import Mesh
from phalanx.comm.symmetric import PushedRows
from phalanx.engine.build import build, choices
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.ops.experts import push as plain
from phalanx.ops.experts.exchange import EXCHANGES
from phalanx.ops.experts.permute import plan_rows
from phalanx.ops.experts.spread import Spread
from tests.harness.parity import base_run
from tests.ops.test_ops import normal

T, D, E, K = 11, 5, 8, 3


def choice(rank: int, number: int = 0) -> Tensor:
    """(T, K) different experts a token, some pairs dropped (expert E), one token with none."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    experts = torch.rand(T, E, generator=generator).argsort(-1)[:, :K]
    experts[torch.rand(T, K, generator=generator) < 0.15] = E
    experts[3] = E
    return experts


def factors(part: int, parts: int) -> Tensor:
    """(E,) what the part of each expert multiplies a token by; the parts of an expert sum up to it."""
    return normal(E, seed=50) * (part + 1) / sum(range(parts + 1))


def multiply(ends: Tensor, rows: int, first: int, mine: Tensor) -> Tensor:
    """(rows, 1) factor of each row's expert."""
    number = torch.searchsorted(ends.contiguous(), torch.arange(rows, dtype=ends.dtype), right=True).clamp_max(
        len(ends) - 1
    )
    return mine[first + number].unsqueeze(1)


def exchanged(
    rank: int, world: int, etp: int, dispatch: str, kernels: str, memory: bool, rounds: int = 3
) -> list[tuple[Tensor, ...]]:
    """(y, dx, dweights, missing) of some rounds, all open before the first backward, as pipelined micro-batches are."""
    mesh = Mesh(Grid(dp=world, ep=world // etp, etp=etp), rank)
    mesh.prepare_experts()
    axes = mesh.model
    if memory:
        assert mesh.overlap(axes.experts, "on", world * T * D * 8) == ("on" if world > 1 else "off")
    mine, first, done = factors(axes.etp.index, etp), axes.ep.index * (E // axes.ep.size), []
    for number in range(rounds):
        x, weights = (
            normal(T, D, seed=rank + 10 * number).requires_grad_(),
            normal(T, K, seed=100 + rank + 10 * number).requires_grad_(),
        )
        exchange = EXCHANGES[dispatch](x, axes)
        exchange.send(choice(rank, number), E, kernels)

        def compute(rows, ends, weights_R, later, source):
            made = rows * multiply(ends, len(rows), first, mine)
            return made if weights_R is None else made * weights_R.unsqueeze(1)

        y, missing = exchange(weights, compute, kernels)
        done.append((x, weights, y, missing))
    for number, (_, _, y, _) in reversed(list(enumerate(done))):
        y.backward(normal(T, D, seed=200 + rank + 10 * number))
    return [(y.detach(), x.grad, weights.grad, missing) for x, weights, y, missing in done]


@pytest.mark.parametrize(
    "world, etp, kernels, rounds",
    [
        (1, 1, "plain", 3),
        (2, 1, "plain", 3),
        (4, 1, "plain", 3),
        (4, 2, "plain", 3),
        (2, 2, "plain", 3),
        (2, 1, "triton", 1),
        (4, 2, "triton", 1),
    ],
)
def test_exchange_is_its_formula(ranks, world, etp, kernels, rounds):
    """Truth: sum over slots of weight * factor * x, and its gradients by autograd."""
    if kernels == "triton" and sys.platform != "linux":
        pytest.skip("triton has wheels for Linux alone")
    results = ranks.run("tests.ops.test_push:exchanged", world, etp, "push", kernels, True, rounds)
    for rank, done in enumerate(results):
        for number, (y, dx, dweights, missing) in enumerate(done):
            x, weights = (
                normal(T, D, seed=rank + 10 * number).requires_grad_(),
                normal(T, K, seed=100 + rank + 10 * number).requires_grad_(),
            )
            whole = torch.cat((factors(0, 1), torch.zeros(1, dtype=torch.float64)))
            truth = (weights * whole[choice(rank, number)]).sum(1, keepdim=True) * x
            truth.backward(normal(T, D, seed=200 + rank + 10 * number))
            for found, expected in ((y, truth.detach()), (dx, x.grad), (dweights, weights.grad)):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
            assert missing == 0


@pytest.mark.parametrize("world, etp", [(4, 1), (4, 2)])
def test_push_and_all_gather_give_the_same_bits(ranks, world, etp):
    """Both add a token's rows by slot on each rank and then by rank; without shared memory too, where an all-to-all
    carries the parts."""
    pushed = ranks.run("tests.ops.test_push:exchanged", world, etp, "push", "plain", True)
    swapped = ranks.run("tests.ops.test_push:exchanged", world, etp, "push", "plain", False)
    gathered = ranks.run("tests.ops.test_push:exchanged", world, etp, "allgather", "plain", True)
    for rounds in zip(pushed, swapped, gathered):
        for one in zip(*rounds):
            assert all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(*one))


@dataclass
class Held:
    """Buffers of all ranks in one process, as one of them sees them."""

    wholes: list[Tensor]
    index: int
    tokens: int = T

    @property
    def first(self) -> int:
        return self.index * self.tokens

    @property
    def addresses(self) -> Tensor:
        return torch.tensor([whole.data_ptr() for whole in self.wholes], device=self.wholes[0].device)

    def part(self, rank: int) -> Tensor:
        return self.wholes[rank][self.first : self.first + self.tokens]


def held(ranks: int, index: int, width: int, dtype: torch.dtype) -> Held:
    return Held([torch.full((ranks * T, width), torch.nan, dtype=dtype) for _ in range(ranks)], index)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks, etp, width", [(1, 1, 3), (4, 2, 33), (8, 1, 16)])
def test_kernels_write_what_their_twins_write(ranks, etp, width, dtype):
    """Truth: the reference implementations, NaN where nothing is to be written included. Sums in bf16 are rounded once
    by both, by the interpreter towards zero."""
    bound = 0 if dtype == torch.float64 else 2.0**-7
    kernels = pytest.importorskip("phalanx.ops.experts.push_kernel")
    everyones = torch.cat([choice(r) for r in range(ranks)])
    for index in {0, ranks // 2, ranks - 1}:
        spread = Spread(E // (ranks // etp), etp, ranks, index)
        rows = plan_rows(
            everyones, spread.first, spread.here, 2 * ranks * T // 3, "plain"
        )  # too few in places: those rows are missing
        x, y = normal(T, width, seed=index, dtype=dtype), normal(len(rows.source_R), width, seed=9, dtype=dtype)
        for fast, slow, args in (
            (kernels.send_tokens, plain.send_tokens, (x, choice(index), spread)),
            (kernels.send_sums, plain.send_sums, (y, rows, everyones, spread)),
        ):
            found, truth = held(ranks, index, width, dtype), held(ranks, index, width, dtype)
            fast(*args, found)
            slow(*args, truth)
            assert any(part.isnan().any() for part in truth.wholes) and not all(
                part.isnan().all() for part in truth.wholes
            )
            for a, b in zip(found.wholes, truth.wholes):
                torch.testing.assert_close(a, b, rtol=bound, atol=0, equal_nan=True)
        parts = normal(ranks * T, width, seed=8, dtype=dtype)
        parts[:T][~plain.goes_to(choice(index), spread, 0)] = torch.nan  # what nobody wrote
        found, truth = (module.add_sums(parts, choice(index), spread) for module in (kernels, plain))
        torch.testing.assert_close(found, truth, rtol=bound, atol=0)


def written(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Rows that arrived from each rank in the memory here, and those that came back."""
    mesh = Mesh(Grid(dp=world, ep=world), rank)
    mesh.prepare_experts()
    axis, counts = mesh.model.experts, []
    mesh.overlap(axis, "on", world * T * D * 8)
    spread = Spread(E // world, 1, world, rank)
    everyones = axis.all_gather(choice(rank)).wait()
    rows = plan_rows(everyones, spread.first, spread.here, world * T * K, "plain")
    y = normal(len(rows.source_R), D)
    writes = {
        False: lambda to: plain.send_tokens(normal(T, D), choice(rank), spread, to),
        True: lambda to: plain.send_sums(y, rows, everyones, spread, to),
    }
    for back, write in writes.items():
        to = axis.push(T, D, y, back)
        assert isinstance(to, PushedRows)
        to._wholes[rank].fill_(torch.nan)  # nobody writes before all are here
        axis.barrier()
        counts.append([int((~part.isnan().any(1)).sum()) for part in to.fill(write).wait().split(T)])
        axis.barrier()
    return counts[0], counts[1]


def test_a_token_travels_once_to_each_rank_that_needs_it(ranks):
    """Truth: the routing, counted. So many rows cross, whatever the number of slots, and as many sums come back."""
    world = 4
    needs = [
        [sum(bool({int(e) // 2 for e in row} & {to}) for row in choice(source).tolist()) for to in range(world)]
        for source in range(world)
    ]
    for rank, (there, back) in enumerate(ranks.run("tests.ops.test_push:written", world)):
        assert there == [needs[source][rank] for source in range(world)] and back == needs[rank]


def test_share_is_counted():
    """Truth: every choice of K of E experts, enumerated; the forecast sends that share of the tokens to each other
    rank."""
    for ranks, etp, slots in ((4, 1, 3), (2, 1, 2), (4, 2, 1), (8, 1, 8)):
        spread = Spread(E // (ranks // etp), etp, ranks, 0)
        hits = [any(e < spread.here for e in chosen) for chosen in itertools.combinations(range(E), slots)]
        assert spread.share(slots) == pytest.approx(sum(hits) / len(hits), rel=1e-14)
    dry = DryAxis("ep x etp", 4)
    dry.push(100, 6, torch.empty(0, dtype=torch.bfloat16, device="meta"), False, share=0.5)
    assert dry.sent == Counter(push=3 * 50 * 6 * 2)


def test_forecast_of_push():
    """Of a plan: twice there and back through memory, that share of the tokens; the memory is counted."""
    run = replace(base_run("mixtral"), layout=LayoutConfig(ep=4, dispatch="push"))
    model, tokens = run.model, run.train.micro_batch * run.train.seq_length
    plan = make_plan(run, 4)
    (use,), _ = rank_uses(plan, plan.num_micro_batches(8))
    share = 1 - math.comb(6, 2) / math.comb(8, 2)
    pushed = 4 * 3 * round(3 * share * tokens * model.hidden_size * 8)  # four ways, three layers
    gathered = 3 * 3 * 3 * tokens * 2 * 8  # in three layers, to three ranks: choices, weights, and gradients of these
    assert use.sent["ep"] == pytest.approx(2 * (pushed + gathered))
    (other,), _ = rank_uses(make_plan(replace(run, layout=LayoutConfig(ep=4, dispatch="alltoall")), 4), 2)
    buffers = 4 * 4 * tokens * model.hidden_size * 8
    assert use.memory["messages"] - other.memory["messages"] == buffers


def test_who_pushes_without_being_told(ranks):
    """More ranks than experts a token: push, if they are GPUs that share memory."""
    run = base_run("mixtral")  # 2 experts a token
    for layout, device, dispatch in (
        (dict(ep=2), "auto", "allgather"),
        (dict(ep=4), "auto", "push"),
        (dict(ep=4), "cpu", "alltoall"),
        (dict(ep=2, etp=2), "cuda", "push"),
        (dict(ep=8, etp=2), "auto", "alltoall"),
    ):
        chosen = replace(run, layout=LayoutConfig(**layout), train=replace(run.train, device=device))
        assert make_plan(chosen, layout["ep"] * layout.get("etp", 1)).experts.dispatch == dispatch
    said = ranks.run("tests.ops.test_push:said", 4, replace(run, layout=LayoutConfig(ep=4)))
    assert all(text.endswith("tokens to experts by alltoall") for text in said)
    said = ranks.run("tests.ops.test_push:said", 4, replace(run, layout=LayoutConfig(ep=4, dispatch="push")))
    assert all("tokens to experts by push through shared memory on" in text for text in said)


def said(rank: int, world: int, run) -> str:
    return choices(build(make_plan(run, world), Mesh(make_plan(run, world).grid, rank)))


def refused(rank: int, world: int) -> str:
    mesh = Mesh(Grid(dp=world, ep=world), rank)
    mesh.prepare_experts()
    return mesh.overlap(mesh.model.experts, "on", 2**45)


def test_push_without_memory_is_said_on_every_rank(ranks):
    for text in ranks.run("tests.ops.test_push:refused", 2):
        assert text.startswith("off: no room for")
