"""Who else may change what a run is about to load: said, not decided; what is loaded is data alone (safetensors,
JSON), never code."""

from __future__ import annotations

import stat
from pathlib import Path, PosixPath


def open_to_all(folder: Path) -> str | None:
    """What to tell of a local folder in which anybody on the machine may replace files; None where nobody may, or in
    object storage.

    With the sticky bit others may add files, but not replace ours; names that a manifest does not know are never
    opened.
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
