"""Which checkpoints a folder holds, which is the newest good one, and which are removed: committed ones only ever go by a rename."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.manifest import NAME, missing, read_manifest
from phalanx.checkpoint.storage import Storage, remove_tree

COMMITTED = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"step-\d{8,}\.tmp-.+")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary(folder: Path, why: str) -> Path:
    """A name beside `folder` that is never taken for a checkpoint, and that the next save removes."""
    return folder.with_name(f"{folder.name}.tmp-{why}-{uuid.uuid4().hex[:8]}")


def list_checkpoints(root: str | Path) -> list[Path]:
    """Committed checkpoints in a folder, oldest step first. They may be damaged; half-written ones have other names."""
    root = Path(root)
    found = [(int(m[1]), p) for p in (root.iterdir() if root.is_dir() else ()) if (m := COMMITTED.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def problem_of(path: Path) -> str | None:
    """What a quick look (manifest, sizes) finds wrong with a checkpoint."""
    try:
        read_manifest(path)
    except CheckpointError as error:
        return str(error)
    return None


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint whose manifest and sizes are good; None if there are none at all.

    Raises CheckpointError if there are checkpoints but none is good: a run must not start again from nothing because of that.
    """
    problems = []
    for path in reversed(list_checkpoints(root)):
        problem = problem_of(path)
        if problem is None:
            return path
        problems.append(problem)
    if problems:
        raise CheckpointError(f"no checkpoint in {root} is good:\n" + "\n".join(problems))
    return None


def find(path: str | Path) -> Path:
    """The checkpoint that a user means: one itself, or the newest of a run's folder or of its `checkpoints` folder."""
    path = Path(path)
    if (path / NAME).exists() or COMMITTED.fullmatch(path.name):
        return path
    for root in (path / "checkpoints", path):
        newest = latest(root)
        if newest is not None:
            return newest
    raise CheckpointError(f"there is no checkpoint in {path}" if path.is_dir() else missing(path))


def retain(root: Path, keep_last: int, storage: Storage, protect: Iterable[Path] = ()) -> list[str]:
    """Remove all but the newest `keep_last` good checkpoints (0 keeps all) and those protected. What fails is told, not raised.

    A damaged one counts for nothing: it neither is kept in place of a good one nor, if newer than these, removed.
    """
    if keep_last == 0:
        return []
    there = [p for p in list_checkpoints(root) if not p.is_symlink()]
    kept = [p for p in there if problem_of(p) is None][-keep_last:]
    spared = {p.resolve() for p in (*kept, *protect)}
    old = [p for p in there[: there.index(kept[0])] if p.resolve() not in spared] if kept else []
    return [problem for p in old if (problem := _remove(p, storage)) is not None]


def _remove(path: Path, storage: Storage) -> str | None:
    """First its name, for good, then its files: no crash leaves half of it under its name."""
    try:
        doomed = temporary(path, "old")
        storage.rename(path, doomed)
        storage.sync_folder(path.parent)
        remove_tree(storage, doomed)
    except OSError as error:
        return f"could not remove the old checkpoint {path}: {error.strerror or error}"
    return None


def remove_leftovers(root: Path, storage: Storage) -> list[str]:
    """What killed saves and removals left behind; what fails is told. Only the holder of the run's lock may call this."""
    problems = []
    for path in sorted(root.iterdir()):
        if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            try:
                remove_tree(storage, path)
            except OSError as error:
                problems.append(f"could not remove {path}, left by a killed save: {error.strerror or error}")
    return problems
