"""Faults of what lies on disks and servers, and every layout's checkpoint under every other: each function is a part
of a section of tests/faults/matrix.py, works in a folder of its own and returns what it counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.keep import latest, list_checkpoints
from phalanx.checkpoint.load import load_weights
from phalanx.checkpoint.manifest import verify
from phalanx.checkpoint.objects import ObjectStorage
from phalanx.checkpoint.places import place
from tests.checkpoint.test_checkpoint import TWELVE, tiny_run
from tests.checkpoint.test_checkpoint_bytes import flip, flips_of
from tests.faults.runs import Tally
from tests.harness.checkpoints import Failing, load_here, make_run, make_state, save_here, set_state
from tests.harness.pool import RankPool


def twelve_by_twelve(folder: Path, saved: str, loads: tuple[str, ...]) -> Tally:
    """A model with experts and tied embeddings: what one layout saved is loaded under others, element by element and
    each byte once."""
    with closing(RankPool()) as pool:
        world, layout = TWELVE[saved]
        pool.run("tests.harness.checkpoints:save_on_rank", world, make_run("qwen3_moe", "bf16", **layout), folder, {})
        path, tally = latest(folder), Tally()
        assert verify(path) == []
        for name in loads:
            world, layout = TWELVE[name]
            found = pool.run(
                "tests.harness.checkpoints:load_and_count_on_rank", world, make_run("qwen3_moe", "bf16", **layout), path
            )
            wrong = [f"rank {rank} under {name}: {what}" for rank, (those, _) in enumerate(found) for what in those]
            assert not any(twice for _, twice in found), f"bytes read twice under {name}: {found}"
            print(*wrong[:10], sep="\n", end="\n" if wrong else "")
            tally.add(Tally(1, 1, len(wrong)))
    return tally


def bit_flips(folder: Path, seed: int, count: int) -> Tally:
    """Bits of a checkpoint, as many of each file: loading it names the file."""
    state = make_state(tiny_run())
    set_state(state)
    path, tally = save_here(state, folder).path, Tally()
    for file, bit in flips_of(path, count, seed):
        flip(file, bit)
        for load in [lambda: load_here(state, path)] + [lambda: load_weights(path, state.buffers, state.mesh)] * (
            file.parent.name == "weights"
        ):
            try:
                load()
                raise AssertionError(f"{file} was loaded with bit {bit} flipped")
            except DamagedCheckpoint as error:
                assert file.name in str(error), (file, bit, error)
        assert any(file.name in problem for problem in verify(path)), (file, bit)
        flip(file, bit)
        tally.add(Tally(1, 1, 0))
    assert verify(path) == []
    load_here(state, path)
    return tally


class FailingObjects(Failing, ObjectStorage):
    """Each request may be the last."""


class Bucket(str):
    """s3://bucket, and the server process that has it."""

    server: subprocess.Popen[str]

    def stop(self) -> None:
        """From now on nobody answers."""
        self.server.kill()
        self.server.wait()


@contextmanager
def object_server() -> Iterator[Bucket]:
    """s3://bucket on a server process of its own, to which this process' variables point inside the context."""
    for package in ("moto", "flask", "s3fs"):
        pytest.importorskip(package)
    forget = pytest.importorskip(
        "s3fs"
    ).S3FileSystem.clear_instance_cache  # fsspec keeps connections by the settings they are made with
    forget()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    line = next(line for line in server.stderr or [] if "Running on" in line)
    threading.Thread(target=server.stderr.read, daemon=True).start()  # type: ignore[union-attr]  # it writes a line per request
    settings = {
        "AWS_ENDPOINT_URL": re.findall(r"http://\S+", line)[0],
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    place("s3://bucket/x").fs.mkdir("bucket")
    try:
        bucket = Bucket("s3://bucket")
        bucket.server = server
        yield bucket
    finally:
        forget()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        server.kill()
        server.wait()


def requests_that_fail(folder: Path, how: str, first: int, every: int) -> Tally:
    """`raise`: one request fails (and what tidies up after it goes through); `refuse`: nothing more gets through, as
    of a process that is gone."""
    state, tally = make_state(tiny_run()), Tally()
    set_state(state)
    with object_server() as bucket:
        root = place(f"{bucket}/{how}-{first}/checkpoints")
        counting = FailingObjects(0)
        save_here(state, root, 10, storage=counting)
        for k in range(first, counting.count + 1, every):
            try:
                save_here(state, root, 20, storage=FailingObjects(k, how))
                raise AssertionError(f"request {k} failed and nobody was told")
            except CheckpointError as error:
                assert "No space left" in str(error)
            assert [p.name for p in list_checkpoints(root)] == ["step-00000010"] and verify(latest(root)) == [], (
                how,
                k,
            )
            tally.add(Tally(1, 1, 0))
        assert save_here(state, root, 20).written and [verify(p) for p in list_checkpoints(root)] == [[], []]
    return tally
