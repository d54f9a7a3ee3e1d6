"""Paths in object storage that raise our errors: each operation asks the server, and whatever its client raises becomes
`Unreachable`.

universal_pathlib (extra `s3`) is imported with this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from upath.extensions import ProxyUPath

from phalanx.checkpoint.unreachable import ask


class RemotePath(ProxyUPath):
    """A path with the methods of `pathlib.Path`, which queries the server each time."""

    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **{"use_listings_cache": False, **options})

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = ask(self, lambda: self.__wrapped__.open(mode, *args, **options))
        return RemoteFile(self, file) if "r" in mode else file  # objects.ObjectStorage asks when it writes


def _question(name: str) -> Callable[..., Any]:
    def call(self: RemotePath, *args: Any, **options: Any) -> Any:
        return ask(self, lambda: getattr(ProxyUPath, name)(self, *args, **options))

    return call


def _listing(name: str) -> Callable[..., Iterator[RemotePath]]:
    def call(self: RemotePath, *args: Any, **options: Any) -> Iterator[RemotePath]:
        return iter(ask(self, lambda: list(getattr(ProxyUPath, name)(self, *args, **options))))

    return call


QUESTIONS = (
    "exists",
    "is_dir",
    "is_file",
    "is_symlink",
    "stat",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "unlink",
    "touch",
    "mkdir",
)
for _name in QUESTIONS:
    setattr(RemotePath, _name, _question(_name))
for _name in ("iterdir", "glob", "rglob"):
    setattr(RemotePath, _name, _listing(_name))


class RemoteFile:
    """A file being read: each call asks the server."""

    def __init__(self, path: RemotePath, file: Any):
        self._path, self._file = path, file

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        return (lambda *args, **options: ask(self._path, lambda: value(*args, **options))) if callable(value) else value

    def __iter__(self) -> Iterator[Any]:
        while line := self.readline():
            yield line

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
