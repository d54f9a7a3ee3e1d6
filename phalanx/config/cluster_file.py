"""A file of the section `cluster` by itself, for what is no run."""

from __future__ import annotations

from pathlib import Path

from phalanx.base.errors import ConfigError
from phalanx.config.cluster import ClusterConfig, check_cluster
from phalanx.config.read import read, section_of_file


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
