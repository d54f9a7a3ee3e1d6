"""What a preflight makes of measurements: who is slow and who only met somebody slow, at sizes that no test machine
has; and its table."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from math import ceil, exp, log2
from pathlib import Path
from typing import Any

import pytest

from phalanx.base.errors import BadNode
from phalanx.cli.preflight import agent_start
from phalanx.config.read import load_run
from phalanx.layout.grid import Grid
from phalanx.preflight.check import Finding, Looks, NodeView, Peer, differing
from phalanx.preflight.checks.axes import judged as axes_judged
from phalanx.preflight.checks.axes import links_of
from phalanx.preflight.checks.clock import skewed
from phalanx.preflight.checks.compute import Compute
from phalanx.preflight.checks.data_files import DataFiles, evenly
from phalanx.preflight.checks.gpu import Gpu, read_gpus, read_xids
from phalanx.preflight.checks.links import LOOKS, Links, Rates, judged
from phalanx.preflight.checks.names import by_reporter
from phalanx.preflight.checks.placement import NodeOrder
from phalanx.preflight.first_seconds import lines
from phalanx.preflight.report import PreflightReport
from phalanx.preflight.robust import slow, threshold, z_scores
from phalanx.preflight.rounds import disjoint, partners, tournament
from tests.preflight.ills import GOOD_GPU, GPU

SIZES = (3, 4, 5, 8, 9, 16, 64, 100)


def names(count: int) -> Looks:
    return Looks([f"n{i}" for i in range(count)])


@pytest.mark.parametrize("count", [2, *SIZES])
def test_a_tournament_has_few_rounds_and_no_partner_twice(count):
    rounds = tournament(count)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) and all(a < b < count for a, b in met)
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)) == count - count % 2
    if count > 8:
        assert len(rounds) == ceil(log2(count)) + 1
    else:
        assert len(met) == count * (count - 1) // 2


def test_pairs_that_are_measured_alone():
    rounds = disjoint([(0, 1), (1, 2), (2, 3), (4, 5)])
    assert sorted(pair for pairs in rounds for pair in pairs) == [(0, 1), (1, 2), (2, 3), (4, 5)]
    assert all(len({n for pair in pairs for n in pair}) == 2 * len(pairs) for pairs in rounds)


def measured(count: int, seed: int, cables: dict[int, float], links: dict[tuple[int, int], float]) -> Rates:
    """A tournament's rates: of two nodes the slower cable's, with noise that only makes measurements slower."""
    pick = random.Random(seed)
    rates: Rates = {}
    for pairs in tournament(count):
        for a, b in pairs:
            for link in ((a, b), (b, a)):
                best = 1e9 * min(cables.get(a, 1.0), cables.get(b, 1.0), links.get(link, 1.0))
                rates[link] = [best * exp(-abs(pick.gauss(0, 0.05))) for _ in range(3)]
    return rates


@pytest.mark.parametrize("count", SIZES)
def test_one_slow_cable_is_named_and_not_its_victims(count):
    for seed in range(20):
        bad = seed % count
        found = judged("links", measured(count, seed, {bad: 0.1}, {}), names(count))
        assert [f.nodes for f in found] == [(bad,)], (seed, found)
        assert "sends and receives at" in found[0].text and 0.05 < found[0].figures["ratio"] < 0.15


@pytest.mark.parametrize("count", SIZES)
def test_one_slow_link_is_named_by_its_ends(count):
    for seed in range(20):
        pairs = sorted(measured(count, 0, {}, {}))
        a, b = pairs[seed * 7 % len(pairs)]
        found = judged("links", measured(count, seed, {}, {(a, b): 0.1}), names(count))
        assert [f.nodes for f in found] == [(min(a, b), max(a, b))] and f"from n{a}" in found[0].text, (seed, found)


@pytest.mark.parametrize("count", [2, *SIZES])
def test_good_links_are_not_named(count):
    """What looks slow by chance is measured again before it is named; here even that is hardly ever needed."""
    alarms = [judged("links", measured(count, seed, {}, {}), names(count)) for seed in range(100)]
    assert sum(map(bool, alarms)) <= 2


def looked(count: int, measure: Callable[[int], Rates]) -> Looks:
    """All looks of the check at rates that are `measure` of the number of the look."""
    check, looks = Links(), names(count)
    answers: list[tuple[Any, dict[int, Any]]] = []
    while (order := check.next_order(Looks(looks.names, answers))) is not None:
        rates = measure(order[3])
        said = {pair[order[1]]: [pair[1 - order[1]], rates[pair[order[1]], pair[1 - order[1]]]] for pair in order[0]}
        answers.append((order, said))
    return Looks(looks.names, answers)


def test_suspects_are_measured_again_and_cleared():
    """Those alone, as often as they look slow, and no oftener than that."""
    looks = looked(4, lambda look: measured(4, look, {2: 0.1} if look < 2 else {}, {}))
    assert [order[3] for order, _ in looks.answers] == [*[0] * 6, *[1] * 6, *[2] * 6]
    asked_again = {tuple(pair) for order, _ in looks.answers[6:] for pair in order[0]}
    assert asked_again == {(0, 2), (1, 2), (2, 3)} and Links().judge(looks) == []
    [one] = Links().judge(found := looked(4, lambda look: measured(4, look, {2: 0.1}, {})))
    assert one.nodes == (2,) and max(order[3] for order, _ in found.answers) == LOOKS - 1


def test_a_machine_that_does_something_else_names_no_link_and_hides_none():
    """One link in ten has a third of its rate for the whole of a look: with two looks there were ten alarms."""

    def busy(seed: int, links: dict[tuple[int, int], float]) -> list[tuple[int, ...]]:
        def rates(look: int) -> Rates:
            pick = random.Random(f"{seed} {look}")
            clean = measured(4, 10 * seed + look, {}, links)
            return {
                link: [r * part for r in of] for link, of in clean.items() for part in [pick.choice([0.3, *[1] * 9])]
            }

        return [found.nodes for found in Links().judge(looked(4, rates))]

    assert sum(map(bool, (busy(seed, {}) for seed in range(100)))) <= 1
    assert [busy(seed, {(1, 3): 0.1}) for seed in range(20)] == [[(1, 3)]] * 20


def test_thresholds_are_those_of_the_spread():
    """The same distance is an outlier among equal values, and none among scattered ones."""
    equal = {i: 100.0 + 0.1 * (i % 3) for i in range(20)} | {20: 90.0}
    scattered = {i: 100.0 + 10 * (i % 5) for i in range(20)} | {20: 90.0}
    assert z_scores(equal, 0.0)[20] < -threshold(21) < z_scores(scattered, 0.0)[20]
    assert slow({0: [1.0], 1: [0.1]}) == {}  # of two, nobody knows which is the odd one
    assert set(slow({i: [1.0, 0.99] for i in range(5)} | {5: [0.8, 0.79]})) == {5}
    assert slow({i: [1.0, 0.6] for i in range(5)} | {5: [0.8, 0.5]}) == {}  # noise of this size hides it
    assert threshold(3) == 3.5 < threshold(10_000)


def test_a_slow_ring_of_an_axis():
    links = links_of(Grid(dp=8), 1)["dp"]
    assert links == {(i, (i + 1) % 8) for i in range(8)}
    assert links_of(Grid(pp=2, dp=2, tp=8), 8) == {"dp": {(0, 1), (1, 0), (2, 3), (3, 2)}, "pp": {(0, 2), (1, 3)}}
    good = {link: [1e9, 0.98e9] for link in links}
    [one] = axes_judged("axes", "dp", good | {(3, 4): [1e8], (4, 5): [1e8]}, names(8))
    assert one.nodes == (4,) and one.text.startswith("dp: ")
    [one] = axes_judged("axes", "dp", good | {(3, 4): [1e8]}, names(8))
    assert one.nodes == (3, 4) and axes_judged("axes", "dp", good, names(8)) == []


def clocks(*offsets: float, half: float = 1e-4) -> list[Finding]:
    looks = Looks([f"n{i}" for i in range(len(offsets))], [(0, {i: [o, half] for i, o in enumerate(offsets)})])
    return skewed("clock", looks)


def test_clocks():
    assert clocks(0, 1e-4, -1e-4, 5e-5) == []
    [one] = clocks(0, 1e-4, 30.0, -1e-4)
    assert one.nodes == (2,) and one.severity == "bad" and "30 s ahead of" in one.text
    [one] = clocks(-30.0, 0, 0, 1e-4)  # the node that the others are compared with
    assert one.nodes == (0,) and "behind" in one.text
    [one] = clocks(0, 1e-4, 0.05, -1e-4)
    assert one.severity == "warning"
    [one] = clocks(0, 5)
    assert one.nodes == (0, 1) and clocks(0, 0.5) == []


def test_who_is_to_blame_for_a_path():
    all_of_c = {n: {"n2": [2, "no"]} for n in (0, 1, 3)} | {2: {}}
    assert [f.nodes for f in by_reporter("ports", names(4), all_of_c)] == [(2,)]
    one_way = {0: {}, 1: {}, 2: {"n1": [1, "no"]}, 3: {}}
    assert [f.nodes for f in by_reporter("ports", names(4), one_way)] == [(2,)]
    assert [f.nodes for f in by_reporter("ports", names(2), {0: {"n1": [1, "no"]}, 1: {}})] == [(0,)]


def test_the_odd_one_is_named():
    assert [f.nodes for f in differing("x", "y", {0: 1, 1: 1, 2: 2})] == [(2,)]
    assert [f.nodes for f in differing("x", "y", {0: 1, 1: 2, 2: 2})] == [(0,)]
    assert [f.nodes for f in differing("x", "y", {0: 1, 1: 2})] == [(1,)] and differing("x", "y", {0: 1}) == []


def gpus(*changes: dict[str, str]) -> Looks:
    said = {i: {"gpus": read_gpus(GPU.format(**GOOD_GPU | change)), "xids": []} for i, change in enumerate(changes)}
    return Looks([f"n{i}" for i in said], [(0, said)])


def test_what_nvidia_smi_says():
    [gpu] = read_gpus(GPU.format(**GOOD_GPU))
    assert gpu["power limit"] == 700 and gpu["max clock"] == 1980 and gpu["memory errors"] == 0 and not gpu["slowed"]
    assert Gpu().judge(gpus({}, {}, {})) == []
    [one] = Gpu().judge(gpus({}, {"cap": "600.00"}, {}))
    assert one.nodes == (1,) and "power cap 600 W, of most GPUs 700 W" in one.text
    # capped on all nodes: somebody meant it
    assert {f.severity for f in Gpu().judge(gpus(*[{"cap": "600.00"}] * 3))} == {"warning"}
    # of a driver of 2023 (telegraf's recorded answer of an A100): no remapped rows while MIG is on
    old = GPU.format(**GOOD_GPU).replace("<remapped_rows>", "<remapped_rows>N/A</remapped_rows><unused>")
    assert read_gpus(old.replace("</remapped_rows>\n<gpu_p", "</unused>\n<gpu_p"))[0]["remap pending"] is False


def test_xids_of_hardware():
    """Lines as NVIDIA's page of XIDs has them. 31 and 43 are those of programs."""
    log = "[1.0] NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
    log += "[2.0] NVRM: Xid (PCI:0000:65:00): 31, pid=7, MMU Fault\n[3.0] NVRM: Xid (PCI:0000:65:00): 43, pid=7\n"
    assert read_xids(log) == [79] and read_xids("") == []


