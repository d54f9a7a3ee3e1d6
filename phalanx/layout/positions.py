"""Where hosts are: the block, rack, switch and NVLink domain of each, read from texts that schedulers and people write.

Pure: texts in, positions out. Nothing here runs a program or opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain

from phalanx.base.dataclass import dataclass

LEVELS = ("block", "rack", "switch", "nvlink")  # outermost first
MOST_NAMES = 100_000  # in one host list

# Labels of Kubernetes nodes that name a domain, by the level they stand for. Those of clouds are published by GKE
# (topology-aware scheduling), EKS (network topology) and NVIDIA's GPU operator (clique of an NVLink domain).
NODE_LABELS = {
    "cloud.google.com/gce-topology-block": "block",
    "cloud.google.com/gce-topology-subblock": "rack",
    "topology.k8s.aws/network-node-layer-1": "block",
    "topology.k8s.aws/network-node-layer-2": "rack",
    "topology.k8s.aws/network-node-layer-3": "switch",
    "topology.kubernetes.io/block": "block",
    "topology.kubernetes.io/rack": "rack",
    "nvidia.com/gpu.clique": "nvlink",
}


class BadPositions(ValueError):
    """A text about positions that cannot be read; the message names the line or the value."""


@dataclass(frozen=True)
class Positions:
    """levels: names of the kinds of domain, outermost first; of: for each host its domain at each level ("" where it
    is not known)."""

    levels: tuple[str, ...] = ()
    of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def shared(self, a: str, b: str) -> str:
        """The innermost level whose domain both hosts are in: "host" for one host, "cluster" if they share none."""
        if a == b:
            return "host"
        innermost = "cluster"
        for level, one, two in zip(self.levels, self.of.get(a, ()), self.of.get(b, ())):
            if not one or one != two:
                break
            innermost = level
        return innermost


def expand_hosts(text: str) -> list[str]:
    """SLURM's host lists: `gpu[01-03,7],login` -> gpu01, gpu02, gpu03, gpu7, login. BadPositions for a broken one."""
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", text)):
        raise BadPositions(f"{text.strip()!r} is no host list: a bracket is not closed")
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        parts = re.split(r"\[([^\]]*)\]", item)
        made = [parts[0]]
        for inside, after in zip(parts[1::2], parts[2::2]):
            numbers = list(chain.from_iterable(_range(one, item) for one in inside.split(",")))
            if len(made) * len(numbers) > MOST_NAMES:
                raise BadPositions(f"{item!r} names more than {MOST_NAMES:,} hosts")
            made = [f"{head}{number}{after}" for head in made for number in numbers]
        names += made
    return names


def _range(text: str, item: str) -> list[str]:
    """Such as `01-03`, with its leading zeros."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise BadPositions(f"{item!r} is no host list: {text!r} is not a number or a range")
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first) or int(last) - int(first) >= MOST_NAMES:
        raise BadPositions(f"{item!r} is no host list: {text!r} is not a range from low to high")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def from_topology_conf(text: str) -> Positions:
    """Positions from SLURM's topology.conf, or from what `scontrol show topology` prints: lines of `SwitchName=`
    (topology/tree) or `BlockName=` (topology/block).

    A host's domains are the switches from the root to its own; trees of several depths are filled from the outside.
    """
    parents: dict[str, str] = {}
    leaves: dict[str, str] = {}
    blocks: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = dict(
            (key.lower(), value)
            for key, _, value in (word.partition("=") for word in line.partition("#")[0].split() if "=" in word)
        )
        try:
            if "switchname" in words:
                name = words["switchname"]
                parents.update(dict.fromkeys(expand_hosts(words.get("switches", "")), name))
                if "switches" not in words:  # `scontrol show topology` lists all hosts below a switch too
                    leaves.update(dict.fromkeys(expand_hosts(words.get("nodes", "")), name))
            elif "blockname" in words:
                blocks.update({host: (words["blockname"],) for host in expand_hosts(words.get("nodes", ""))})
        except BadPositions as error:
            raise BadPositions(f"topology.conf line {number}: {error}") from None
    if blocks:
        return Positions(("block",), blocks)
    paths = {switch: _path(switch, parents) for switch in (*parents, *leaves.values())}
    return _levelled({host: paths[leaf] for host, leaf in leaves.items()})


def _path(leaf: str, parents: Mapping[str, str]) -> tuple[str, ...]:
    """Switches from the root to this one. BadPositions if they go in a circle."""
    path = [leaf]
    while path[-1] in parents:
        if parents[path[-1]] in path:
            raise BadPositions(f"switches go in a circle: {' in '.join([*path, parents[path[-1]]])}")
        path.append(parents[path[-1]])
    return tuple(reversed(path))


def _levelled(paths: Mapping[str, tuple[str, ...]]) -> Positions:
    """Paths of switches as positions with level names: the innermost is the switch, those above it racks and blocks.
    What all hosts share says nothing and is left out."""
    depth = max(map(len, paths.values()), default=0)
    full = {host: path + ("",) * (depth - len(path)) for host, path in paths.items()}
    telling = [i for i in range(depth) if len({path[i] for path in full.values()}) > 1]
    outer = [*(f"level{n}" for n in range(1, max(0, len(telling) - 3) + 1)), "block", "rack", "switch"]
    levels = tuple(outer[len(outer) - len(telling) :])
    return Positions(levels, {host: tuple(path[i] for i in telling) for host, path in full.items()})


def from_topology_addr(addresses: Mapping[str, str]) -> Positions:
    """Positions from each host's SLURM_TOPOLOGY_ADDR, such as `core.leaf2.node7`: switches from the root to the
    host."""
    paths = {
        host: tuple(filter(None, address.removesuffix(f".{host}").split(".")))
        if address.endswith(f".{host}")
        else tuple(address.split(".")[:-1])
        for host, address in addresses.items()
    }
    return _levelled(paths)


def from_node_labels(labels: Mapping[str, Mapping[str, str]]) -> Positions:
    """Positions from Kubernetes node labels, by host."""
    found = {
        host: {NODE_LABELS[key]: value for key, value in of.items() if key in NODE_LABELS}
        for host, of in labels.items()
    }
    return from_domains(found)


def from_domains(domains: Mapping[str, Mapping[str, str]], levels: Sequence[str] = ()) -> Positions:
    """Positions from a mapping of host, or of a host list such as `gpu[01-32]`, to its domain at each level.

    levels: all names of levels, outermost first; by default the known ones that occur. BadPositions names an unknown
    level.
    """
    named = tuple(dict.fromkeys(level for of in domains.values() for level in of))
    order = tuple(levels) or tuple(level for level in LEVELS if level in named)
    unknown = sorted(set(named) - set(order))
    if unknown:
        raise BadPositions(f"{unknown[0]!r} is none of the levels {', '.join(order or LEVELS)}")
    made: dict[str, tuple[str, ...]] = {}
    for hosts, of in domains.items():
        made.update(dict.fromkeys(expand_hosts(hosts), tuple(str(of.get(level, "")) for level in order)))
    return Positions(order, made)


def unknown_hosts(hosts: Iterable[str], positions: Positions) -> list[str]:
    """Hosts of which nothing is known."""
    return [host for host in hosts if not any(positions.of.get(host, ()))]
