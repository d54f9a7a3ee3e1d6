"""Object storage (S3 and compatible) as a Storage, through fsspec. Reading uses the paths of `places`.

An object appears whole when its upload is completed, and is durable from then on; there are no folders and no renames.
So files are written to their final place. The manifest is written last, which makes them a checkpoint, and is removed
first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.checkpoint.manifest import NAME
from phalanx.checkpoint.places import is_remote
from phalanx.checkpoint.storage import FOLDERS, Storage, remove_tree
from phalanx.checkpoint.unreachable import ask


def storage_for(root: Path) -> Storage:
    return ObjectStorage() if is_remote(root) else Storage()


class ObjectStorage(Storage):
    """Each operation asks the server and waits; whatever its client raises becomes Unreachable, an OSError."""

    def begin(self, final: Path, folders: tuple[str, ...] = FOLDERS) -> Path:
        if final.is_dir():  # remains of a killed save, or a damaged checkpoint
            self.retire(final)
        return final

    def commit(self, folder: Path, final: Path) -> None:
        """The manifest has been written, so nothing is left to do."""

    def retire(self, path: Path) -> None:
        if (path / NAME).exists():
            self.remove_file(path / NAME)
        remove_tree(self, path)

    def make_folder(self, path: Path) -> None:
        """Nothing to do: folders are parts of names."""

    def create(self, path: Path) -> Any:
        return path.open("wb")

    def write(self, file: Any, data: memoryview) -> int:
        return ask(file.path, lambda: file.write(data))

    def sync(self, file: Any) -> None:
        """Complete the upload."""
        ask(file.path, file.close)

    def close(self, file: Any) -> None:
        """Abort an upload that was not completed: nothing of it becomes visible."""
        if not file.closed:
            ask(file.path, file.discard)
            file.closed = True

    def sync_folder(self, path: Path) -> None:
        """Nothing to do: completed objects are durable."""

    def rename(self, old: Path, new: Path) -> None:
        raise OSError(f"object storage cannot rename {old}")

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Nothing to do: folders are parts of names."""

    def free(self, path: Path) -> int | None:
        return None