def report(count: int, *findings: Finding) -> PreflightReport:
    return PreflightReport([f"node-{i}" for i in range(count)], findings, {"links": "median 5 GB/s"}, 12.3)


def test_the_table_and_the_json():
    long = "a reason that goes on and on, with more words than a line of a terminal has room for, and then some"
    made = report(4, Finding("links", (1, 3), long), Finding("clock", (2,), "ahead", "warning"))
    assert max(map(len, made.text.splitlines())) <= 80 and made.bad == [1, 3]
    assert [made.verdict(n) for n in range(4)] == ["ok", "bad", "warning", "bad"]
    values = json.loads(made.as_json())
    assert values["findings"][0]["nodes"] == ["node-1", "node-3"] and values["nodes"][2]["verdict"] == "warning"
    assert "1,000 nodes are ok" in report(1000).text and report(1000).text.count("\n") < 8


def test_hosts_to_start_with():
    slow = Finding("links", (1, 2), "slow")
    assert report(5).starters(1) == ["node-0", "node-1", "node-2", "node-3"]
    assert report(5, Finding("ports", (0,), "closed")).starters(1) == ["node-1", "node-2", "node-3", "node-4"]
    # one end of a slow link is enough; the end that has two of them
    assert report(5, slow).starters(1) == ["node-0", "node-1", "node-3", "node-4"]
    assert report(5, slow, Finding("links", (1, 4), "slow")).starters(1) == ["node-0", "node-2", "node-3", "node-4"]
    with pytest.raises(BadNode, match="only 1 are spares"):
        report(5, Finding("ports", (0,), "closed"), Finding("ports", (3,), "closed")).starters(1)


