"""Changes of a run that need less memory, the cheapest first, each tried by checking and forecasting the run with
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

from phalanx.base import tree
from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError
from phalanx.base.sizes import size_text
from phalanx.config.device_check import Facts
from phalanx.config.run import Run
from phalanx.forecast.check import broken_rules
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import RankUse, rank_uses
from phalanx.planning.plan import Plan, splits_backward

STATIC = ("weights", "gradients", "masters", "moments")  # kinds of memory that follow from the layout alone


@dataclass(frozen=True)
class Demand:
    """Bytes that the fullest memory must hold, and bytes that it has."""

    need: float
    room: float

    @property
    def fits(self) -> bool:
        return self.need <= self.room

    @property
    def text(self) -> str:
        return f"{size_text(self.need)} of {size_text(self.room)}"


Measure = Callable[[Plan, Sequence[RankUse]], Demand]


@dataclass(frozen=True)
class Change:
    """Overrides (and a number of ranks, if it changes), their cost, and the remaining demand."""

    overrides: dict[str, object]
    cost: str
    demand: Demand
    ranks: int | None = None

    @property
    def words(self) -> str:
        """The overrides as typed after the config."""
        ranks = [] if self.ranks is None else [f"--ranks {self.ranks}"]
        return " ".join([*ranks, *(f"{key}={_value_text(value)}" for key, value in self.overrides.items())])


def _value_text(value: object) -> str:
    return "null" if value is None else str(value)


def recompute_changes(run: Run) -> Iterator[tuple[dict[str, object], str]]:
    """Save less for backward: no weight gradients that wait, recomputation, smaller micro-batches."""
    t = run.train
    if splits_backward(run):
        yield {"layout.schedule": "auto"}, "weight gradients wait for no idle time: a larger bubble"
    budget = t.recompute_budget_gib
    if budget is not None:
        yield {"train.recompute_budget_gib": round(0.9 * budget, 2)}, "more is recomputed in backward"
    elif t.recompute == "none":
        yield {"train.recompute": "pointwise"}, "norms and MLP activations are recomputed in backward"
    if t.recompute in ("none", "pointwise") and budget is None:
        yield {"train.recompute": "selective"}, "attention is recomputed in backward"
    smaller = [m for m in range(t.micro_batch // 2, 0, -1) if t.micro_batch % m == 0]
    for m in smaller:
        yield {"train.micro_batch": m}, "smaller matmuls, more of them"
    if t.recompute != "full" and budget is None:
        full: dict[str, object] = {
            "train.recompute": "full",
            **({"train.recompute_ops": []} if t.recompute_ops else {}),
        }
        yield full, "every block is recomputed in backward"
        for m in smaller:
            yield {**full, "train.micro_batch": m}, "every block is recomputed, in smaller matmuls"


def less_offload(run: Run) -> Iterator[tuple[dict[str, object], str]]:
    """If the host is what is short."""
    now = run.train.offload_layers
    for count in dict.fromkeys((now // 2, 0)):
        if count < now:
            yield {"train.offload_layers": count}, "fewer activations wait on the host"


def more_offload(run: Run) -> Iterator[tuple[dict[str, object], str]]:
    layers, now = len(run.model.layer_blocks), run.train.offload_layers
    no_graphs: dict[str, object] = {"train.cuda_graphs": "off"} if run.train.cuda_graphs == "on" else {}
    cost = "activations are copied to the host and back" + (", without CUDA graphs" if no_graphs else "")
    for count in dict.fromkeys((layers // 2, layers)):
        if count > now:
            yield {"train.offload_layers": count, **no_graphs}, cost


def sharding_changes(run: Run) -> list[tuple[dict[str, object], str]]:
    """The ZeRO stages above the run's."""
    costs = (
        "optimizer state is cut over the data-parallel ranks; the same bytes are sent",
        "gradients are cut too; they are reduced after each micro-batch",
        "weights are cut too; they are gathered for each forward and backward",
    )
    return [({"layout.sharding": stage}, cost) for stage, cost in enumerate(costs, 1) if stage > run.layout.sharding]


