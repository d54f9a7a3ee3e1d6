"""`phalanx launch ray` against a real Ray cluster of this machine (tests/harness/ray_nodes.py), and its RayJob against
KubeRay's published schema."""

from __future__ import annotations

import copy
import json
import lzma
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError

from phalanx.cli.main import cli
from tests.harness.ray_nodes import RayNodes
from tests.harness.slurm import until

CONFIG = """\
model: {family: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}
train: {steps: 6, global_batch: 8, micro_batch: 1, seq_length: 16, device: cpu, timeout_s: 60}
data: {mock: true}
log: {report: false}
"""  # noqa: E501
CLUSTER = {"interface": "lo", "environment": {"OMP_NUM_THREADS": 1}, "grace_s": 20, "max_restarts": 2}
WAIT_S = 400.0  # three nodes and a job are a dozen processes of Ray, on two cores
LONG = "train.steps=100000"
SCHEMA = Path(__file__).parents[1] / "fixtures" / "kuberay" / "ray.io_rayjobs.yaml.xz"


class Launched:
    """A run of this test, and `phalanx` beside the cluster."""

    def __init__(self, nodes: RayNodes, place: Path):
        self.nodes, self.place, self.folder = nodes, place, place / "run"
        (place / "run.yaml").write_text(CONFIG)
        (place / "cluster.yaml").write_text(json.dumps(CLUSTER))

    def phalanx(self, *words: str) -> subprocess.CompletedProcess[str]:
        typed = [self.nodes.python, "-m", "phalanx", *words]
        env = {**self.nodes.env, "RAY_API_SERVER_ADDRESS": self.nodes.url}
        return subprocess.run(typed, cwd=self.place, env=env, capture_output=True, text=True, timeout=200)

    def launch(self, *words: str, code: int = 0) -> str:
        done = self.phalanx("launch", "ray", "run.yaml", "--nodes", "2", f"dir={self.folder}", *words)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        return re.search(r"submitted job (\S+);", self.launch("--submit", *words))[1]

    def rows(self, folder: Path | None = None) -> list[dict]:
        path = (folder or self.folder) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if "loss" in row]

    def until_step(self, step: int) -> None:
        until(lambda: [row["step"] for row in self.rows()][-1:] >= [step], lambda: f"step {step}\n{self.said()}", WAIT_S)

    def job(self) -> tuple[Any, str]:
        """Ray's own client, and the job's number."""
        from ray.job_submission import JobSubmissionClient

        note = json.loads((self.folder / "launch.json").read_text())
        return JobSubmissionClient(note["server"]), note["job"]

    def said(self) -> str:
        """What the job said, as Ray keeps it."""
        client, job = self.job()
        return client.get_job_logs(job)

    def until_over(self, state: str) -> None:
        client, job = self.job()
        until(lambda: client.get_job_status(job).is_terminal(), self.said, WAIT_S)
        assert client.get_job_status(job).value == state, self.said()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="requirements-dev.txt has it")
    nodes = RayNodes(3, jobs=True)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def run(cluster, tmp_path) -> Launched:
    return Launched(cluster, tmp_path)


@pytest.mark.soak
def test_two_nodes_train_to_the_bits_of_two_ranks_here(run):
    run.submit()
    run.until_over("SUCCEEDED")
    alone = run.phalanx("train", "run.yaml", "--ranks", "2", f"dir={run.place / 'alone'}", "cluster=null")
    assert alone.returncode == 0, alone.stderr
    losses = [(row["step"], row["loss"]) for row in run.rows()]
    assert losses == [(row["step"], row["loss"]) for row in run.rows(run.place / "alone")] and len(losses) == 6
    assert "layout world=2 dp=2" in run.phalanx("logs", str(run.folder)).stdout
    said = run.phalanx("status", str(run.folder)).stdout
    assert re.match(r"job raysubmit_\w+  succeeded since 20\S+\n", said) and "\nstep  6\n" in said
