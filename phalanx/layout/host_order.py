"""The order of hosts that keeps the axes with much traffic on near links: the cost of an order, and the best one found.

Ranks are numbered host by host, so the order of hosts decides which groups of the grid cross which links. The cost of
an order is the time of its exchanges per step: for each axis, the bytes that a rank sends times the seconds per byte
of the slowest link in its group, of the slowest group, because a step waits for it. It assumes that a group's exchange
goes round a ring in rank order (ep: from each to each), and that exchanges of different axes follow one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import factorial, prod

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.layout.grid import Coords, Grid
from phalanx.layout.positions import Positions

EXACT = 40_320  # orders that are all tried, those of 8 hosts at least; with more, a local search
MOST_SWEEPS = 20  # of the local search, each over all pairs of hosts
TIE = 1e-3  # weight of the mean group beside the slowest one: among equal orders, the one with fewer slow groups
Edges = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second that a rank sends over a link, one way: inside a host ("host"), inside a domain of each level,
    and between the outermost domains ("cluster")."""

    of: Mapping[str, float]

    def seconds_per_byte(self, level: str) -> float:
        return 1.0 / self.of[level]


@dataclass(frozen=True)
class AxisTraffic:
    """grid of the run; sent: for each pipeline rank, the bytes that one of its ranks sends in a step, by axis (tp, cp,
    dp, pp, ep); wraps: whether the last stage sends to the first (interleaved schedules)."""

    grid: Grid
    sent: Sequence[Mapping[str, float]]
    wraps: bool = False


@dataclass(frozen=True)
class HostOrder:
    """The order found: `hosts`, and the seconds per step by axis of the given order and of this one. exact: no order is
    better."""

    hosts: tuple[str, ...]
    before: dict[str, float]
    after: dict[str, float]
    exact: bool

    @property
    def seconds_before(self) -> float:
        return sum(self.before.values())

    @property
    def seconds_after(self) -> float:
        return sum(self.after.values())


@dataclass(frozen=True)
class _Groups:
    """The groups of an axis as places of hosts: row g of `one` and `two` are the ends of its links (padded by
    repeating the first), `sent` its bytes."""

    axis: str
    one: NDArray[np.int64]
    two: NDArray[np.int64]
    sent: NDArray[np.float64]


class ExchangeCost:
    """The cost of orders of some hosts, each with `per_host` ranks, for one traffic."""

    def __init__(
        self, hosts: Sequence[str], positions: Positions, speeds: LinkSpeeds, traffic: AxisTraffic, per_host: int
    ):
        if len(hosts) * per_host != traffic.grid.world:
            raise ValueError(f"{len(hosts)} hosts of {per_host} ranks are not {traffic.grid.world} ranks")
        self.hosts = tuple(hosts)
        levels = {(a, b): positions.shared(a, b) for a in hosts for b in hosts}
        price = {level: speeds.seconds_per_byte(level) for level in set(levels.values())}
        self._seconds = np.array([[price[levels[a, b]] for b in hosts] for a in hosts])
        nowhere = ("",) * len(positions.levels)
        self.alike = [positions.of.get(host, nowhere) for host in hosts]
        self._groups = list(_groups(traffic, per_host))

    def by_axis(self, order: Sequence[int]) -> dict[str, float]:
        """Seconds per step of each axis' exchanges; order: numbers of hosts."""
        return {groups.axis: float(times.max()) for groups, times in self._times(order)}

    def value(self, order: Sequence[int]) -> float:
        """What the search makes small: the seconds of the slowest groups, and a little of the mean ones."""
        return float(sum(times.max() + TIE * times.mean() for _, times in self._times(order)))

    def _times(self, order: Sequence[int]) -> Iterator[tuple[_Groups, NDArray[np.float64]]]:
        at = np.asarray(order)
        for groups in self._groups:
            yield groups, self._seconds[at[groups.one], at[groups.two]].max(axis=1) * groups.sent


