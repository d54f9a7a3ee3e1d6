"""Where hosts are and how fast the links between them: read from a cluster file, SLURM's topology.conf or Kubernetes.

A cluster file is YAML; of it only the section `topology` is read here:

    topology:
      levels: [block, rack]     # outermost first; unset: those of block, rack, switch, nvlink that occur
      links: {host: 450, rack: 50, block: 50, cluster: 12.5}    # GB/s that a rank sends, one way
      nodes:
        gpu[001-032]: {block: b0, rack: r0}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.registry import near
from phalanx.layout.host_order import LinkSpeeds
from phalanx.layout.positions import (
    LEVELS,
    BadPositions,
    Positions,
    from_domains,
    from_node_labels,
    from_topology_conf,
)

KEYS = ("levels", "links", "nodes")
GB = 1e9
# For links that no file names: an H100's NVLink, and a 400 Gbit/s adapter for each GPU, half as much beyond a block.
ASSUMED = {"host": 450.0, "nvlink": 450.0, "switch": 50.0, "rack": 50.0, "block": 50.0, "cluster": 25.0}
MOST_BYTES = 64 << 20  # of a file: `kubectl get nodes -o json` of thousands of nodes


@dataclass(frozen=True)
class Topology:
    """Positions of hosts, speeds of the links, and for which kinds of link no file names a speed."""

    positions: Positions
    speeds: LinkSpeeds
    assumed: tuple[str, ...] = ()


def read_topology(path: str) -> Topology:
    """The topology in a file: topology.conf, the JSON of `kubectl get nodes`, or a cluster file. ConfigError with all
    problems."""
    text = readable(path)
    try:
        if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.MULTILINE | re.IGNORECASE):
            return with_speeds(from_topology_conf(text), {})
        if text.lstrip().startswith("{"):
            return with_speeds(from_node_labels(labels_of(json.loads(text))), {})
        values = YAML(typ="safe", pure=True).load(StringIO(text))
    except BadPositions as error:
        raise ConfigError([Problem("topology", path, str(error))]) from None
    except (ValueError, RecursionError, YAMLError) as error:
        raise ConfigError([Problem("topology", path, f"cannot be read: {error}")]) from None
    section = values.get("topology") if isinstance(values, dict) else None
    if not isinstance(section, dict):
        rule = "must be a cluster file with a section `topology`, SLURM's topology.conf, or `kubectl get nodes -o json`"
        raise ConfigError([Problem("topology", path, rule)])
    return from_section(section, path)


def readable(path: str) -> str:
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ConfigError([Problem("topology", path, f"must have at most {MOST_BYTES:,} bytes")])
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError([Problem("topology", path, f"cannot be read: {why}")]) from None


def from_section(section: Mapping[str, Any], path: str) -> Topology:
    problems = [
        Problem(f"topology.{key}", section[key], "is no key of a topology", {}, near(str(key), KEYS) or KEYS, path)
        for key in section
        if key not in KEYS
    ]
    nodes, levels, links = section.get("nodes", {}), section.get("levels"), section.get("links")
    levels = () if levels is None else levels
    links = {} if links is None else links
    if not (isinstance(nodes, dict) and nodes and all(isinstance(of, dict) for of in nodes.values())):
        problems.append(
            Problem("topology.nodes", nodes, "must map hosts to their domains: gpu[01-32]: {block: b0}", {}, (), path)
        )
    if not (isinstance(levels, (list, tuple)) and all(isinstance(level, str) for level in levels)):
        problems.append(Problem("topology.levels", levels, "must be a list of names, outermost first", {}, (), path))
    if not isinstance(links, dict):
        problems.append(Problem("topology.links", links, "must map kinds of link to GB/s", {}, (), path))
    if problems:
        raise ConfigError(problems)
    try:
        positions = from_domains({str(host): of for host, of in nodes.items()}, tuple(levels))
    except BadPositions as error:
        raise ConfigError([Problem("topology.nodes", "", str(error), {}, tuple(levels) or LEVELS, path)]) from None
    kinds = ("host", *positions.levels, "cluster")
    for kind, speed in links.items():
        if kind not in kinds:
            problems.append(Problem(f"topology.links.{kind}", speed, "is no kind of link here", {}, kinds, path))
        elif isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed < math.inf:
            problems.append(
                Problem(f"topology.links.{kind}", speed, "must be a number of GB/s above 0", {}, (50,), path)
            )
    if problems:
        raise ConfigError(problems)
    return with_speeds(positions, {str(kind): float(speed) for kind, speed in links.items()})


def with_speeds(positions: Positions, given: Mapping[str, float]) -> Topology:
    """given: GB/s by kind of link; what is missing is assumed: a level of its own like the one around it."""
    of: dict[str, float] = {}
    assumed = []
    outer = given.get("cluster", ASSUMED["cluster"])
    for kind in ("cluster", *positions.levels, "host"):
        if kind not in given:
            assumed.append(kind)
        outer = given.get(kind, max(outer, ASSUMED.get(kind, outer)))
        of[kind] = GB * outer
    return Topology(positions, LinkSpeeds(of), tuple(assumed))


def labels_of(values: Any) -> dict[str, dict[str, str]]:
    """Labels by node, from `kubectl get nodes -o json`. BadPositions if it is something else."""
    try:
        return {
            str(node["metadata"]["name"]): {str(k): str(v) for k, v in (node["metadata"].get("labels") or {}).items()}
            for node in values["items"]
        }
    except (KeyError, TypeError, AttributeError):
        raise BadPositions("is no answer of `kubectl get nodes -o json`: no items with metadata") from None