def layout_changes(run: Run) -> Iterator[tuple[dict[str, object], str]]:
    """The same ranks divided differently."""
    layout, full = run.layout, {"train.recompute": "full"} if run.train.recompute_budget_gib is None else {}
    for factor in (2, 4, 8):
        yield {"layout.tp": layout.tp * factor}, "every layer communicates with more ranks"
        yield {"layout.pp": layout.pp * factor}, "more pipeline stages, a larger bubble"
        yield {"layout.tp": layout.tp * factor, **full}, "more communication, and every block is recomputed"
        yield {"layout.cp": layout.cp * factor}, "every layer's attention reads keys of more ranks"


def changes(run: Run) -> Iterator[tuple[dict[str, object], str]]:
    """Overrides that need less memory, the cheapest first, and what each costs."""
    sharding = sharding_changes(run)
    yield from less_offload(run)
    yield from sharding
    yield from recompute_changes(run)
    yield from more_offload(run)
    for overrides, cost in recompute_changes(run) if sharding else ():
        yield {"layout.sharding": 3, **overrides}, f"{sharding[-1][1]}; {cost}"
    yield from layout_changes(run)


@dataclass
class Search:
    """Tries changes of one run. What its layout alone needs is remembered, so that most changes that cannot be enough
    are not forecast."""

    run: Run
    world: int
    measure: Measure
    static: dict[tuple[str, int], Demand] = field(default_factory=dict)

    def first_that_fits(self, fewer_ranks: bool = False) -> Change | None:
        """The cheapest change on the same number of ranks. fewer_ranks: also on fewer of them, if ranks share one
        memory."""
        for overrides, cost in changes(self.run):
            demand = self.demand(overrides)
            if demand is not None and demand.fits:
                return Change(overrides, cost, demand)
        return self._on_fewer_ranks() if fewer_ranks else None

    def _on_fewer_ranks(self) -> Change | None:
        layout = self.run.layout
        whole = layout.tp * layout.cp * layout.pp
        copies = self.world // whole
        for fewer in (n for n in range(copies - 1, 0, -1) if copies % n == 0):
            demand = self.demand({}, fewer * whole)
            if demand is not None and demand.fits:
                return Change(
                    {}, "fewer copies of the model, the same batch in more micro-batches", demand, fewer * whole
                )
        return None

    def on_more_ranks(self) -> Change | None:
        """The smallest number of ranks, in doublings, on which sharding each layer, or splitting the layers, further
        fits."""
        for factor in (2, 4, 8):
            for key, now in (("layout.tp", self.run.layout.tp), ("layout.pp", self.run.layout.pp)):
                demand = self.demand({key: now * factor}, self.world * factor)
                if demand is not None and demand.fits:
                    return Change({key: now * factor}, "more ranks", demand, self.world * factor)
        return None

    def demand(self, overrides: dict[str, object], world: int | None = None) -> Demand | None:
        """The demand of the run with these overrides; None if the config would be invalid, or if its layout alone is
        known not to fit."""
        run, world = self.run, world or self.world
        for key, value in overrides.items():
            run = tree.replace_at(run, key, value)
        known = self.static.get((repr(run.layout), world))
        if (known is not None and not known.fits) or broken_rules(run, Facts(world_size=world, files=False)):
            return None
        try:
            plan = make_plan(run, world)
        except ConfigError:  # a recompute budget that no choice fits
            return None
        uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
        if known is None:
            self.static[repr(run.layout), world] = self.measure(plan, [always_there(use) for use in uses])
        return self.measure(plan, uses)


def always_there(use: RankUse) -> RankUse:
    """What a rank holds whatever is recomputed, offloaded or divided into micro-batches."""
    memory = {kind: use.memory[kind] - use.passing.get(kind, 0) for kind in STATIC}
    return RankUse(memory, {}, {}, 0, use.numel)


def way_out(search: Search, fewer_ranks: bool = False) -> str:
    """A sentence: the cheapest change that fits on these ranks, or on more, or that there is none."""
    found = search.first_that_fits(fewer_ranks)
    if found is not None:
        return f"the cheapest change that fits: {found.words} ({found.cost}; then {found.demand.text})"
    more = search.on_more_ranks()
    here = f"no change fits on {search.world} rank{'s' if search.world > 1 else ''}"
    if more is None:
        return f"{here} nor on 8 times as many with layout.tp or layout.pp"
    overrides = " ".join(f"{key}={value}" for key, value in more.overrides.items())
    return f"{here}; the cheapest on more: {more.ranks} ranks with {overrides} ({more.demand.text})"
