"""Saving in the background: the same bytes as saving at once, whatever training does meanwhile; errors and deaths
lose no earlier checkpoint."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from errno import ENOMEM
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from phalanx.base.errors import CheckpointError
from phalanx.base.placement import Placement
from phalanx.checkpoint import saver as saver_module
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.gather import plan_whole, written_where_whole
from phalanx.checkpoint.host import HostCopies
from phalanx.checkpoint.keep import Keep, latest, list_checkpoints
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.checkpoint.pinned import touched
from phalanx.checkpoint.save import Snapshot, Target, collect
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.storage import Storage
from phalanx.comm.axis import Axis
from phalanx.comm.host import host_axis
from phalanx.config.run import GuardConfig
from phalanx.engine.step import train_step
from phalanx.training.main import train
from phalanx.training.saves import numbers_of
from tests.checkpoint.test_checkpoint import TINY
from tests.harness.checkpoints import SCALARS, Failing, make_run, make_state, save_here, set_state
from tests.harness.parity import VOCAB, sample_batch
from tests.training.test_loop import make_run as small_run


@pytest.fixture
def tiny():
    state = make_state(replace(make_run("llama", "fp32", 100), model=TINY))
    set_state(state)
    return state


def make_saver(state, root: Path, storage: Storage | None = None, background: bool = True, **options) -> Saver:
    target = Target(root, storage or Storage(), Keep(2))
    axis = host_axis(state.mesh.world, 60.0, 60.0)
    return Saver(state, target, axis, background=background, **options)


def snapshot(state, step: int) -> Snapshot:
    return Snapshot(step, 80, state.plan.run.model, {"train": {"seed": state.plan.run.train.seed}}, SCALARS)


def scramble(state) -> None:
    """What the next step does to the run's memory."""
    for flat in state.buffers.flat:
        flat.storage.saved[1].fill_(9.0)
        flat.master.fill_(9.0)
    for shard in state.optimizer.shards:
        for kept in shard.state.values():
            kept.fill_(9.0)
    state.optimizer.step.fill_(9)
    state.scaler.scale.fill_(9)


class Gated(Storage):
    """A slow disk: writes wait until `gate` opens. `begun` tells that one is waiting."""

    def __init__(self):
        self.gate, self.begun = threading.Event(), threading.Event()

    def write(self, file, data):
        self.begun.set()
        assert self.gate.wait(60)
        return super().write(file, data)


def save_in_background(rank: int, world: int, run, root: Path) -> list[str]:
    """Start a save, destroy the run's memory, wait; the files that were written."""
    state = make_state(run, rank, world)
    set_state(state)
    saver = make_saver(state, root, max_file_bytes=20000)
    assert saver.start(snapshot(state, 10)) is None
    saver.release()
    scramble(state)
    return [f"{name} {r.xxh3}" for name, r in read_manifest(saver.wait().saved.path).files.items()]


@pytest.mark.parametrize(
    "model, precision, world, layout",
    [
        ("llama", "bf16", 4, dict(tp=2, sharding=1)),
        ("llama", "bf16", 3, dict(sharding=2)),
        ("llama", "bf16", 2, dict(sharding=3)),
        ("gpt2", "fp32", 2, dict(pp=2)),
        ("llama", "fp16", 1, dict()),
    ],
)
def test_it_writes_what_saving_at_once_writes(ranks, tmp_path, model, precision, world, layout):
    run = make_run(model, precision, **layout)
    ranks.run("tests.harness.checkpoints:save_on_rank", world, run, tmp_path / "at-once", {"max_file_bytes": 20000})
    wanted = read_manifest(latest(tmp_path / "at-once"))
    found = ranks.run("tests.checkpoint.test_checkpoint_background:save_in_background", world, run, tmp_path / "later")
    assert found == [[f"{name} {r.xxh3}" for name, r in wanted.files.items()]] * world
    assert read_manifest(latest(tmp_path / "later")) == wanted and verify(latest(tmp_path / "later")) == []