def _groups(traffic: AxisTraffic, per_host: int) -> Iterator[_Groups]:
    """For each axis that sends anything, its distinct groups of hosts."""
    grid = traffic.grid
    for axis in ("tp", "cp", "dp", "pp", "ep"):
        found: dict[Edges, float] = {}
        for rank in range(grid.world):
            at = grid.coords(rank)
            nbytes = max(float(of.get(axis, 0.0)) for of in (traffic.sent if axis == "pp" else [traffic.sent[at.pp]]))
            if nbytes <= 0 or not _is_first(grid, at, axis):
                continue
            members = _members(grid, at, axis)
            if len(members) == 1:
                continue
            links = frozenset((a // per_host, b // per_host) for a, b in _links(axis, members, traffic.wraps))
            found[links] = max(nbytes, found.get(links, 0.0))
        if found:
            yield _padded(axis, found)


def host_links(traffic: AxisTraffic, per_host: int) -> dict[str, set[tuple[int, int]]]:
    """By axis, the links over which hosts send something: (from, to) as places of hosts, those inside a host too."""
    return {
        groups.axis: set(zip(groups.one.ravel().tolist(), groups.two.ravel().tolist()))
        for groups in _groups(traffic, per_host)
    }


def _is_first(grid: Grid, at: Coords, axis: str) -> bool:
    """Whether this is the first rank of its group along an axis."""
    if axis == "ep":
        inside = grid.expert_coords(at)
        return inside.ep == inside.etp == 0
    if axis == "dp":
        return at.dp == at.cp == 0
    return getattr(at, axis) == 0


def _members(grid: Grid, at: Coords, axis: str) -> tuple[int, ...]:
    """The ranks that exchange with each other along an axis, this one among them, in rank order."""
    if axis == "ep":
        return grid.expert_ranks(at, ("ep", "etp"))
    if axis == "dp":  # gradients are summed over dp x cp
        return grid.ranks(at, ("dp", "cp"))
    return grid.ranks(at, (axis,))  # type: ignore[arg-type]


def _links(axis: str, members: Sequence[int], wraps: bool) -> list[tuple[int, int]]:
    if axis == "ep":
        return [(a, b) for a in members for b in members if a < b]
    following = list(zip(members, members[1:]))
    return following if axis == "pp" and not wraps else [*following, (members[-1], members[0])]


def _padded(axis: str, found: Mapping[Edges, float]) -> _Groups:
    longest = max(map(len, found))
    rows = [(sorted(links) + [min(links)] * longest)[:longest] for links in found]
    ends = np.array(rows, dtype=np.int64)
    return _Groups(axis, ends[:, :, 0], ends[:, :, 1], np.array(list(found.values())))


def order_hosts(cost: ExchangeCost, keep_first: bool = False) -> HostOrder:
    """The best order of the hosts: exact where few orders differ, else the best of several hierarchical orders after a
    local search. Never worse than the given one.

    keep_first: the first host stays first, because the others meet there
    """
    given = list(range(len(cost.hosts)))
    fixed = 1 if keep_first else 0
    exact = _distinct(cost.alike[fixed:]) <= EXACT
    if exact:
        best = min(_all_orders(cost, fixed), key=cost.value, default=given)
    else:
        starts = sorted(_starts(cost, fixed), key=cost.value)
        best = min((_improved(cost, start, fixed) for start in (*starts[:2], given)), key=cost.value)
    before, after = cost.by_axis(given), cost.by_axis(best)
    if sum(after.values()) > sum(before.values()) or cost.value(best) >= cost.value(given):
        best, after = given, before
    return HostOrder(tuple(cost.hosts[i] for i in best), before, after, exact)


def _distinct(alike: Sequence[tuple[str, ...]]) -> float:
    """How many orders differ, where hosts of one innermost domain are alike."""
    if len(alike) > 20:
        return float("inf")
    return factorial(len(alike)) / prod(factorial(n) for n in Counter(alike).values())


def _all_orders(cost: ExchangeCost, fixed: int) -> Iterator[list[int]]:
    """Each order once, of those in which hosts that are alike keep their order."""
    waiting: dict[tuple[str, ...], list[int]] = {}
    for i in range(fixed, len(cost.hosts)):
        waiting.setdefault(cost.alike[i], []).append(i)

    def rest(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(cost.hosts):
            yield list(order)
            return
        for hosts in waiting.values():
            if hosts:
                host = hosts.pop(0)
                yield from rest([*order, host])
                hosts.insert(0, host)

    yield from rest(list(range(fixed)))


def _starts(cost: ExchangeCost, fixed: int) -> Iterator[list[int]]:
    """Orders in which each domain's hosts fill places that are near in the grid: the places in every order of the axes,
    the domains largest first."""
    sizes = Counter(domain[: n + 1] for domain in cost.alike for n in range(len(domain)))

    def nearness(host: int) -> list[tuple[int, str]]:
        domain = cost.alike[host]
        return [(-sizes[domain[: n + 1]], name) for n, name in enumerate(domain)]

    near = sorted(range(fixed, len(cost.hosts)), key=nearness)
    for places in _place_orders(cost, fixed):
        order = list(range(len(cost.hosts)))
        for place, host in zip(places, near):
            order[place] = host
        yield order


def _place_orders(cost: ExchangeCost, fixed: int) -> Iterator[list[int]]:
    """Places of hosts grouped along one axis after another, for every order of the axes that cross hosts."""
    size = len(cost.hosts)
    components = {groups.axis: _components(groups, size) for groups in cost._groups}
    crossing = [axis for axis, of in components.items() if len(set(of)) < size]
    for axes in permutations(crossing):
        joined = list(range(size))
        keys: list[list[int]] = []
        for axis in axes:  # the innermost first: places of one group, then groups of groups
            joined = _merged(joined, components[axis])
            keys.append(list(joined))
        yield sorted(range(fixed, size), key=lambda place: [*(key[place] for key in reversed(keys)), place])


def _components(groups: _Groups, size: int) -> list[int]:
    """For each place, the first place of its group along an axis."""
    of = list(range(size))
    for one, two in zip(groups.one.tolist(), groups.two.tolist()):
        members = set(one) | set(two)
        first = min(of[m] for m in members)
        joined = {of[m] for m in members}
        of = [first if o in joined else o for o in of]
    return of


def _merged(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The finest division that both are finer than."""
    of = list(a)
    for group in set(b):
        joined = {of[i] for i in range(len(b)) if b[i] == group}
        first = min(joined)
        of = [first if o in joined else o for o in of]
    return of


def _improved(cost: ExchangeCost, start: Sequence[int], fixed: int) -> list[int]:
    """Swap pairs of hosts as long as that makes the cost smaller."""
    order, best = list(start), cost.value(start)
    for _ in range(MOST_SWEEPS):
        before = best
        for i in range(fixed, len(order)):
            for j in range(i + 1, len(order)):
                if cost.alike[order[i]] == cost.alike[order[j]]:
                    continue
                order[i], order[j] = order[j], order[i]
                value = cost.value(order)
                if value < best * (1 - 1e-12):
                    best = value
                else:
                    order[i], order[j] = order[j], order[i]
        if best >= before:
            break
    return order


def placed_rank(rank: int, per_host: int, given: Sequence[str], order: Sequence[str]) -> int:
    """The rank number, under the order found, of the process that a scheduler numbered `rank` under its own order of
    the hosts."""
    place, local = divmod(rank, per_host)
    return order.index(given[place]) * per_host + local
