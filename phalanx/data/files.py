"""Files that appear whole or not at all, and helpful words about those that are missing; what is in them is left to others."""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from phalanx.base.errors import DataError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends well (written beside it, fsync, rename) and vanishes otherwise."""
    target = Path(path)
    temporary = temporary_name(target)
    try:
        with open(temporary, "wb") as file:
            yield file
            sync(file)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(target: Path) -> Path:
    return target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def must_exist(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path. DataError names the exact missing file and the names near it in its folder."""
    path = Path(path)
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise DataError(f"{path}: no such file; its folder {path.parent} does not exist either")
    names = sorted(entry.name for entry in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = f"near it in {path.parent}: {', '.join(near)}" if near else f"nothing in {path.parent} has a name near it"
    raise DataError(f"{path}: no such file; {hint}")
