"""Which checkpoints a folder holds, which is the newest good one, and which are removed. A committed checkpoint always
disappears by a rename."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.manifest import NAME, missing, parse, read_manifest
from phalanx.checkpoint.places import is_remote, place
from phalanx.checkpoint.storage import Storage, remove_tree
from phalanx.checkpoint.unreachable import Unreachable

COMMITTED = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"step-\d{8,}\.tmp-.+")
PIN = ".pin"


@dataclass(frozen=True)
class Keep:
    """What retention keeps: the newest `last` good checkpoints (0: all), those whose step is a multiple of `every`, and
    pinned ones."""

    last: int = 2
    every: int | None = None


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    found = COMMITTED.fullmatch(path.name)
    return int(found[1]) if found else -1


def list_checkpoints(root: str | Path) -> list[Path]:
    """Committed checkpoints in a folder, oldest step first. They may be damaged; half-written ones have other names.

    A folder that was renamed, or a link, is left out if its manifest is of another step than its name: see `misnamed`.
    In object storage, where nothing can be renamed, a folder without a manifest is half-written.
    """
    return [path for path in _named(root) if held_step(path) in (None, step_of(path))]


def misnamed(root: str | Path) -> list[str]:
    """What `list_checkpoints` leaves out, and why: a sentence for each."""
    warnings = []
    for path in _named(root):
        held = held_step(path)
        if held not in (None, step_of(path)):
            linked = f", a link to {path.readlink()}," if not is_remote(path) and path.is_symlink() else ""
            warnings.append(
                f"{path}{linked} is not used: its manifest is of step {held}; to use it, rename it to "
                f"{step_name(held or 0)}"
            )
    return warnings


def ignored(path: str | Path) -> list[str]:
    """`misnamed` of the folders that `candidates` looks into."""
    path = place(path)
    return [] if (path / NAME).exists() or not path.is_dir() else [*misnamed(path / "checkpoints"), *misnamed(path)]


def held_step(path: Path) -> int | None:
    """The step in a checkpoint's manifest; None if that cannot be read."""
    try:
        return parse(path).step
    except Unreachable:
        raise
    except CheckpointError:
        return None


def _named(root: str | Path) -> list[Path]:
    root = place(root)
    found = [p for p in (root.iterdir() if root.is_dir() else ()) if COMMITTED.fullmatch(p.name) and p.is_dir()]
    return sorted((p for p in found if not is_remote(p) or (p / NAME).exists()), key=step_of)


def newest_first(root: str | Path) -> list[Path]:
    """The checkpoints that a run may continue from, newest first. CheckpointError if all there are have another step's
    name."""
    found = list_checkpoints(root)[::-1]
    if not found and (warnings := misnamed(root)):
        raise CheckpointError(f"no checkpoint in {root} can be used:\n" + "\n".join(warnings))
    return found


def problem_of(path: Path) -> str | None:
    """What a quick check (manifest, sizes) finds wrong with a checkpoint."""
    try:
        read_manifest(path)
    except Unreachable:
        raise
    except CheckpointError as error:
        return str(error)
    return None


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint whose manifest and sizes are good; None if there are none at all.

    Raises CheckpointError if there are checkpoints but none is good, because a run must not start again from nothing in
    that case.
    """
    problems = []
    for path in reversed(list_checkpoints(root)):
        problem = problem_of(path)
        if problem is None:
            return path
        problems.append(problem)
    problems += misnamed(root)
    if problems:
        raise none_good(root, problems)
    return None


def none_good(root: str | Path, problems: list[str]) -> CheckpointError:
    return DamagedCheckpoint(f"no checkpoint in {root} is good:\n" + "\n".join(problems))


def candidates(path: str | Path) -> list[Path]:
    """The checkpoints that a path refers to, the best first: one itself, or those in a run's folder or in its
    `checkpoints` folder, newest first."""
    path = place(path)
    if (path / NAME).exists() or (COMMITTED.fullmatch(path.name) and path.exists()):
        return [path]
    for root in (path / "checkpoints", path):
        if found := newest_first(root):
            return found
    raise CheckpointError(f"there is no checkpoint in {path}" if path.is_dir() else missing(path))


def find(path: str | Path) -> Path:
    """The checkpoint that a path refers to: one itself, or the newest in a run's folder whose manifest and sizes are
    good."""
    found = candidates(path)
    if len(found) == 1 and found[0] == place(path):
        return found[0]
    newest = latest(found[0].parent)
    return newest or found[0]


def pin_of(path: Path) -> Path:
    """The file beside a checkpoint that pins it as long as it exists."""
    return path.with_name(path.name + PIN)


def spared(root: Path, keep: Keep, protect: Iterable[Path] = ()) -> list[Path]:
    """Good checkpoints that stay: those of Keep, protected ones, and those that a link in the folder points to."""
    there = list_checkpoints(root)
    good = [p for p in there if problem_of(p) is None]
    every = [p for p in good if keep.every and step_of(p) % keep.every == 0]
    if is_remote(root):
        return [*good[-keep.last :], *every, *(p for p in there if pin_of(p).exists()), *protect]
    linked = [p.resolve() for p in root.iterdir() if p.is_symlink()]
    return [*good[-keep.last :], *every, *(p for p in there if pin_of(p).exists() or p.resolve() in linked), *protect]


def retain(root: Path, keep: Keep, storage: Storage, protect: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """Remove checkpoints that are older than the newest `keep.last` good ones and not kept otherwise; returns which
    were removed, and what failed.

    A damaged checkpoint does not count: it is not kept in place of a good one and, if newer than these, not removed.
    """
    if keep.last == 0:
        return [], []
    there = [p for p in list_checkpoints(root) if not p.is_symlink()]
    kept = [p for p in there if problem_of(p) is None][-keep.last :]
    names = {_same(p) for p in (*kept, *spared(root, keep, protect))}
    old = [p for p in there[: there.index(kept[0])] if _same(p) not in names] if kept else []
    problems = {str(p): _remove(p, storage) for p in old}
    return [path for path, problem in problems.items() if problem is None], [
        problem for problem in problems.values() if problem is not None
    ]


def _same(path: Path) -> str:
    return str(path if is_remote(path) else path.resolve())


def _remove(path: Path, storage: Storage) -> str | None:
    try:
        storage.retire(path)
    except OSError as error:
        return f"could not remove the old checkpoint {path}: {error.strerror or error}"
    return None


def remove_leftovers(root: Path, storage: Storage) -> list[str]:
    """Remove what killed saves and removals left behind; returns what failed. Only the holder of the run's lock may
    call this."""
    problems = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if _is_leftover(path) and path.is_dir() and not path.is_symlink():
            try:
                remove_tree(storage, path)
            except OSError as error:
                problems.append(f"could not remove {path}, left by a killed save: {error.strerror or error}")
    return problems


def _is_leftover(path: Path) -> bool:
    """Whether a folder has a temporary name or, in object storage, no manifest."""
    if is_remote(path):
        return COMMITTED.fullmatch(path.name) is not None and not (path / NAME).exists()
    return LEFTOVER.fullmatch(path.name) is not None