def sent_by_a_save(rank: int, world: int, run, root: Path) -> tuple[int, int]:
    """(tensors that this rank sends while it saves twice, files of weights that it writes)"""
    state, sent = make_state(run, rank, world), []
    set_state(state)
    saver, trade = make_saver(state, root, max_file_bytes=20000), Axis.trade

    def counted(axis, gives, takes):
        sent.extend(gives)
        return trade(axis, gives, takes)

    with patch.object(Axis, "trade", counted):
        for step in (10, 20):
            saver.start(snapshot(state, step))
            saver.release()
            saver.wait()
    contents = collect(snapshot(state, 30), state, 20000)
    assert verify(latest(root)) == []
    return len(sent), sum(file.writer == rank for file in contents.files)


@pytest.mark.parametrize(
    "layout, gathers",
    [
        (dict(sharding=1), False),
        (dict(sharding=2), False),
        (dict(sharding=3), True),
        (dict(tp=2), True),
    ],
)
def test_weights_that_a_rank_has_whole_are_not_sent(ranks, tmp_path, layout, gathers):
    """Each file is written by a rank that has its tensors, if there is one, and all ranks write some."""
    run = make_run("llama", "bf16", **layout)
    found = ranks.run("tests.checkpoint.test_checkpoint_background:sent_by_a_save", 2, run, tmp_path)
    assert [sent > 0 for sent, _ in found] == [gathers] * 2 and min(files for _, files in found) >= 2


def test_files_are_shared_out_among_the_ranks_that_have_them_whole():
    files = plan_whole([(f"{n}", (size,), torch.float32) for n, size in enumerate((5, 3, 3, 1, 4))], 4)
    planned = [replace(file, writer=n % 3) for n, file in enumerate(files)]
    found = written_where_whole(planned, [[0, 1, 2], [0, 1, 2, 3], [3]])
    assert [(f.writer, f.local) for f in found] == [(0, True), (1, True), (1, True), (2, True), (1, False)]


def test_the_run_does_not_wait_for_a_slow_disk_and_never_has_two_saves_under_way(tmp_path, tiny):
    disk = Gated()
    saver = make_saver(tiny, tmp_path, disk)
    assert saver.start(snapshot(tiny, 1)) is None and disk.begun.wait(60)
    assert saver.finished() is None and list_checkpoints(tmp_path) == []
    second = threading.Thread(target=lambda: saver.start(snapshot(tiny, 2)))
    second.start()
    disk.gate.set()
    second.join(60)
    assert list_checkpoints(tmp_path)[0].name == "step-00000001", "the second began when the first was over"
    assert saver.wait().saved.path.name == "step-00000002" and saver.wait() is None and saver.finished() is None


def test_a_failure_is_told_later_and_the_next_save_works(tmp_path, tiny):
    save_here(tiny, tmp_path, 5)
    saver = make_saver(tiny, tmp_path, Failing(6))
    assert saver.start(snapshot(tiny, 10)) is None
    with pytest.raises(
        CheckpointError,
        match=r"could not write .* No space left on device \(\d+ bytes of it were to be written so far, \d+ bytes",
    ):
        saver.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    saver.start(snapshot(tiny, 10))
    assert saver.wait().saved.written and verify(latest(tmp_path)) == []


def failing_rank(rank: int, world: int, run, root: Path) -> str:
    state = make_state(run, rank, world)
    saver = make_saver(state, root, Failing(2, "refuse") if rank == 1 else Storage())
    saver.start(snapshot(state, 10))
    try:
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_one_rank_that_cannot_write_is_told_on_all(ranks, tmp_path):
    errors = ranks.run("tests.checkpoint.test_checkpoint_background:failing_rank", 2, make_run("llama", tp=2), tmp_path)
    assert errors[0] == errors[1] and "rank 1: could not write" in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_in_mid_save_leaves_the_earlier_checkpoint(tmp_path, tiny):
    save_here(tiny, tmp_path, 5)
    for k in range(1, 20, 3):
        child = os.fork()
        if child == 0:
            saver = make_saver(tiny, tmp_path, Failing(k, "exit"))
            saver.start(snapshot(tiny, 10))
            saver.wait()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
        assert latest(tmp_path).name == "step-00000005" and verify(latest(tmp_path)) == []
    assert save_here(tiny, tmp_path, 10).written
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]


