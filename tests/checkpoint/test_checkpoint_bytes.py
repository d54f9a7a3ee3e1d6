"""Every byte of a checkpoint is under a checksum that is compared when it is read: no flipped bit is ever trained
on."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.load import load_weights
from phalanx.checkpoint.manifest import FORMAT, NAME, read_manifest, seal, verify
from phalanx.checkpoint.storage import CHUNK, EARLIER_CHUNK, Storage
from phalanx.checkpoint.tensors import CheckedFile, TensorFile
from phalanx.checkpoint.tools import reshard
from phalanx.training.main import train
from tests.checkpoint.test_checkpoint import TINY
from tests.harness.checkpoints import error_on_rank, load_here, make_run, make_state, save_here, set_state
from tests.training.test_loop import make_run as small_run
from tests.training.test_loop import rows_of

FLIPS = 200


@pytest.fixture(scope="module")
def tiny():
    state = make_state(replace(make_run("llama", "fp32", 100), model=TINY))
    set_state(state)
    return state


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def kind_of(file: Path) -> str:
    return f"{file.parent.name if file.name != NAME else ''}/{'rank' if file.name.startswith('rank') else file.name}"


def flips_of(path: Path, count: int, seed: int) -> list[tuple[Path, int]]:
    """`count` bits of a checkpoint, as many of each file."""
    pick, files = random.Random(seed), sorted(p for p in path.rglob("*") if p.is_file())
    return [(files[i % len(files)], pick.randrange(8 * files[i % len(files)].stat().st_size)) for i in range(count)]


def test_every_flipped_bit_is_found_by_name_at_load(tmp_path, tiny):
    """200 seeded bits over every kind of file: what loads the file names it, and so does `verify`."""
    path = save_here(tiny, tmp_path).path
    seen = Counter()
    for file, bit in flips_of(path, FLIPS, seed=0):
        flip(file, bit)
        with pytest.raises(DamagedCheckpoint, match=file.name.replace(".", r"\.")):
            load_here(tiny, path)
        assert any(file.name in problem for problem in verify(path)), (file, bit)
        if file.parent.name == "weights":
            with pytest.raises(DamagedCheckpoint, match=file.name):
                load_weights(path, tiny.buffers, tiny.mesh)
        flip(file, bit)
        seen[kind_of(file)] += 1
    assert verify(path) == [] and sum(seen.values()) == FLIPS
    assert {
        "/manifest.json",
        "state/rank",
        "state/index.json",
        "weights/model.safetensors",
        "weights/config.json",
    } <= seen.keys()
    load_here(tiny, path)
    set_state(tiny)


def test_verify_names_the_tensor_and_the_place(tmp_path, tiny):
    path = save_here(tiny, tmp_path).path
    file = path / "weights/model.safetensors"
    flip(file, 8 * (file.stat().st_size - 1))
    (problem,) = verify(path)
    assert (
        "weights/model.safetensors has a wrong checksum: the tensor model.norm.weight has a wrong checksum in bytes"
        in problem
    )


@pytest.mark.parametrize("chunk", [EARLIER_CHUNK, CHUNK])
def test_a_box_is_read_in_whole_chunks_and_each_is_compared(tmp_path, monkeypatch, chunk):
    """A tensor of three chunks and a bit: boxes are right, and damage is seen by the boxes that touch its chunk, and
    by no others."""
    monkeypatch.setattr("phalanx.checkpoint.storage.CHUNK", chunk)
    rows, columns = 3 * chunk // 4096 + 5, 1024
    truth = {
        "a": torch.arange(7.0),
        "x": torch.arange(rows * columns, dtype=torch.float32).view(rows, columns),
        "s": torch.tensor(3.0),
    }
    file = TensorFile(Storage(), tmp_path / "f", [(n, tuple(t.shape), t.dtype) for n, t in truth.items()])
    for tensor in truth.values():
        file.add(tensor)
    receipt = file.finish()
    assert [len(receipt.parts[n]) for n in ("", "a", "x", "s")] == [1, 1, 4, 1]
    assert receipt.chunk == chunk
    pick = random.Random(0)
    boxes = [tuple(slice(*sorted(pick.sample(range(n + 1), 2))) for n in (rows, columns)) for _ in range(30)]
    with CheckedFile(tmp_path / "f", receipt) as tensors:
        assert torch.equal(tensors.read("a", (slice(2, 5),)), truth["a"][2:5]) and torch.equal(
            tensors.read("s"), truth["s"]
        )
        for box in boxes:
            assert torch.equal(tensors.read("x", box), truth["x"][box])
    flip(tmp_path / "f", 8 * (receipt.size - 4 - truth["x"].nbytes + chunk + 17))  # in its second chunk
    hit = 0
    with CheckedFile(tmp_path / "f", receipt) as tensors:
        for box in boxes:
            if box[0].start * 4096 < 2 * chunk and box[0].stop * 4096 > chunk:
                hit += 1
                with pytest.raises(DamagedCheckpoint, match="tensor x has a wrong checksum in bytes"):
                    tensors.read("x", box)
            else:
                assert torch.equal(tensors.read("x", box), truth["x"][box])
    assert 0 < hit < 30


def test_checkpoints_of_earlier_formats_are_read(tmp_path, tiny, monkeypatch):
    """Their receipts do not state how many bytes are under one checksum."""
    monkeypatch.setattr("phalanx.checkpoint.storage.CHUNK", EARLIER_CHUNK)
    path = save_here(tiny, tmp_path).path
    body = json.loads((path / NAME).read_text())
    for receipt in body["files"].values():
        assert receipt.pop("chunk") == EARLIER_CHUNK
    del body["sha256"]
    (path / NAME).write_text(seal(json.dumps({**body, "format": 2}, indent=1).removesuffix("\n}")))
    monkeypatch.undo()
    assert verify(path) == []
    load_here(tiny, path)
    anew = reshard(path, tmp_path / "anew", 2)
    assert verify(anew) == [] and read_manifest(anew).format == FORMAT and read_manifest(path).format == 2
    flip(path / "weights/model.safetensors", 8 * ((path / "weights/model.safetensors").stat().st_size - 1))
    assert "tensor model.norm.weight" in verify(path)[0]


def test_damage_that_one_rank_reads_stops_all(ranks, tmp_path):
    run = make_run("llama", tp=2)
    ranks.run("tests.harness.checkpoints:save_on_rank", 2, run, tmp_path, {})
    path = latest(tmp_path)
    flip(path / "state/rank-00001.safetensors", 8 * (path / "state/rank-00001.safetensors").stat().st_size - 1)
    errors = ranks.run("tests.harness.checkpoints:error_on_rank", 2, run, "load_state", path)
    assert errors[0] == errors[1] and "rank-00001.safetensors is damaged" in errors[0]
    assert "rank-00001" in error_on_rank(0, 1, make_run("llama"), "load_state", path)


def test_the_manifest_is_sealed_byte_by_byte(tmp_path, tiny):
    """Also where another spelling would parse to the same values."""
    path = save_here(tiny, tmp_path).path
    text = (path / NAME).read_text()
    assert read_manifest(path).parent is None
    for other in (text.replace("e-310", "E-310"), text + " ", text.replace("{\n", "{ \n", 1), text[:-1]):
        assert other != text
        (path / NAME).write_text(other)
        with pytest.raises(DamagedCheckpoint):
            read_manifest(path)


# --- runs


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 12 steps with checkpoints at 3, 6, 9 and 12, and what it wrote down."""
    folder = tmp_path_factory.mktemp("stopped")
    run = replace(small_run(folder), checkpoint=CheckpointConfig(interval=3, keep_last=0))
    train(run, Placement())
    return run


