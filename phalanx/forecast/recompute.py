"""What is recomputed in backward so that a rank fits its budget: the cheapest choice of ops for each block, found
before anything runs.

It uses what blocks save and what their ops cost (measured on the meta device, forecast.memory); nn.recompute does the
recomputing. The choice for a rank is exact over all sets of its blocks' ops, unless there are very many (see
`cheapest`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.errors import ConfigError, Problem
from phalanx.forecast.memory import OVERHEAD, BlockUse, DryBlock, block_uses, fixed_bytes, rank_uses
from phalanx.nn.dry_run import FusedAttention, leaves
from phalanx.nn.recompute import Recompute
from phalanx.planning.blocks import BlockFacts
from phalanx.planning.plan import Plan

# A byte read or written, and a byte sent to another rank, in FLOPs: an H100's bf16 rate over that of its memory and of
# NVLink.
FLOPS_PER_BYTE = 300.0
FLOPS_PER_BYTE_SENT = 2200.0
MOST_STATES = 2000


@dataclass(frozen=True)
class Price:
    """The price of running one or several ops once: FLOPs, bytes of inputs and outputs, bytes sent to other ranks."""

    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.flops + other.flops, self.moved + other.moved, self.sent + other.sent)

    def times(self, count: float) -> Price:
        return Price(self.flops * count, self.moved * count, self.sent * count)

    @property
    def cost(self) -> float:
        """In FLOPs, as if nothing overlapped."""
        return self.flops + FLOPS_PER_BYTE * self.moved + FLOPS_PER_BYTE_SENT * self.sent


@dataclass(eq=False)
class _Ran:
    """An op in the forward of a block: its price, the memory that it read and wrote (keys of storages), and the ops
    that enclose it, outermost first."""

    name: str
    within: tuple[_Ran, ...]
    price: Price = Price()
    read: tuple[int, ...] = ()
    wrote: tuple[int, ...] = ()


class _Trace(Recompute):
    """A Recompute that records what each op costs and which tensors are saved inside which ops, for `kept_of`; it keeps
    all of them alive."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import (
            FlopCounterMode,  # imports Triton: start-up time, needed only by a budget
        )

        super().__init__()
        self.counter, self.sent = FlopCounterMode(display=False), lambda: 0.0
        self.ran: list[_Ran] = []
        self.saved: list[tuple[int, tuple[_Ran, ...]]] = []
        self.alive: dict[int, Tensor] = {}
        self._open: tuple[_Ran, ...] = ()

    def op(self, name: str, make: Callable[..., Any], *inputs: Tensor) -> Any:
        return self._noted(name, make, inputs)

    def output(self, name: str, made: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> None:
        ran = _Ran(
            name,
            self._open,
            Price(moved=made.nbytes + sum(t.nbytes for t in inputs)),
            self._keys(inputs),
            self._keys((made,)),
        )
        self.ran.append(ran)

    def whole(self, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return self._noted("block", make, inputs)

    def in_pieces(self, make: Callable[[Tensor], Tensor], x: Tensor, params: Iterable[Tensor]) -> Tensor:
        return self._noted("mlp", make, (x,))

    def _noted(self, name: str, make: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        ran, flops, sent = _Ran(name, self._open), self.counter.get_total_flops(), self.sent()
        self.ran.append(ran)
        self._open = (*ran.within, ran)
        made = make(*inputs)
        self._open = ran.within
        outputs = (made,) if isinstance(made, Tensor) else tuple(made)
        moved = sum(t.nbytes for t in (*inputs, *outputs))
        ran.price = Price(self.counter.get_total_flops() - flops, moved, self.sent() - sent)
        ran.read = self._keys(inputs)
        if name not in ("block", "mlp"):  # their outputs stay
            ran.wrote = tuple(k for k in self._keys(outputs) if k not in ran.read)
        return made

    def only_filled(self, part: float) -> None:
        """Count only this fraction of the experts' rows: the others are room that is not computed."""
        for ran in [r for r in self.ran if r.name == "experts"]:
            empty = Price((1.0 - part) * ran.price.flops)
            for outer in (*ran.within, ran):
                outer.price += empty.times(-1)
            for inner in [r for r in self.ran if ran in r.within]:
                inner.price = replace(inner.price, flops=part * inner.price.flops)

    def save(self, tensor: Tensor) -> Tensor:
        """The hook of saved tensors."""
        self.saved.append((self._keys((tensor,))[0], self._open))
        return tensor

    def _keys(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        for t in tensors:
            self.alive.setdefault(t.untyped_storage()._cdata, t)
        return tuple(t.untyped_storage()._cdata for t in tensors)


@dataclass(frozen=True)
class Traced:
    """One forward of a block: prices of its named ops (the mean, for ops that occur several times), and how the saved
    bytes follow from the ops that are recomputed (the rules of nn.recompute, without running anything)."""

    trace: _Trace
    prices: dict[str, Price]
    given: frozenset[int]  # storages that exist in any case

    def kept_of(self, recomputed: Set[str]) -> int:
        """Bytes that forward saves for backward."""
        active = {
            id(r) for r in self.trace.ran if r.name in recomputed and not any(o.name in recomputed for o in r.within)
        }
        makers = {key: r for r in self.trace.ran if id(r) in active for key in r.wrote}
        stays: set[int] = set()
        held: set[int] = set()

        def need(key: int) -> None:
            hold(makers[key]) if key in makers else stays.add(key)

        def hold(ran: _Ran) -> None:
            if id(ran) not in held:
                held.add(id(ran))
                for key in ran.read:
                    need(key)

        for key, within in self.trace.saved:
            outer = next((r for r in within if id(r) in active), None)
            need(key) if outer is None else hold(outer)
        return sum(self.trace.alive[key].untyped_storage().nbytes() for key in stays - self.given)


def traced(plan: Plan, number: int) -> Traced:
    """Trace a block of tp rank 0 for one micro-batch."""
    trace = _Trace()
    one_by_one = replace(plan.counted_ops, kernels="plain")  # a kernel for several ops would hide them
    dry = DryBlock.of(plan.recomputing((frozenset(),) * len(plan.facts)), number, trace, one_by_one)
    trace.ran.clear()
    trace.sent = lambda: sum(dry.sent.values())
    given = [*dry.block.parameters(), *tree_leaves([vars(dry.batch)])]
    with dry.known, saved_tensors_hooks(trace.save, lambda t: t), trace.counter, FusedAttention():
        dry.forward(leaves(dry.new_input()))
    trace.only_filled(plan.experts.rows_filled)
    each: dict[str, list[Price]] = {}
    for ran in trace.ran:
        each.setdefault(ran.name, []).append(ran.price)
    prices = {name: sum(found, Price()).times(1 / len(found)) for name, found in each.items()}
    if "attention" in prices:  # no matmul that the counter sees
        facts = plan.facts[number]
        prices["attention"] = replace(
            prices["attention"], flops=(facts.flops - facts.alone) * dry.batch.num_tokens / plan.grid.tp
        )
    if "block" in prices:
        ops = (
            ran
            for ran in trace.ran
            if ran.name not in ("block", "mlp") and [o.name for o in ran.within] in (["block"], ["block", "mlp"])
        )
        inside, attention = sum((ran.price for ran in ops), Price()), prices.get("attention", Price())
        prices["block"] += Price(attention.flops, inside.moved)
        prices["layer"] = prices["block"] + attention.times(-1)
    return Traced(trace, prices, frozenset(t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)))


@dataclass(frozen=True)
class Option:
    """A set of a block's ops to recompute: bytes saved for a micro-batch (at most, if its weight gradients wait),
    working bytes, and its cost per micro-batch."""

    recomputed: frozenset[str]
    kept: int
    working: int
    price: Price

    @property
    def cost(self) -> float:
        return self.price.cost


def price_of(use: BlockUse, each: dict[str, Price]) -> Price:
    """The price of the ops that ran again."""
    return sum((each[name].times(count) for name, count in use.reran.items()), Price())


def options(plan: Plan, number: int) -> list[Option]:
    """The sets of the block's ops that save the least for their cost, each then measured forward and backward."""
    trace = traced(plan, number)
    each = trace.prices
    names = sorted(set(each) - {"block", "layer", "mlp"})
    sets = [frozenset(c) for n in range(len(names) + 1) for c in combinations(names, n)]
    if "block" in each:
        sets.append(frozenset({"block"}))
    dry, found = DryBlock.of(plan.recomputing((frozenset(),) * len(plan.facts)), number), []
    for recomputed in _least({a: trace.kept_of(a) for a in sets}, {a: sum(each[n].cost for n in a) for a in sets}):
        dry.block.recomputed = recomputed
        use = dry.forgetting().use(precision(plan.run.train.precision).master, plan.waits(number))
        working = max(use.bytes.working, use.split.working if use.split else 0)
        found.append(Option(recomputed, use.most_kept, working, price_of(use, each)))
    return found


def _least(kept: dict[frozenset[str], int], cost: dict[frozenset[str], float]) -> list[frozenset[str]]:
    """The sets that no other beats: for each number of bytes the cheapest, unless one that saves less is as cheap."""
    stay: list[frozenset[str]] = []
    for recomputed in sorted(kept, key=lambda a: (kept[a], cost[a], len(a), sorted(a))):
        if not stay or cost[recomputed] < cost[stay[-1]]:
            stay.append(recomputed)
    return stay


def cheapest(
    blocks: Sequence[Sequence[Option]], in_flight: Sequence[int], room: float, most: int = MOST_STATES
) -> list[Option] | None:
    """One option per block with the smallest sum of costs such that sum(in_flight * kept) + the largest working bytes
    <= room; None if there is none.

    A multiple-choice knapsack (Dudzinski & Walukiewicz, "Exact methods for the knapsack problem and its
    generalizations", 1987), solved for each possible number of working bytes by going through the blocks with the sums
    that no other beats. If there are more than `most` sums, only the cheapest of those within room / most bytes of each
    other are kept: the result fits, and may cost slightly more than the optimum.
    """
    best: tuple[float, list[Option]] | None = None
    for working in sorted({o.working for block in blocks for o in block}):
        able = [[o for o in block if o.working <= working] for block in blocks]
        if all(able):
            found = _fill(able, in_flight, room - working, most)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    return best[1] if best else None


def _fill(
    blocks: Sequence[Sequence[Option]], in_flight: Sequence[int], room: float, most: int
) -> tuple[float, list[Option]] | None:
    least = [min(o.kept for o in block) * n for block, n in zip(blocks, in_flight)]
    spare = room - sum(least)  # bytes above the minimum
    if spare < 0:
        return None
    sums, costs, steps = np.zeros(1), np.zeros(1), []
    for block, n, fp8 in zip(blocks, in_flight, least):
        total = (sums[:, None] + [o.kept * n - fp8 for o in block]).ravel()
        cost = (costs[:, None] + [o.cost for o in block]).ravel()
        order = np.lexsort((cost, total))
        order = order[total[order] <= spare]
        falling = np.minimum.accumulate(cost[order])
        stays = order[np.flatnonzero(np.r_[True, falling[1:] < falling[:-1]])]  # more bytes only for less cost
        if len(stays) > most:
            slot = np.floor(total[stays] * most / spare)
            stays = stays[np.flatnonzero(np.r_[slot[1:] > slot[:-1], True])]  # the last one in a slot is its cheapest
        sums, costs = total[stays], cost[stays]
        steps.append((stays // len(block), stays % len(block)))
    chosen, at = [], len(costs) - 1
    for block, (before, option) in zip(reversed(blocks), reversed(steps)):
        chosen.append(block[option[at]])
        at = before[at]
    return float(costs[-1]), chosen[::-1]


def within_budget(plan: Plan, budget: float) -> tuple[frozenset[str], ...]:
    """What each block recomputes so that no rank is forecast to use more than `budget` bytes, at the least cost for
    each rank.

    If a rank holds several stages, each counts with its own largest number of micro-batches in flight. Raises
    ConfigError if no choice fits.
    """
    recomputed: list[frozenset[str]] = [frozenset()] * len(plan.facts)
    found: dict[BlockFacts, list[Option]] = {}
    micro_batches = plan.num_micro_batches(plan.run.train.global_batch)
    plan = plan.recomputing(recomputed)
    blocks_kept = block_uses(plan)
    uses, trace = rank_uses(plan, micro_batches, blocks_kept)
    lacking: dict[int, float] = {}
    for pp, use in enumerate(uses):
        if use.total + OVERHEAD <= budget:
            continue  # it fits as it is; what is added up below may be more than ever lies there at once
        live = {s: max((c.live for c in trace.live[pp] if c.stage == s), default=0) for s in plan.stages_of(pp)}
        mine = [(b, live[s]) for s in plan.stages_of(pp) for b in plan.stages[s]]
        for b, _ in mine:
            if plan.facts[b] not in found:
                found[plan.facts[b]] = options(plan, b)
        other = use.total - use.memory["activations"] - use.memory["working"] + OVERHEAD
        other += sum(live[s] * fixed_bytes(plan, s, blocks_kept) for s in plan.stages_of(pp))
        # offloaded blocks: one micro-batch is here, one leaves, one comes; what weight gradients wait with is here
        blocks, in_flight = (
            [found[plan.facts[b]] for b, _ in mine],
            [min(n, 3) if b in plan.offloaded and not plan.waits(b) else n for b, n in mine],
        )
        chosen = cheapest(blocks, in_flight, budget - other)
        if chosen is None:
            lacking[pp] = other + _fewest(blocks, in_flight)
        for (b, _), option in zip(mine, chosen or ()):
            recomputed[b] = option.recomputed
    if lacking:
        raise ConfigError([_too_small(plan, lacking)])
    return tuple(recomputed)


def _fewest(blocks: Sequence[Sequence[Option]], in_flight: Sequence[int]) -> float:
    """The smallest number of bytes for which some choice fits."""
    keeping = [min(block, key=lambda o: (o.kept * n, o.working)) for block, n in zip(blocks, in_flight)]
    return sum(o.kept * n for o, n in zip(keeping, in_flight)) + max(o.working for o in keeping)


def _too_small(plan: Plan, lacking: dict[int, float]) -> Problem:
    pp = max(lacking, key=lambda pp: lacking[pp])
    gib = math.ceil(lacking[pp] / 2**30 * 1000) / 1000
    rule = "must hold what a rank needs with everything recomputed"
    return Problem(
        "train.recompute_budget_gib",
        plan.run.train.recompute_budget_gib,
        rule,
        {"pp rank": pp, "GiB needed": gib},
        (gib,),
    )


@dataclass(frozen=True)
class Saving:
    """For one block and micro-batch, compared with storing everything: bytes that are not saved, and the price of what
    runs again."""

    bytes: int
    price: Price


def savings_of(plan: Plan, uses: Sequence[BlockUse]) -> list[Saving]:
    """For every block of the model, given `block_uses` of the plan."""
    stored, each = (
        block_uses(plan.recomputing((frozenset(),) * len(plan.facts))),
        dict[BlockFacts, dict[str, Price]](),
    )
    found = []
    for number, (use, all_kept) in enumerate(zip(uses, stored)):
        facts = plan.facts[number]
        if use.reran and facts not in each:
            each[facts] = traced(plan, number).prices
        found.append(Saving(all_kept.bytes.kept - use.bytes.kept, price_of(use, each.get(facts, {}))))
    return found