def test_the_figures_of_gpus():
    """As four H200s gave them with a busy loop on one; large ones without an exponent."""
    devices = {"0": 894.2e12, "1": 409.3e12, "2": 893.7e12, "3": 893.9e12}
    answer = {gpu: {"matmuls": [rate, 0.99 * rate, rate], "copies": [4.2402e12]} for gpu, rate in devices.items()}
    looks = Looks(["n0"], [("machine", {0: "m"}), ([0], {0: answer})])
    assert Compute().figures(looks) == {
        "matmuls": "median 894 TFLOP/s, 409 to 894",
        "copies": "median 4,240 GB/s, 4,240 to 4,240",
    }
    assert [finding.text for finding in Compute().judge(looks)] == ["GPU 1: matmuls at 46 % of the median"]


def test_the_order_of_nodes_under_slurm():
    """Two leaves, and nodes that the scheduler numbered in turns: both stages of a pipeline cross."""
    check = NodeOrder()
    run = load_run("recipes/tiny_llama.yaml", ("data.mock=true", "layout.pp=2"))
    said = {}
    for number in range(4):
        peers = [Peer(i, f"n{i}") for i in range(4)]
        env = {"SLURM_TOPOLOGY_ADDR": f"core.leaf{number % 2}.n{number}"}
        view = NodeView(number, peers, run=run, env=env)
        said[number] = json.loads(json.dumps(check.look(view, 0)))
    [(name, text)] = check.figures(Looks([f"n{i}" for i in range(4)], [(0, said)])).items()
    assert name == "order of nodes" and "with n0, n2, n1, n3" in text, text
    assert check.figures(Looks(["n0", "n1"], [(0, {0: said[0]})])) == {}
    assert check.look(NodeView(0, [Peer(0, "n0")], run=run), 0) is None
    # one node to spare: two stages take four of five
    peers = [Peer(i, f"n{i}") for i in range(5)]
    said = {n: check.look(NodeView(n, peers, run=run, env={"SLURM_TOPOLOGY_ADDR": f"l.n{n}"}), 0) for n in range(5)}
    assert said[0] is None and check.figures(Looks([f"n{i}" for i in range(5)], [(0, said)])) == {}


