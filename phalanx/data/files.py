"""Files that appear whole or not at all, finding a tokenizer's file, and helpful messages about what is missing. File
contents are handled elsewhere."""

from __future__ import annotations

import difflib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from phalanx.base.errors import DataError

BYTES = "bytes"
NULL = "null:"
# of a folder, the first that is there
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file that replaces `path` when the block ends without an error (written beside it, fsync, rename) and
    disappears otherwise."""
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


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """The file of a tokenizer: `path` itself, or one in the folder `path`. DataError if there is none."""
    path = must_exist(path)
    if not path.is_dir():
        return path
    found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()] or sorted(path.glob("*.tiktoken"))
    if not found:
        raise DataError(f"{path}: holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}, and no .tiktoken file")
    return found[0]


def extra(module: str, needed: str, name: str) -> Any:
    """An optional library. DataError names the extra `name` that installs it; `needed` begins the sentence, such as
    `.zst files need`."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{needed} {module.split('.')[0]}: pip install 'phalanx[{name}]'") from None
