"""Threads that write and read a checkpoint: every task is done once, the same bytes come of any number of threads,
and a failure ends all."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from math import prod

import pytest
import torch

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.keep import list_checkpoints
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.checkpoint.staging import StagingBuffer
from phalanx.checkpoint.storage import Storage
from phalanx.checkpoint.tensors import OPEN_FILES, CheckedFile, lately, write_tensors
from phalanx.checkpoint.threads import LEAST, MOST, in_threads, share_of
from tests.harness.checkpoints import KINDS, Failing, expected, load_here, make_run, make_state, save_here, set_state

SMALL = {"max_file_bytes": 20000}


@pytest.fixture(scope="module")
def state():
    made = make_state(make_run("llama", "bf16"))
    set_state(made)
    return made


@pytest.mark.parametrize(
    "cores, ranks, threads", [(64, 4, 16), (128, 8, 16), (16, 2, 8), (2, 1, LEAST), (1, 8, LEAST), (512, 1, MOST)]
)
def test_ranks_of_a_host_share_its_cores(cores, ranks, threads):
    assert share_of(cores, ranks) == threads


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_every_task_is_done_once(threads):
    done = list[int]()
    in_threads(range(20), lambda tasks: done.extend(tasks), threads)
    assert sorted(done) == list(range(20)) and (threads > 1 or done == sorted(done))


def test_an_error_ends_the_threads_and_is_raised():
    """While one thread fails the other has begun; it gets no further than it is by then."""
    done, both = list[int](), threading.Barrier(2)

    def worker(tasks):
        for task in tasks:
            if task < 2:
                both.wait(60)
            if task == 0:
                raise CheckpointError("task 0")
            done.append(task)

    with pytest.raises(CheckpointError, match="task 0"):
        in_threads(range(3_000_000), worker, 2)
    assert 0 < len(done) < 2_999_999


class Together(Storage):
    """The first writes of two threads must come at the same time."""

    def __init__(self):
        self.both, self.own = threading.Barrier(2), threading.local()

    def write(self, file, data):
        if threading.current_thread() is not threading.main_thread() and not hasattr(self.own, "met"):
            self.own.met = self.both.wait(60)
        return super().write(file, data)


def test_files_of_the_state_are_written_at_the_same_time_and_are_the_same_as_one_after_the_other(tmp_path, state):
    one = save_here(state, tmp_path / "one", threads=1, **SMALL).path
    two = save_here(state, tmp_path / "two", threads=2, storage=Together(), **SMALL).path
    assert read_manifest(one).files == read_manifest(two).files and verify(two) == []
    files = [n for n in read_manifest(two).files if n.startswith("state/rank-00000")]
    assert (
        len(files) > 10 and all(n.count("-") == 2 for n in files[:-1]) and files[-1] == "state/rank-00000.safetensors"
    )
    other = make_state(state.plan.run)
    load_here(other, two)
    assert all(torch.equal(s.values(kind), expected(s, kind)) for s in other.optimizer.shards for kind in KINDS)


def test_no_box_makes_a_file_of_the_state_larger_than_the_others(tmp_path, state):
    """One thread writes each file: a file larger than the rest is what the others wait for."""
    limit = 3000
    path = save_here(state, tmp_path, max_file_bytes=limit).path
    index, largest = json.loads((path / "state/index.json").read_text()), 0
    for file, boxes in index["files"].items():
        bytes_of = [prod(b - a for a, b in zip(start, stop)) * 4 * len(KINDS) for _, _, start, stop in boxes]
        rows = [n // (stop[0] - start[0]) for n, (_, _, start, stop) in zip(bytes_of, boxes)]
        assert sum(bytes_of) <= max(limit, *rows), file
        largest = max(largest, sum(bytes_of))
    names = [name for boxes in index["files"].values() for name, *_ in boxes]
    assert len(names) > len(set(names)) and largest > limit / 2 and verify(path) == []
    other = make_state(state.plan.run)
    load_here(other, path)
    assert all(torch.equal(s.values(kind), expected(s, kind)) for s in other.optimizer.shards for kind in KINDS)


def test_a_thread_that_cannot_write_fails_the_save(tmp_path, state):
    """Several may see the full disk; one of them says so, and nothing is left."""
    with pytest.raises(CheckpointError, match="No space left"):
        save_here(state, tmp_path, storage=Failing(40, "refuse"), threads=4, **SMALL)
    assert list_checkpoints(tmp_path) == []
    assert save_here(state, tmp_path, threads=4, **SMALL).written and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "shape, dtype, bounds",
    [
        (
            (11001, 1000),
            torch.float32,
            [(0, 11001), (3000, 8001), (10999, 11001), (4194, 4195)],
        ),  # rows of 4000 bytes end in mid chunk
        ((3, 9 << 20), torch.bfloat16, [(0, 3), (1, 2)]),  # a row is more than a piece
        ((12 << 20,), torch.float32, [(5, (12 << 20) - 1)]),
    ],
)
def test_pieces_are_the_rows_and_every_byte_is_read_once(tmp_path, monkeypatch, shape, dtype, bounds):
    truth = torch.randint(0, 120, (prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)
    receipt = write_tensors(
        Storage(), tmp_path / "f", [("a", (3,), torch.float32), ("x", shape, dtype)], [torch.ones(3), truth]
    )
    read, original = list[tuple[int, int]](), CheckedFile._read_into
    with CheckedFile(tmp_path / "f", receipt) as file:
        monkeypatch.setattr(
            CheckedFile,
            "_read_into",
            lambda self, data, at: (read.append((at, at + len(data))), original(self, data, at))[1],
        )
        for first, stop in bounds:
            landing, found, at = StagingBuffer(None), torch.empty((stop - first, *shape[1:]), dtype=dtype), first
            for number, rows in file.pieces("x", first, stop, landing.take):
                assert number == at
                found[number - first : number - first + len(rows)] = rows
                at += len(rows)
            assert at == stop and torch.equal(found, truth[first:stop])
            assert all(b == c for (_, b), (c, _) in pairwise(read)) and len(read) > 0
            read.clear()


class Counted:
    open = 0

    def __init__(self, name: int):
        self.name = name
        Counted.open += 1

    def __exit__(self, *_):
        Counted.open -= 1


def test_a_thread_keeps_few_files_open():
    with lately(Counted) as files:
        first = files(0)
        for number in range(1, 50):
            assert files(number).name == number and files(0) is first and Counted.open <= OPEN_FILES
    assert Counted.open == 0