def test_of_many_nodes_each_is_tried_by_some_and_all_try_the_first():
    """1,000 nodes: 11 connections each and not 999. Up to 8, and by the command, all pairs are tried."""
    for count in (2, 8):
        assert all(partners(n, count, True) == partners(n, count, False) for n in range(count))
    assert all(len(partners(n, 1000, False)) == 999 for n in (0, 7))
    tried = Counter(other for n in range(1000) for other in partners(n, 1000, True))
    assert all(0 in partners(n, 1000, True) and n not in partners(n, 1000, True) for n in range(1, 1000))
    assert max(len(partners(n, 1000, True)) for n in range(1000)) == 11
    assert tried.pop(0) == 999 and set(tried.values()) == {10} and len(tried) == 999
    reached, there = {0}, 0  # what each tries connects all: nobody is an island
    while len(reached) > there:
        there = len(reached)
        reached |= {other for n in reached for other in partners(n, 1000, True)}
    assert there == 1000


@pytest.mark.parametrize("bad", [0, 1, 500, 999])
def test_a_node_that_nobody_reaches_is_named_among_a_thousand(bad):
    """And not those that tried; a node that reaches none of its partners is named itself."""
    brief = Looks([f"n{i}" for i in range(1000)], brief=True)
    closed = {n: {f"n{bad}": [bad, "no"]} if bad in partners(n, 1000, True) else {} for n in range(1000)}
    [one] = by_reporter("ports", brief, closed)
    assert one.nodes == (bad,) and "from all others that tried: no" in one.text
    mute = {n: {} for n in range(1000)} | {bad: {f"n{o}": [o, "no"] for o in partners(bad, 1000, True)}}
    [one] = by_reporter("ports", brief, mute)
    assert one.nodes == (bad,) and "from here: no (and " in one.text


