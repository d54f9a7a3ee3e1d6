"""A real Ray cluster on this machine: some nodes, each with processes of its own, in a temporary folder. They listen at
the address of this machine, which Ray puts in the place of loopback by itself."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

ROOT = Path(__file__).resolve().parents[2]
STORE_BYTES = 80 << 20  # of each node's shared memory: the least that Ray takes
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent elsewhere
    "RAY_DISABLE_METRICS_COLLECTION": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "20",  # a machine with other work may take seconds to answer
}


class RayNodes:
    """Nodes 0 (the head), 1, ...; `env` is what a driver needs. jobs: with the server that takes jobs, at `url`."""

    def __init__(self, count: int, cpus: int = 1, jobs: bool = False, **env: str) -> None:
        from ray.cluster_utils import Cluster

        self._place = tempfile.TemporaryDirectory(prefix="ray-")  # short: paths of sockets are limited
        own = {"RAY_TMPDIR": self._place.name, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._environment = patch.dict(os.environ, QUIET | own | env)
        self._environment.start()
        settings: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE_BYTES}
        head = {**settings, "include_dashboard": jobs}
        if jobs:
            head["dashboard_port"] = 0
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.head_node, *(self.cluster.add_node(**settings) for _ in range(count - 1))]
        self.env: Mapping[str, str] = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        self.python = sys.executable
        self.url = f"http://{self.cluster.webui_url}" if jobs else ""

    def processes(self, number: int) -> list[int]:
        """Processes that the node has started for tasks."""
        [daemon] = self.nodes[number].all_processes["raylet"]
        return [child.pid for child in psutil.Process(daemon.process.pid).children(recursive=True)]

    def working(self) -> list[int]:
        """Nodes on which a run's ranks are, by what their processes were started with."""
        return [
            number for number in range(len(self.nodes)) if any("launch-node" in line for line in self._lines(number))
        ]

    def _lines(self, number: int) -> list[str]:
        with suppress(psutil.Error):
            return [" ".join(psutil.Process(pid).cmdline()) for pid in self.processes(number)]
        return []

    def kill(self, number: int, at_once: bool = False) -> None:
        """The node's processes are killed, and those that they started find out; or all at once, as by a power cut."""
        for pid in self.processes(number) if at_once else ():
            with suppress(psutil.Error):
                psutil.Process(pid).kill()
        self.cluster.remove_node(self.nodes[number], allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()
        self._environment.stop()
        self._place.cleanup()
