"""A file of the section `cluster` by itself, for what is no run, and whether it says where nodes are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.base.errors import ConfigError
from phalanx.config.cluster import ClusterConfig, check_cluster
from phalanx.config.read import read, read_yaml, section_of_file


def read_cluster(path: str | Path | None) -> ClusterConfig:
    """The section that a file holds; its defaults without one. ConfigError with all problems."""
    if path is None:
        return ClusterConfig()
    problems = [p for p in read(cluster=path).problems if p.field.split(".")[0] in ("cluster", "CONFIG")]
    if problems:  # that there is no model is none
        raise ConfigError(problems)
    section = ClusterConfig(**section_of_file("cluster", path).data.get("cluster", {}))
    if wrong := check_cluster(section):
        raise ConfigError([problem if problem.where else problem.at(str(path)) for problem in wrong])
    return section


def has_positions(path: str | Path | None) -> bool:
    """Whether a file says where nodes are, so that topology_file.py can read it: its `topology` is a mapping."""
    return path is not None and isinstance(read_yaml(path).data.get("topology"), Mapping)
