"""Where hosts are, from files: a cluster file with all its mistakes at once, topology.conf, Kubernetes' nodes; and the
order that `phalanx plan` finds with them."""

from __future__ import annotations

import json
import random

import pytest

from phalanx.base.errors import ConfigError
from phalanx.config.topology_file import ASSUMED, read_topology

CLUSTER = """
partition: gpu          # of other sections nothing is read
topology:
  levels: [block, rack]
  links: {host: 450, rack: 100, block: 50, cluster: 12.5}
  nodes:
    gpu[00-01]: {block: b0, rack: r0}
    gpu[02-03]: {block: b0, rack: r1}
    gpu[04-07]: {block: b1, rack: r2}
"""


def test_a_cluster_file(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    found = read_topology(str(tmp_path / "cluster.yaml"))
    kinds = [found.positions.shared("gpu00", other) for other in ("gpu00", "gpu01", "gpu02", "gpu04")]
    assert kinds == ["host", "rack", "block", "cluster"] and found.assumed == ()
    assert [found.speeds.of[kind] for kind in kinds] == [450e9, 100e9, 50e9, 12.5e9]


def test_links_that_are_not_named_are_assumed(tmp_path):
    (tmp_path / "topology.conf").write_text("BlockName=b0 Nodes=n[0-1]\nBlockName=b1 Nodes=n[2-3]\n")
    found = read_topology(str(tmp_path / "topology.conf"))
    assert found.assumed == ("cluster", "block", "host")
    assert found.speeds.of == {kind: 1e9 * ASSUMED[kind] for kind in ("cluster", "block", "host")}


def test_what_kubectl_prints(tmp_path):
    nodes = [
        {"metadata": {"name": f"n{i}", "labels": {"topology.kubernetes.io/block": f"b{i // 2}"}}} for i in range(4)
    ]
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": nodes}))
    found = read_topology(str(tmp_path / "nodes.json")).positions
    assert found.shared("n0", "n1") == "block" and found.shared("n1", "n2") == "cluster"


@pytest.mark.parametrize(
    "text, said",
    [
        ("topology: {nodes: {a: {block: 1}}, link: {host: 1}}", "topology.link={'host': 1}: is no key of a topology"),
        (
            "topology: {nodes: {a: {block: 1}}, links: {host: fast}}",
            "topology.links.host='fast': must be a number of GB/s",
        ),
        ("topology: {nodes: {a: {block: 1}}, links: {rack: 50}}", "topology.links.rack=50: is no kind of link here"),
        ("topology: {nodes: {a: {pod: 1}}}", "'pod' is none of the levels block, rack, switch, nvlink"),
        ("topology: {nodes: {'a[1-': {block: 1}}}", "is no host list"),
        ("topology: {}", "topology.nodes={}: must map hosts"),
        ("partition: gpu", "must be a cluster file with a section `topology`"),
        ("topology: [", "cannot be read"),
        ('{"items": 3}', "is no answer of `kubectl get nodes -o json`"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=n1\n", "circle"),
    ],
)
def test_mistakes_are_named(tmp_path, text, said):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_topology(str(tmp_path / "file"))
    assert said in str(caught.value)


def test_all_mistakes_at_once(tmp_path):
    (tmp_path / "file").write_text("topology: {nodes: 3, links: [], levels: 1, switch: x}")
    with pytest.raises(ConfigError) as caught:
        read_topology(str(tmp_path / "file"))
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="No such file"):
        read_topology(str(tmp_path / "missing"))


def test_plan_shows_both_orders(warm, tmp_path):
    hosts = [f"gpu{i:02}" for i in range(8)]
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "hosts.txt").write_text("\n".join(random.Random(3).sample(hosts, 8)))
    words = ["plan", "recipes/tiny_llama.yaml", "layout.tp=2", "layout.pp=2", "--ranks", "16"]
    files = ["--hosts", str(tmp_path / "hosts.txt"), "--topology", str(tmp_path / "cluster.yaml")]
    done = warm.phalanx(*words, *files, "--write-hosts", str(tmp_path / "ordered.txt"))
    assert done.returncode == 0, done.stderr
    order = (tmp_path / "ordered.txt").read_text().split()
    assert sorted(order) == hosts and "no order is better" in done.stdout
    # a stage fills a block: dp stays inside
    assert {host in hosts[:4] for host in order[:4]} == {order[0] in hosts[:4]}
    cells = next(line.split() for line in done.stdout.splitlines() if line.startswith("all "))
    assert float(cells[3]) < float(cells[1]) and cells[2] == cells[4], done.stdout
    (tmp_path / "hosts.txt").write_text("gpu00 # and\nnowhere\n")
    done = warm.phalanx(*words, *files)
    assert done.returncode == 2 and "--topology='nowhere'" in done.stderr, done.stderr
    done = warm.phalanx(*words, *files[:2])
    assert done.returncode == 2 and "go together" in done.stderr, done.stderr
