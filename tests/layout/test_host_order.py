"""The order of hosts: its cost against a definition of its own, exact where all orders can be tried, near the best at
1,024 GPUs, and never worse than the order given. And positions, read from what schedulers write."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from phalanx.layout.grid import Grid
from phalanx.layout.host_order import AxisTraffic, ExchangeCost, LinkSpeeds, order_hosts, placed_rank
from phalanx.layout.positions import (
    BadPositions,
    Positions,
    expand_hosts,
    from_domains,
    from_node_labels,
    from_topology_addr,
    from_topology_conf,
)

SPEEDS = LinkSpeeds({"host": 450e9, "rack": 100e9, "block": 50e9, "cluster": 12.5e9})
SENT = {"tp": 20e9, "cp": 4e9, "dp": 5e9, "pp": 1e9}


def in_blocks(count: int, block: int, rack: int = 0) -> Positions:
    of = {f"n{i}": (f"b{i // block}", *([f"r{i // rack}"] if rack else [])) for i in range(count)}
    return Positions(("block", "rack") if rack else ("block",), of)


def seconds(hosts: list[str], positions: Positions, traffic: AxisTraffic, per_host: int) -> float:
    """The cost by its definition: rank by rank, each axis' slowest group."""
    grid, total = traffic.grid, 0.0

    def price(a: int, b: int) -> float:
        one, two = hosts[a // per_host], hosts[b // per_host]
        if one == two:
            return 1 / SPEEDS.of["host"]
        level = "cluster"
        for name, x, y in zip(positions.levels, positions.of[one], positions.of[two]):
            if x != y:
                break
            level = name
        return 1 / SPEEDS.of[level]

    for axis in ("tp", "cp", "dp", "pp", "ep"):
        worst = 0.0
        for rank in range(grid.world):
            at = grid.coords(rank)
            if axis == "ep":
                group = grid.expert_ranks(at, ("ep", "etp"))
                links = [(a, b) for a in group for b in group if a != b]
            else:
                group = grid.ranks(at, ("dp", "cp") if axis == "dp" else (axis,))
                links = list(zip(group, group[1:] + group[:1]))
                links = links[:-1] if axis == "pp" else links
            nbytes = max(of.get(axis, 0.0) for of in traffic.sent) if axis == "pp" else traffic.sent[at.pp].get(axis, 0)
            if len(group) > 1:
                worst = max(worst, nbytes * max(price(a, b) for a, b in links))
        total += worst
    return total


GRIDS = [
    Grid(pp=2, dp=4),
    Grid(dp=4, tp=2),
    Grid(pp=4, dp=2),
    Grid(pp=2, cp=2, dp=2),
    Grid(dp=8, ep=4),
    Grid(pp=2, dp=2, tp=4),
]


@pytest.mark.parametrize("number", range(len(GRIDS)))
def test_no_order_of_eight_hosts_is_better(number):
    pick, grid = random.Random(number), GRIDS[number]
    per_host = grid.world // 8
    hosts = [f"n{i}" for i in range(8)]
    of = {host: (f"b{pick.randrange(2)}", f"r{pick.randrange(2)}") for host in hosts}
    positions = Positions(("block", "rack"), of)
    sent = [{axis: pick.uniform(0.5, 2) * n for axis, n in {**SENT, "ep": 3e9 * (grid.ep > 1)}.items()}] * grid.pp
    traffic = AxisTraffic(grid, sent)
    cost = ExchangeCost(hosts, positions, SPEEDS, traffic, per_host)
    for _ in range(20):
        order = pick.sample(range(8), 8)
        named = [hosts[i] for i in order]
        assert sum(cost.by_axis(order).values()) == pytest.approx(
            seconds(named, positions, traffic, per_host), rel=1e-12
        )
    found = order_hosts(cost)
    assert found.exact and sorted(found.hosts) == hosts
    # hosts of one rack are alike: each different order of racks once
    every = {tuple(of[hosts[i]] for i in order): order for order in permutations(range(8))}
    best = min(sum(cost.by_axis(order).values()) for order in every.values())
    assert found.seconds_after == pytest.approx(best, rel=1e-12)
    assert found.seconds_after == pytest.approx(seconds(list(found.hosts), positions, traffic, per_host), rel=1e-12)
    kept = order_hosts(cost, keep_first=True)
    fixed = (
        min(sum(cost.by_axis(order).values()) for order in permutations(range(8)) if order[0] == 0) if number < 2 else 0
    )
    assert kept.hosts[0] == hosts[0] and (number >= 2 or kept.seconds_after == pytest.approx(fixed, rel=1e-12))


def at_scale(grid: Grid, seed: int) -> None:
    hosts = [f"n{i}" for i in range(128)]
    positions, traffic = in_blocks(128, 32), AxisTraffic(grid, [SENT] * grid.pp)
    shuffled = random.Random(seed).sample(hosts, 128)
    found = order_hosts(ExchangeCost(shuffled, positions, SPEEDS, traffic, 8))
    best = sum(ExchangeCost(hosts, positions, SPEEDS, traffic, 8).by_axis(range(128)).values())
    assert sorted(found.hosts) == sorted(hosts)
    assert found.seconds_after <= 1.01 * best < found.seconds_before


def test_1024_gpus_in_four_blocks():
    """A stage of the pipeline fills a block: hosts in the order of their blocks are the best there is."""
    at_scale(Grid(pp=4, dp=32, tp=8), 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "grid", [Grid(pp=4, dp=32, tp=8), Grid(pp=8, dp=16, tp=8), Grid(pp=4, dp=8, cp=4, tp=8)], ids=str
)
def test_1024_gpus_in_four_blocks_of_many_grids(grid, seed):
    at_scale(grid, seed)


def test_never_worse_than_the_order_given():
    """Blocks of odd sizes, grids that do not fit them, good orders and bad ones."""
    pick = random.Random(7)
    for number in range(12):
        grid = pick.choice([Grid(pp=3, dp=8), Grid(dp=24), Grid(pp=2, dp=6, tp=2), Grid(pp=4, dp=3, cp=2)])
        hosts = [f"n{i}" for i in range(24)]
        sizes = [5] * 5 if number % 2 else [1, 2, 8, 13]
        blocks = [f"b{i}" for i, size in enumerate(sizes) for _ in range(size)][:24]
        positions = Positions(("block",), {host: (block,) for host, block in zip(hosts, blocks)})
        given = hosts if number % 3 else pick.sample(hosts, 24)
        traffic = AxisTraffic(grid, [{axis: pick.uniform(0, 2) * n for axis, n in SENT.items()}] * grid.pp)
        found = order_hosts(ExchangeCost(given, positions, SPEEDS, traffic, 1), keep_first=bool(number % 2))
        assert found.seconds_after <= found.seconds_before and sorted(found.hosts) == sorted(hosts)
        assert not number % 2 or found.hosts[0] == given[0]
        after = seconds(list(found.hosts), positions, traffic, 1)
        assert found.seconds_after == pytest.approx(after, rel=1e-12)


def test_ranks_follow_their_hosts():
    given, order = ["a", "b", "c"], ["b", "c", "a"]
    ranks = [placed_rank(rank, 2, given, order) for rank in range(6)]
    assert ranks == [4, 5, 0, 1, 2, 3]


def test_host_lists_of_slurm():
    assert expand_hosts("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_hosts("r[0-1]n[08-09]-ib") == ["r0n08-ib", "r0n09-ib", "r1n08-ib", "r1n09-ib"]
    for broken in ("gpu[1-", "gpu[3-1]", "gpu[a-b]", "gpu[0-9999999]"):
        with pytest.raises(BadPositions, match="is no host list"):
            expand_hosts(broken)


# of https://slurm.schedmd.com/topology.html, shortened
TREE = """# two leaves below a spine, and a core above
SwitchName=s0 Nodes=tux[0-1]
SwitchName=s1 Nodes=tux[2-3]
SwitchName=s2 Nodes=tux[4-5] # another spine
SwitchName=spine0 Switches=s[0-1]
SwitchName=spine1 Switches=s2
SwitchName=core Switches=spine[0-1] LinkSpeed=100
"""


def test_topology_conf_of_a_tree():
    found = from_topology_conf(TREE)
    assert found.levels == ("rack", "switch")  # that all are below the core says nothing
    assert [found.shared("tux0", other) for other in ("tux0", "tux1", "tux2", "tux4")] == [
        "host",
        "switch",
        "rack",
        "cluster",
    ]


def test_what_scontrol_prints_of_a_tree():
    """SLURM 22.05 prints the hosts below a switch on its line, whatever is between."""
    found = from_topology_conf(
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1,3]\n"
        "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[2,4-5]\n"
        "SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-5] Switches=s[1-2]\n"
    )
    assert (
        found.levels == ("switch",) and found.shared("n1", "n3") == "switch" and found.shared("n1", "n2") == "cluster"
    )


def test_topology_conf_of_blocks():
    found = from_topology_conf("BlockName=b1 Nodes=node[01-16]\nBlockName=b2 Nodes=node[17-32]\nBlockSizes=16,32\n")
    assert found.shared("node01", "node16") == "block" and found.shared("node16", "node17") == "cluster"


def test_switches_in_a_circle_are_refused():
    with pytest.raises(BadPositions, match="circle"):
        from_topology_conf("SwitchName=a Switches=b,c\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1\n")


def test_slurm_topology_addr():
    """From the root to the host, as SLURM's page of variables has it."""
    addresses = {f"n{i}": f"core.leaf{i // 2}.n{i}" for i in range(4)}
    found = from_topology_addr(addresses)
    assert found.shared("n0", "n1") == "switch" and found.shared("n1", "n2") == "cluster"


def test_labels_of_kubernetes_nodes():
    found = from_node_labels(
        {
            f"n{i}": {
                "cloud.google.com/gce-topology-block": f"b{i // 2}",
                "nvidia.com/gpu.clique": f"c{i // 2}.{i}",
                "kubernetes.io/os": "linux",
            }
            for i in range(4)
        }
    )
    assert found.levels == ("block", "nvlink")
    assert found.shared("n0", "n1") == "block" and found.shared("n0", "n2") == "cluster"


def test_positions_that_a_person_writes():
    found = from_domains({"gpu[01-02]": {"block": "x"}, "gpu03": {"block": "y"}})
    assert found.shared("gpu01", "gpu02") == "block" and found.shared("gpu02", "gpu03") == "cluster"
    with pytest.raises(BadPositions, match="'pod' is none of the levels"):
        from_domains({"a": {"pod": "1"}})
