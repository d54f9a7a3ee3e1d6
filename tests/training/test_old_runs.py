"""Runs of commit 6ff7580, before the house was rebuilt: they go on to the same bits, and what was removed since is
refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.manifest import read_manifest
from phalanx.config.read import load_run
from tests.harness.warm import Warm

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests/fixtures/6ff7580"
THEN = json.loads((OLD / "then.json").read_text())
SAME_BITS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""The kernels that every x86-64 has: what was recorded on one machine holds on others."""
RECORDED_ON = "AVX512"


@pytest.fixture(scope="module")
def plain_kernels() -> Iterator[Warm]:
    server = Warm(env=SAME_BITS).start()
    yield server
    server.close()


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="recorded with torch 2.13, whose sums it needs")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="recorded on x86-64")
@pytest.mark.parametrize("name", THEN)
def test_an_old_run_goes_on_to_the_same_bits(plain_kernels, tmp_path, name):
    """dense: tp2 in fp64; experts: dp2 with ep2 and ZeRO-2 in bf16. Steps 4 to 6, as the old code made them from
    its own step 3: losses, master weights, both moments and exported weights."""
    if name == "experts" and torch.backends.cpu.get_cpu_capability() != RECORDED_ON:
        pytest.skip(f"torch chooses bf16 matmuls by the processor, and these were recorded on {RECORDED_ON}")
    for file in OLD.glob("text.*"):
        shutil.copy(file, tmp_path)
    shutil.copy(OLD / f"{name}.yaml", tmp_path)
    shutil.copytree(OLD / name, tmp_path / name)
    words = ["train", f"{name}.yaml", "--ranks", "2", "train.steps=6", "checkpoint.interval=6"]
    done = plain_kernels.phalanx(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 5, 6]
    assert [row["loss"].hex() for row in rows] == THEN[name]["losses"]
    files = read_manifest(tmp_path / name / "checkpoints/step-00000006").files
    tensors = {n: {"size": r.size, "xxh3": r.xxh3} for n, r in files.items() if n.endswith(".safetensors")}
    assert tensors == THEN[name]["files"]


REMOVED = {
    "dispatch": ("layout.dispatch='alltoall_fp8'", "type layout.dispatch=alltoall"),
    "fine": ("train.fp8.recipe='nvfp4_fine'", "type train.fp8.recipe=nvfp4"),
    "mixed": ("train.fp8.recipe='nvfp4_mixed'", "type train.fp8.recipe=nvfp4"),
}


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_an_old_run_with_a_removed_option_is_refused(warm, tmp_path, verb, name):
    """Its config.yaml, and the config in its checkpoint: both as the old code wrote them."""
    run = tmp_path / "run"
    shutil.copytree(OLD / "removed" / name, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    if verb == "train":
        done = warm.phalanx("train", "run", "--ranks", "2", "train.steps=2", cwd=tmp_path)
    else:
        (run / "config.yaml").unlink()
        before.pop(run / "config.yaml")
        done = warm.phalanx("eval", "run", "--data", str(OLD / "text"), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in REMOVED[name]), done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_offload_inside_captured_graphs_is_refused(warm, tmp_path):
    """An old config that asks for both says which to give up. That it wants a GPU is said too, where there is none."""
    old = (OLD / "dense/config.yaml").read_text()
    text = re.sub(r"offload_layers: \d+", "offload_layers: 1", re.sub(r"cuda_graphs: \w+", "cuda_graphs: 'on'", old))
    (tmp_path / "run.yaml").write_text(text)
    done = warm.phalanx("train", "run.yaml", "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "excludes train.offload_layers: type train.cuda_graphs=off or train.offload_layers=0" in done.stderr


def test_what_users_wrote_then_means_the_same_now():
    """As typed, and as the old code resolved it. log.interval alone has another default now (a pace for people)."""
    for name in THEN:
        typed, resolved = load_run(OLD / f"{name}.yaml", ["log.interval=1"]), load_run(OLD / name / "config.yaml")
        assert typed == resolved
