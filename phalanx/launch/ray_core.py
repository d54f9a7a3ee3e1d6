"""A running Ray cluster: this process as one of its drivers, and what its nodes have (extra `ray`).

Ray's own protocol carries pickled objects between drivers and nodes: whoever reaches a cluster's ports can run code on
it. Connect only to one that you trust.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phalanx.base.errors import PhalanxError
from phalanx.launch.programs import NoScheduler

ADDRESS = "RAY_ADDRESS"
WAITS = "waiting for"  # how a line begins that a job prints while the cluster has too few nodes


@contextmanager
def connected() -> Iterator[Any]:
    """The module ray, connected to the cluster that RAY_ADDRESS names, or to the one that runs on this machine.
    NoScheduler if there is none, or no ray."""
    try:
        import ray  # an optional package
    except ImportError:
        raise NoScheduler("Ray is not installed here: pip install 'phalanx[ray]'") from None
    address = os.environ.get(ADDRESS, "auto")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise NoScheduler(
            f"no Ray cluster: looked for {ADDRESS}={address} ({reason}); `ray start --head` starts one, "
            f"{ADDRESS}=HOST:6379 names another"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def most_of(ray: Any, resource: str) -> float:
    """What the node with most of a resource has of it, such as CPU."""
    nodes: list[Mapping[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return max((node["Resources"].get(resource, 0.0) for node in nodes), default=0.0)


def check_cpus(ray: Any, cpus: int) -> None:
    """PhalanxError if no node has as many CPUs as a task asks for: it would wait for ever."""
    most = most_of(ray, "CPU")
    if cpus > most:
        raise PhalanxError(
            f"--workers={cpus}: no node of the Ray cluster has so many CPUs (the largest has {most:g}), so its tasks "
            "would never start"
        )
