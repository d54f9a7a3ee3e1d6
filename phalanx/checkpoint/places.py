"""Places of checkpoints, a folder or a prefix in object storage, as paths that can be read; and similar paths for a
mistyped one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from phalanx.base.errors import CheckpointError
from phalanx.base.rules import near_paths


def is_remote(path: Any) -> bool:
    """Whether it is in object storage: `s3://bucket/prefix` (or another protocol known to fsspec)."""
    return not isinstance(path, Path) and "://" in str(path)


def place(path: str | Path) -> Path:
    """A path to read from. In object storage it is one with the methods of `Path` (universal_pathlib), which queries
    the server each time."""
    if not is_remote(path):
        return Path(path)
    try:
        from phalanx.checkpoint.remote_path import RemotePath

        return cast(Path, path if isinstance(path, RemotePath) else RemotePath(path))
    except ImportError as error:
        raise CheckpointError(f"{path} needs a package: pip install 'phalanx[s3]' ({error})") from error


def missing(path: Path, what: str = "checkpoint") -> str:
    """A message that a path does not exist, with similar ones."""
    near = () if is_remote(path) else near_paths(str(path))
    return f"there is no {what} {path}" + (f"; near it: {', '.join(near)}" if near else "")
