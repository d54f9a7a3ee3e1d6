"""`phalanx preflight --hosts`: nodes started by a command like ssh's, here one that enters network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from phalanx.cli.hosts import read_hosts
from tests.harness.cluster import Cluster, cluster

ROOT = Path(__file__).resolve().parents[2]
REMOTE = """#!/bin/sh
# HOST COMMAND, as ssh has it
space={prefix}${{1#node-}}
shift
exec ip netns exec $space unshare --mount sh -c "mount --bind {hosts} /etc/hosts && echo Welcome to this host && $*"
"""


def preflight(made: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    hosts, remote = folder / "etc-hosts", folder / "remote"
    hosts.write_text(made.hosts)
    remote.write_text(REMOTE.format(prefix=made.nodes[0].namespace[:-1], hosts=hosts))
    remote.chmod(0o755)
    config = ["recipes/tiny_llama.yaml", "data.mock=true", f"dir={folder}/run"]
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "preflight", *config, "--ssh", str(remote), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ("node-[a-z]", "is no host list"),
        ("a\nb\na", "a is listed twice"),
        ("# none", "no host"),
        ("-oX=y", "is no host"),
    ],
)
def test_files_of_hosts_that_cannot_be_meant(tmp_path, text, said):
    (tmp_path / "hosts.txt").write_text(f"{text}\n")
    with pytest.raises(click.BadParameter, match=said):
        read_hosts(str(tmp_path / "hosts.txt"))


def test_two_hosts_and_one_that_is_not_there(tmp_path):
    """The table goes to standard error, the hosts to start with to standard output."""
    with cluster(2) as made:
        (tmp_path / "hosts.txt").write_text("node-a\nnode-z # is switched off\nnode-b\n")
        words = [
            "--hosts",
            str(tmp_path / "hosts.txt"),
            "--drop-bad",
            "--json",
            str(tmp_path / "report.json"),
            "--wait",
            "60",
        ]
        done = preflight(made, tmp_path, *words, "--spares", "1")
    assert done.returncode == 0 and done.stdout == "node-a\nnode-b\n", done.stderr
    said = json.loads((tmp_path / "report.json").read_text())
    assert {node["name"]: node["verdict"] for node in said["nodes"]} == {
        "node-a": "ok",
        "node-b": "ok",
        "node-z": "bad",
    }
    assert "ssh: " in done.stderr and "node-z" in done.stderr and "1 of 3 nodes is bad" in done.stderr, done.stderr
    assert not list((tmp_path / "run").glob("*")) if (tmp_path / "run").exists() else True
