"""`phalanx data prepare --on ray|slurm`: over the shards of a real Ray cluster of this machine, the bytes of one
process. The job array runs in tests/launch/test_slurm.py, on a real SLURM."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.main import cli
from phalanx.data.index import Corpus
from tests.harness.ray_nodes import RayNodes
from tests.harness.slurm import until

ONE = "document {} of {}: grün, ελληνικά, 漢字 {}"


def write_texts(folder: Path, files: int, documents: int) -> None:
    """JSON lines, of which a shard gets a range, one compressed file, which no shard divides, and an empty document."""
    folder.mkdir()
    for k in range(files):
        rows = [json.dumps({"text": ONE.format(i, k, "x" * (i % 97))}) for i in range(documents)]
        (folder / f"{k}.jsonl").write_text("\n".join([*rows, '{"text": ""}', ""]))
    subprocess.run(["gzip", folder / "1.jsonl"], check=True)


def prepare_here(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["data", "prepare", *words])
    assert done.exit_code == code or type(done.exception).exit_code == code, repr(done.exception)
    return done.output + (str(done.exception) if done.exception else "")


def same_bytes(sharded: Path, alone: Path) -> None:
    """The index byte by byte, and the tokens of all shards after each other."""
    assert sharded.with_suffix(".idx").read_bytes() == alone.with_suffix(".idx").read_bytes()
    files = [file.path for file in Corpus(sharded).bin_files]
    assert len(set(files)) == len(files) > 1
    assert b"".join(Path(file).read_bytes() for file in files) == alone.with_suffix(".bin").read_bytes()


# ---- without a cluster ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (["--on", "ray", "--shuffle", "1"], "--shuffle is for one process"),
        (["--on", "slurm", "--shard", "0/2"], "--shard is one part done here"),
        (["--on", "ray", "--dry"], "--dry goes with --on slurm"),
        (["--shards", "3"], "--shards goes with --on"),
        (["--cluster", "c.yaml"], "--cluster goes with --on"),
    ],
)
def test_options_that_have_no_effect_are_refused(tmp_path, words, said):
    (tmp_path / "a.txt").write_text("text")
    done = CliRunner().invoke(
        cli, ["data", "prepare", str(tmp_path), "--tokenizer", "bytes", "-o", str(tmp_path / "out"), *words]
    )
    assert done.exit_code == 2 and said in done.output


def test_a_cluster_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where ray would look for the address of one
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = prepare_here(
        str(tmp_path / "a.txt"), "--tokenizer", "bytes", "-o", str(tmp_path / "x"), "--on", "ray", code=1
    )
    assert re.match(r"no Ray cluster: looked for RAY_ADDRESS=auto \(.+\); `ray start --head` starts one", said), said


def test_the_script_of_a_job_array_begins_with_its_command_and_is_bash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "big", 2, 5)
    (tmp_path / "cluster.yaml").write_text(
        "{partition: cpu, time: 2h, gpus_per_node: 8, setup: [module load x], secrets: {HF_TOKEN: ~/.token}}"
    )
    words = ["big", "--tokenizer", "bytes", "-o", "out/it's", "--on", "slurm", "--shards", "12", "--split", "a=0.5,b=1"]
    assert "wrote out/it's.sbatch" in prepare_here(*words, "--workers", "3", "--dry")
    script = (tmp_path / "out" / "it's.sbatch").read_text()
    assert script.startswith("#!/bin/bash\n# phalanx ") and "--partition=cpu" in script and "gpu" not in script
    assert "--cpus-per-task=3" in script and "--time=0-02:00:00" in script and "~/.token" in script
    checked = subprocess.run(["bash", "-n", "out/it's.sbatch"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    (tmp_path / "cluster.yaml").write_text("{partitoin: cpu}")
    assert "Valid near it: cluster.partition" in prepare_here(*words, "--dry", code=2)
    (tmp_path / "cluster.yaml").write_text("{image: x/y:1}")
    assert "outside containers" in prepare_here(*words, "--dry", code=2)


# ---- a real Ray cluster --------------------------------------------------------------------------


def start(nodes: RayNodes, place: Path, *words: str) -> subprocess.Popen[str]:
    typed = [nodes.python, "-m", "phalanx", "data", "prepare", "in", "--tokenizer", "bytes", "--on", "ray", *words]
    return subprocess.Popen(
        typed, cwd=place, env=nodes.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def three(tmp_path) -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="requirements-dev.txt has it")
    nodes = RayNodes(3)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.mark.soak
def test_three_nodes_write_the_bytes_of_one_process_though_one_is_killed(three, tmp_path, monkeypatch):
    """The node is killed while a process of it holds a shard; that shard is done by another."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in", 6, 60_000)
    prepare_here("in", "--tokenizer", "bytes", "-o", "alone", "--split", "a=0.9,b=0.1")
    process = start(three, tmp_path, "-o", "many", "--shards", "12", "--split", "a=0.9,b=0.1")

    def held() -> list[str]:
        """Shards that a process of the last node is at work on."""
        locks = (tmp_path / "many.shards").glob(".*.pieces/lock")
        texts = {path.parent.name: path.read_text() for path in locks if path.exists()}
        mine = {f"process {pid}" for pid in three.processes(2)}
        return [name[1:15] for name, text in texts.items() if text in mine]

    until(held, lambda: "a shard on the last node")
    [lost] = held()
    three.kill(2)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert not (tmp_path / "many.shards" / f".{lost}.pieces").exists(), lost
    assert len(list((tmp_path / "many.shards").glob("*-a.idx"))) == 12
    for name in ("a", "b"):
        same_bytes(tmp_path / f"many-{name}", tmp_path / f"alone-{name}")
    assert "359,994 documents" not in said and "360,000 documents" not in said  # a split names its parts
    again = start(three, tmp_path, "-o", "many", "--shards", "12", "--split", "a=0.9,b=0.1")
    assert again.communicate(timeout=200) and again.returncode == 0


@pytest.mark.soak
def test_a_document_that_is_no_text_ends_all_of_it_with_its_place(three, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "in", 3, 200)
    with (tmp_path / "in" / "2.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    process = start(three, tmp_path, "-o", "many", "--shards", "4")
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 3 and re.search(r"^data error: .*2\.jsonl:?.*202", said, re.MULTILINE), said
    more = start(three, tmp_path, "-o", "many", "--shards", "4", "--workers", "2")
    said, _ = more.communicate(timeout=200)
    assert (
        more.returncode == 1 and "--workers=2: no node of the Ray cluster has so many CPUs (the largest has 1)" in said
    )