def copy_of(run, folder: Path):
    shutil.copytree(run.dir, folder)
    shutil.rmtree(folder / "checkpoints/step-00000012")
    return replace(run, dir=str(folder))


def numbers(run):
    return [(r["step"], r["loss"].hex(), r["grad_norm"].hex()) for r in rows_of(run)]


@pytest.mark.parametrize(
    "kind", ["state/rank-00000.safetensors", "state/index.json", "weights/model.safetensors", "manifest.json"]
)
def test_a_run_falls_back_to_the_newest_good_checkpoint(stopped, tmp_path, capsys, kind):
    run = copy_of(stopped, tmp_path / "run")
    for step in (9, 6):
        file = Path(run.dir) / f"checkpoints/step-{step:08d}" / kind
        flip(file, 8 * file.stat().st_size // 2)
    train(run, Placement())
    out, err = capsys.readouterr()
    assert (
        "step-00000009 is damaged and not used" in err
        and "step-00000006 is damaged and not used" in err
        and Path(kind).name in err
    )
    assert "continue from" in out and "step-00000003" in out.split("continue from")[1].splitlines()[0]
    assert numbers(run) == numbers(stopped)
    assert all(verify(p) == [] for p in (Path(run.dir) / "checkpoints").iterdir()), "the damaged ones were saved anew"


def test_a_run_whose_checkpoints_are_all_bad_does_not_start(stopped, tmp_path):
    run = copy_of(stopped, tmp_path / "run")
    files = sorted((Path(run.dir) / "checkpoints").glob("*/state/rank-00000.safetensors"))
    flip(files[-1], 8 * 1000)
    with pytest.raises(CheckpointError, match="step-00000009"):
        train(replace(run, checkpoint=replace(run.checkpoint, fallback=False)), Placement())
    for file in files[:-1]:
        flip(file, 8 * 1000)
    before = numbers(run)
    with pytest.raises(CheckpointError) as stop:
        train(run, Placement())
    assert stop.value.exit_code == 4 and all(f"step-0000000{step}" in str(stop.value) for step in (3, 6, 9))
    assert numbers(run) == before, "nothing was trained"


def test_checkpoints_name_the_one_before_them(stopped, tmp_path):
    parents = [read_manifest(p).parent for p in sorted((Path(stopped.dir) / "checkpoints").iterdir())]
    assert parents == [None, 3, 6, 9]
    run = copy_of(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000009")
    train(replace(run, checkpoint=CheckpointConfig()), Placement())
    assert read_manifest(latest(tmp_path / "run/checkpoints")).parent == 6
