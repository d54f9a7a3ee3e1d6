"""What the checkpoint tests run on each rank, disks that fail, and values of every element that are made without the
code under test."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from phalanx.base.errors import CheckpointError
from phalanx.base.rng import fill_normal_
from phalanx.checkpoint.boxes import items_in, kept_to_load, kept_to_save, state_to_load, state_to_save
from phalanx.checkpoint.exchange import exchange
from phalanx.checkpoint.load import load_state, load_weights
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.places import place
from phalanx.checkpoint.save import SAVE_FILE_BYTES, Saved, Snapshot, Target, collect, write
from phalanx.checkpoint.storage import Storage
from phalanx.checkpoint.tensors import CheckedFile
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data_parallel.flat import FlatBucket
from phalanx.engine.build import State, build
from phalanx.forecast.decide import make_plan
from phalanx.layout.buckets import Bucket
from phalanx.layout.config import LayoutConfig
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.shard import MASTER, Shard
from tests.harness.parity import base_run

KINDS = ("master", "m", "v")
SCALARS = {"tokens": 2**53 + 1, "loss": 0.1 + 0.2, "skipped": 3, "list": [1.0, 1e-310]}


def make_run(model: str, precision: str = "bf16", bucket_mb: int = 0, **layout) -> Run:
    return replace(base_run(model, precision=precision), layout=LayoutConfig(bucket_mb=bucket_mb, **layout))


def make_state(run: Run, rank: int = 0, world: int = 1) -> State:
    plan = make_plan(run, world)
    return build(plan, Mesh(plan.grid, rank))


def values(bucket: Bucket, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The whole bucket (numel,) of one kind: a function of global names and positions alone."""
    flat = torch.zeros(bucket.numel, dtype=dtype)
    for slot in bucket.slots:
        storage = flat[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
        for piece in slot.spec.pieces:
            fill_normal_(piece.of(storage), 0.3, piece.shape, piece.box.start, sum(kind.encode()), piece.name)
    return flat


def expected(shard: Shard, kind: str) -> torch.Tensor:
    return values(shard.bucket, kind, shard.master.dtype)[shard.lo : shard.hi]


def set_state(state: State) -> None:
    for shard in state.optimizer.shards:
        for kind in shard.kinds:
            kept = shard.stored(kind)
            (kept.store_ if isinstance(kept, PackedTensor) else kept.copy_)(expected(shard, kind))
    for flat in (f for f in state.buffers.flat if not f.bucket.learns):
        flat.master.copy_(values(flat.bucket, "master", flat.master.dtype)[flat.lo : flat.hi])
    state.optimizer.step.fill_(7)
    state.scaler.scale.fill_(1024.0 / 3)
    state.scaler.good.fill_(41)
    state.buffers.publish()


def save_here(state: State, root: Path, step: int = 10, **options) -> Saved:
    run = state.plan.run
    snapshot = Snapshot(step, 80, run.model, {"train": {"seed": run.train.seed}}, SCALARS)
    return save(root, snapshot, state, **options)


def save(root: Path, snapshot: Snapshot, state: State, storage: Storage | None = None, **options) -> Saved:
    """To `root/step-XXXXXXXX/`, on all ranks together. options: fields of Target, or max_file_bytes."""
    content = collect(snapshot, state, options.pop("max_file_bytes", SAVE_FILE_BYTES))
    target = Target(place(root), storage or storage_for(place(root)), **options)
    return write(content, target, state.mesh.world)


def load_here(state: State, path: Path, **options) -> dict:
    return load_state(path, state, **options)


def save_on_rank(rank: int, world: int, run: Run, root: Path, options: dict) -> bool:
    state = make_state(run, rank, world)
    set_state(state)
    return save_here(state, root, **options).written


def load_on_rank(rank: int, world: int, run: Run, path: Path) -> list[str]:
    """What differs, bit for bit, after loading under this layout."""
    state = make_state(run, rank, world)
    for flat in state.buffers.flat:
        flat.storage.weight_kept.fill_(5.0)
    for holder in state.buffers.holders:
        kept = holder.master
        (kept.store_ if isinstance(kept, PackedTensor) else kept.copy_)(torch.full((len(kept),), 5.0))
    loop = load_here(state, path, model=run.model)
    wrong = [] if loop == {**SCALARS, "step": 10, "consumed_samples": 80} else [f"scalars {loop}"]
    scaler = [t.item() for t in state.scaler.state().values()]
    if state.optimizer.step.item() != 7 or scaler[:2] != [torch.tensor(1024.0 / 3).item(), 41]:
        wrong.append(f"optimizer scalars {state.optimizer.step} {scaler}")
    for shard in state.optimizer.shards:
        wrong += [
            f"{kind} of {shard.bucket}"
            for kind in shard.kinds
            if not torch.equal(shard.values(kind), expected(shard, kind))
        ]
    for flat in state.buffers.flat:
        whole = values(flat.bucket, "master", flat.master.dtype).to(flat.weight.dtype)
        wrong += [] if torch.equal(flat.storage.weight_kept, kept_of(flat, whole)) else [f"weights of {flat.bucket}"]
    return wrong


def kept_of(flat: FlatBucket, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole bucket whose weights this rank keeps."""
    return whole[flat.storage.weight_at : flat.storage.weight_at + len(flat.storage.weight_kept)]


def load_and_count_on_rank(rank: int, world: int, run: Run, path: Path) -> tuple[list[str], int]:
    """What load_on_rank finds, and how many bytes of state files (headers aside) were read more than once."""
    read, original = list[tuple[str, int, int]](), CheckedFile._read_into

    def counted(file: CheckedFile, data: memoryview, at: int) -> None:
        if file.path.parent.name == "state" and at >= getattr(file, "_data", 1 << 62):
            read.append((file.path.name, at, len(data)))
        original(file, data, at)

    CheckedFile._read_into = counted  # type: ignore[method-assign]
    try:
        wrong = load_on_rank(rank, world, run, path)
    finally:
        CheckedFile._read_into = original  # type: ignore[method-assign]
    assert read, "it was not read through CheckedFile"
    twice, end = 0, ("", 0)
    for name, at, size in sorted(read):
        twice += max(0, min(end[1], at + size) - at) if name == end[0] else 0
        end = (name, max(end[1] if name == end[0] else 0, at + size))
    return wrong, twice


def load_weights_on_rank(rank: int, world: int, run: Run, folder: Path, truth: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not exactly (the cast of) the truth after loading a Hugging Face folder under this
    layout."""
    state = make_state(run, rank, world)
    load_weights(folder, state.buffers, state.mesh)
    wrong = []
    for flat in state.buffers.flat:
        whole = torch.zeros(flat.bucket.numel, dtype=flat.master.dtype)
        for slot in flat.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                piece.of(storage).copy_(torch.from_numpy(truth[piece.name])[piece.box.slices()])
        good = torch.equal(flat.storage.weight_kept, kept_of(flat, whole.to(flat.weight.dtype))) and torch.equal(
            flat.master, whole[flat.lo : flat.hi]
        )
        wrong += [] if good else [p.name for slot in flat.bucket.slots for p in slot.spec.pieces]
    return wrong


def error_on_rank(rank: int, world: int, run: Run, what: str, path: Path, failing: int = 0, operation: int = 0) -> str:
    """The CheckpointError of loading, or of saving while the disk of rank `failing` refuses from one operation on."""
    state = make_state(run, rank, world)
    set_state(state)
    try:
        if what == "load_weights":
            load_weights(path, state.buffers, state.mesh)
        elif what == "load_state":
            load_here(state, path, model=run.model)
        else:
            save_here(state, path, 20, storage=Failing(operation, "refuse") if rank == failing else Storage())
    except CheckpointError as error:
        return str(error)
    return "no error"


class Failing(Storage):
    """A disk that stops at operation number `at`: `raise` once, `refuse` from then on, or `exit` the process in the
    middle of it.

    Operations of several threads are counted as they come, so only those of one thread have the same number in every
    save.
    """

    def __init__(self, at: int, how: str = "raise"):
        self.at, self.how, self.count, self._one = at, how, 0, threading.Lock()

    def _tick(self, torn: Callable[[], object] = lambda: None) -> None:
        with self._one:
            self.count += 1
            number = self.count
        if number == self.at:
            torn()
        if number == self.at and self.how == "exit":
            os._exit(137)
        if number == self.at or (self.how == "refuse" and number > self.at):
            raise OSError(28, "No space left on device")

    def make_folder(self, path):
        self._tick()
        super().make_folder(path)

    def create(self, path):
        self._tick()
        return super().create(path)

    def write(self, file, data):
        self._tick(lambda: super(Failing, self).write(file, data[: len(data) // 2]))
        return super().write(file, data)

    def sync(self, file):
        self._tick()
        super().sync(file)

    def sync_folder(self, path):
        self._tick()
        super().sync_folder(path)

    def rename(self, old, new):
        self._tick()
        super().rename(old, new)

    def remove_file(self, path):
        self._tick()
        super().remove_file(path)

    def remove_folder(self, path):
        self._tick()
        super().remove_folder(path)


class Lossy(Failing):
    """A disk that forgets at `crash` what was not synced: contents of files, names in folders, renames. `seed`: a
    random part of it."""

    def __init__(self, at: int, seed: int | None = None):
        super().__init__(at)
        self.pick = None if seed is None else random.Random(seed)
        self.data: set[int] = set()
        self.names: set[int] = set()
        self.renames: list[tuple[Path, Path]] = []

    def make_folder(self, path):
        super().make_folder(path)
        self.names.add(os.stat(path).st_ino)

    def create(self, path):
        file = super().create(path)
        self.data.add(os.fstat(file).st_ino)
        self.names.add(os.fstat(file).st_ino)
        return file

    def sync(self, file):
        super().sync(file)
        self.data.discard(os.fstat(file).st_ino)

    def sync_folder(self, path):
        super().sync_folder(path)
        self.names -= {p.lstat().st_ino for p in path.iterdir()}
        self.renames = [r for r in self.renames if r[1].parent != path]

    def rename(self, old, new):
        super().rename(old, new)
        self.renames.append((old, new))

    def remove_file(self, path):
        number = path.lstat().st_ino
        super().remove_file(path)
        self.names.discard(number)
        self.data.discard(number)

    def _forgets(self) -> bool:
        return self.pick is None or self.pick.random() < 0.5

    def crash(self, root: Path, undo_renames: bool) -> None:
        for old, new in reversed(self.renames if undo_renames else []):
            if new.exists() and not old.exists():
                os.rename(new, old)
        for path in sorted(root.rglob("*"), reverse=True):
            number = path.lstat().st_ino
            if path.is_file() and number in self.data and self._forgets():
                os.truncate(path, path.stat().st_size // 2)
            if number in self.names and self._forgets():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def reshard_on_rank(rank: int, world: int, saved: Run, loaded: Run) -> list[str]:
    """What differs, bit for bit, after state went from one layout to another without files."""
    old, new = make_state(saved, rank, world), make_state(loaded, rank, world)
    set_state(old)
    kinds, boxes = old.optimizer.kinds, state_to_save(old.optimizer.shards, old.mesh)
    held = {kind: [box[kind] for box in boxes] for kind in kinds}
    to = [{kind: torch.full_like(s.values(kind), 5.0) for kind in s.kinds} for s in new.optimizer.shards]
    wanted = state_to_load(new.optimizer.shards, to)
    held[MASTER] += kept_to_save(old.buffers, old.mesh)
    wanted[MASTER] += kept_to_load(new.buffers)
    for kind in kinds:
        exchange(new.mesh.world, held[kind], wanted[kind], new.mesh.device)
    wrong = []
    for shard, values_of in zip(new.optimizer.shards, to):
        for kind, got in values_of.items():
            right, padding = expected(shard, kind), torch.ones(len(got), dtype=torch.bool)
            for item in items_in(shard.bucket, padding, shard.lo, shard.lo, shard.hi):
                item.view.fill_(False)
            wrong += [] if torch.equal(got.masked_fill(padding, 0), right) else [f"{kind} of {shard.bucket}"]
    for flat in (f for f in new.buffers.flat if not f.bucket.trained):
        right = values(flat.bucket, "master", flat.master.dtype)
        wrong += [] if torch.equal(flat.master, right) else [f"kept of {flat.bucket}"]
    return wrong
