"""Who else may change what a run is about to load. This is reported, not enforced; only data is loaded (safetensors,
JSON), never code."""

from __future__ import annotations

import stat
from pathlib import Path, PosixPath


def open_to_all(folder: Path) -> str | None:
    """A warning about a local folder in which anybody on the machine may replace files; None if nobody may, or in
    object storage.

    With the sticky bit others may add files but not replace ours; names that are not in a manifest are never opened.
    """
    if not isinstance(folder, PosixPath):
        return None
    mode = folder.stat().st_mode
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return None
    return (
        f"{folder} may be written by anybody (mode {stat.S_IMODE(mode):o}): who may can change what is "
        f"loaded; chmod o-w {folder}"
    )