class Rotten(Storage):
    """A disk that stores one byte wrong and says nothing."""

    def write(self, file, data):
        return super().write(file, bytes([data[0] ^ 1]) + bytes(data[1:]))


def test_what_reads_back_wrong_never_gets_its_name(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="does not read back as it was written"):
        save_here(tiny, tmp_path, 5, storage=Rotten())
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_room_for_copies_waits_instead_and_says_so(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("phalanx.base.free_memory.control_groups", lambda root: [root])  # of a container
    monkeypatch.setattr("phalanx.base.free_memory.left_in", lambda group: 1000)
    saver = make_saver(tiny, tmp_path)
    outcome = saver.start(snapshot(tiny, 10))
    assert (
        outcome is not None
        and outcome.saved.written
        and "of the 1000 bytes of memory that are free on" in saver.why_not
    )


@pytest.mark.parametrize(
    "error", [OSError(ENOMEM, os.strerror(ENOMEM)), RuntimeError("can't allocate memory")], ids=str
)
def test_a_process_that_may_not_have_memory_for_copies_saves_and_says_so(tmp_path, tiny, monkeypatch, error):
    """A limit of the process: ulimit -v."""

    def refused(host, size):
        raise error

    monkeypatch.setattr(HostCopies, "_allocate", refused)
    saver = make_saver(tiny, tmp_path)
    outcome = saver.start(snapshot(tiny, 10))
    assert outcome is not None and outcome.saved.written
    assert "memory for copies cannot be had on" in saver.why_not and "memory" in saver.why_not.rpartition(": ")[2]


def test_host_memory_is_kept_from_save_to_save(tmp_path, tiny):
    saver = make_saver(tiny, tmp_path)
    places = []
    for step in (1, 2, 3):
        saver.start(snapshot(tiny, step))
        saver.wait()
        places.append(saver._host._memory.data_ptr())
        assert saver._host._used == len(saver._host._memory) > 10_000  # all of it is used
    assert places[0] == places[1] == places[2]


def test_memory_that_was_prepared_is_taken_once_it_is_there(tmp_path, tiny, monkeypatch):
    asked, begun, order, taken = threading.Event(), threading.Event(), [], HostCopies._taken

    def late(host, size):
        assert asked.wait(60)
        begun.wait(0.5)  # which a save that waits has not done
        host._allocate(size)
        order.append(("prepared", host._memory.data_ptr()))

    def takes(host, size):
        asked.set()
        taken(host, size)
        order.append(("begun", host._memory.data_ptr()))
        begun.set()

    monkeypatch.setattr(HostCopies, "_prepare", late)
    monkeypatch.setattr(HostCopies, "_taken", takes)
    saver = make_saver(tiny, tmp_path)
    saver.prepare(snapshot(tiny, 0))
    saver.start(snapshot(tiny, 10))
    assert saver.wait().saved.written and [what for what, _ in order] == ["prepared", "begun", "begun"]
    assert len({place for _, place in order}) == 1


def test_memory_that_could_not_be_prepared_is_asked_for_again(tmp_path, tiny, monkeypatch):
    allocate, calls = HostCopies._allocate, []

    def fails_once(host, size):
        calls.append(size)
        if len(calls) == 1:
            raise MemoryError("none yet")
        allocate(host, size)

    monkeypatch.setattr(HostCopies, "_allocate", fails_once)
    saver = make_saver(tiny, tmp_path)
    saver.prepare(snapshot(tiny, 0))
    saver.start(snapshot(tiny, 10))
    assert saver.wait().saved.written and calls[0] == calls[1] > 10_000


@pytest.mark.parametrize("interval, prepared", [(None, []), (2, [0])])
def test_a_run_prepares_for_saves_before_its_first_step(tmp_path, monkeypatch, interval, prepared):
    steps = []
    monkeypatch.setattr(Saver, "prepare", lambda saver, given: steps.append(given.step))
    train(replace(small_run(tmp_path, steps=3), checkpoint=CheckpointConfig(interval=interval)), Placement())
    assert steps == prepared


def test_memory_is_touched_whole_and_not_handed_to_forked_processes():
    """By threads, in pieces of 64 MiB. Flag dc of a mapping: do not copy on fork."""
    size = (130 << 20) + 5
    found = touched(size)
    first, rest = found.data_ptr() // 4096, Path("/proc/self/pagemap")
    with rest.open("rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (len(found) // 4096)), dtype=np.uint64)
    assert len(found) == 132 << 20 and (pages >> np.uint64(63)).all() and not found.any()
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ends = [(m, *(int(end, 16) for end in m.split()[0].split("-"))) for m in mappings if m]
    (its,) = [m for m, start, stop in ends if start <= found.data_ptr() < stop]
    assert "dc" in its.partition("VmFlags:")[2].split()


def test_release_waits_for_copies_that_another_thread_starts(tmp_path, tiny, monkeypatch):
    """The copies of the state begin once release has, and would find a run that did not wait scrambled."""
    releasing, changed = threading.Event(), threading.Event()
    copied, release = saver_module.copied, HostCopies.release

    def late(*given):
        assert releasing.wait(60)
        changed.wait(0.5)  # which a run that waits has not done
        return copied(*given)

    monkeypatch.setattr(saver_module, "copied", late)
    monkeypatch.setattr(HostCopies, "release", lambda host: (releasing.set(), release(host)))
    wanted = read_manifest(save_here(tiny, tmp_path / "at-once").path)
    saver = make_saver(tiny, tmp_path / "later")
    saver.start(snapshot(tiny, 10))
    saver.release()
    scramble(tiny)
    changed.set()
    assert read_manifest(saver.wait().saved.path) == wanted


def test_a_copy_that_fails_is_told_and_nothing_waits_for_it(tmp_path, tiny, monkeypatch):
    saver = make_saver(tiny, tmp_path)
    real = HostCopies.copy

    def copy(host, x):
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no host memory")
        return real(host, x)

    monkeypatch.setattr(HostCopies, "copy", copy)
    saver.start(snapshot(tiny, 10))
    saver.release()
    with pytest.raises(MemoryError, match="no host memory"):
        saver.wait()


def test_the_copy_is_waited_for_before_anything_of_it_changes():
    """On a GPU the copy runs beside the next forward and backward; `release` comes before the update, the guard's
    window included."""
    run = replace(make_run("llama", "fp32", 100), model=replace(TINY, vocab_size=VOCAB))
    tiny = make_state(replace(run, train=replace(run.train, guard=GuardConfig(sigmas=6.0))))
    set_state(tiny)
    saved = {**numbers_of(tiny), "step": tiny.optimizer.step, "scale": tiny.scaler.scale}
    saved |= {f"{i} {k}": s.values(k) for i, s in enumerate(tiny.optimizer.shards) for k in ("master", "m", "v")}
    saved |= {f"{i} weight": f.weight for i, f in enumerate(tiny.buffers.flat)}
    before, same = {name: value.clone() for name, value in saved.items()}, []
    tiny.before_update = lambda: same.append(all(torch.equal(saved[name], before[name]) for name in saved))
    train_step(tiny, [sample_batch([0, 1], False)], lr=1e-2)
    assert same == [True] and {name for name in saved if torch.equal(saved[name], before[name])} == {"scale"}