def test_data_files_are_compared_by_their_place():
    """Their folders may have different names on different machines."""

    def judged_files(*said: list[list[str]]) -> list[Finding]:
        return DataFiles().judge(Looks(["n0", "n1", "n2"], [(0, dict(enumerate(said)))]))

    good = [["/a/x.bin", "8 bytes"], ["/a/x.idx", "2 bytes"]]
    elsewhere = [["/b/x.bin", "8 bytes"], ["/b/x.idx", "2 bytes"]]
    assert judged_files(good, elsewhere, good) == []
    [one] = judged_files(good, [elsewhere[0], ["/b/x.idx", "3 bytes"]], good)
    assert one.nodes == (1,) and one.text == "/b/x.idx: 3 bytes, elsewhere 2 bytes"
    [one] = judged_files(good, good[:1], good)
    assert one.nodes == (1,) and "not in the config" in one.text
    paths = [Path(str(i)) for i in range(1000)]
    assert evenly(paths[:5], 64) == paths[:5]
    assert len(set(evenly(paths, 64))) == 64 and {paths[0], paths[-1]} <= set(evenly(paths, 64))


def test_a_config_that_no_node_can_read_is_no_bad_node():
    def code(*findings: Finding) -> int:
        return PreflightReport(["n0", "n1"], findings, {}, 1.0).exit_code

    nowhere = [Finding("config", (n,), "CONFIG='x.yaml': cannot be read") for n in (0, 1)]
    assert code() == 0 and code(*nowhere) == 2 and code(nowhere[1]) == 8
    assert code(nowhere[0], Finding("config", (1,), "another reason")) == 8


def test_lines_of_a_runs_first_seconds():
    """A line for each bad node; a warning of many nodes is one line."""
    found = [Finding("space", (n,), "little", "warning") for n in range(6)]
    found += [Finding("clock", (n,), "late") for n in (3, 5)]
    assert lines(found, [f"n{i}" for i in range(6)]) == [
        ("bad", "n3: clock: late"),
        ("bad", "n5: clock: late"),
        ("warning", "n0, n1, n2, n3 and 2 more: space: little"),
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        (("train.steps=-1",), "train.steps=-1: must be an integer >= 1"),
        (("train.stepz=3",), "train.stepz"),
        (("layout.tp=3",), "layout.tp=3"),
    ],
)
def test_a_config_that_breaks_a_rule_is_a_finding(words, said):
    """Values too, not only names: the run would be refused after the checks."""
    assert said in agent_start(("recipes/tiny_llama.yaml", "data.mock=true", *words), "127.0.0.1", "lo", 1).refused
    good = agent_start(("recipes/tiny_llama.yaml", "data.mock=true"), "127.0.0.1", "lo", 1)
    assert good.refused == "" and good.run is not None
