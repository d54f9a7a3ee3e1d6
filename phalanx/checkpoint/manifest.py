"""The manifest of a checkpoint: its files with sizes and checksums, and what must be known before any tensor is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from phalanx.base.errors import CheckpointError
from phalanx.base.rules import near_paths
from phalanx.checkpoint.storage import Receipt, sha256_of

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """step, consumed_samples   where the run stands: applied and skipped steps together, sequences taken from the data
    model, config, layout       dicts of the configs that made it; the layout is for people, loading never looks at it
    scalars                     exact JSON values (floats in their shortest exact form): the loop's counters
    optimizer                   the same of the optimizer and the loss scaler, as `float.hex`
    files                       path inside the checkpoint -> receipt
    """

    step: int
    consumed_samples: int
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    files: dict[str, Receipt] = field(default_factory=dict)
    format: int = FORMAT
    program: str = "phalanx"

    def text(self) -> str:
        """JSON with a hash of the config and, last, a checksum of everything before it."""
        body = {**dataclasses.asdict(self), "config_sha256": digest(self.config)}
        return json.dumps({**body, "sha256": digest(body)}, indent=1)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Sizes of its files are compared, since reading a truncated map would kill the process.

    Raises CheckpointError that says what is wrong: no such folder (with names like it), no manifest, damaged, of another
    format, a file missing or of another size.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(missing(path))
    manifest = parse(path)
    problems = size_problems(path, manifest)
    if problems:
        raise CheckpointError(f"checkpoint {path} is damaged: " + "; ".join(problems))
    return manifest


def missing(path: Path, what: str = "checkpoint") -> str:
    near = near_paths(str(path))
    return f"there is no {what} {path}" + (f"; near it: {', '.join(near)}" if near else "")


def parse(path: Path) -> Manifest:
    """The manifest alone, without a look at the files."""
    try:
        text = (path / NAME).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CheckpointError(f"{path} is not a complete checkpoint: {NAME} cannot be read ({reason})") from error
    try:
        body = json.loads(text)
        stored, version = body.pop("sha256"), body["format"]
        good = digest(body) == stored
        body.pop("config_sha256", None)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / NAME} is damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path / NAME} has format {version!r}; this version of phalanx reads format {FORMAT}")
    if not good:
        raise CheckpointError(f"{path / NAME} is damaged: its checksum is wrong")
    try:
        body["files"] = {name: Receipt(**receipt) for name, receipt in body["files"].items()}
        manifest = Manifest(**body)
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path / NAME} is damaged: {error}") from error
    for name in manifest.files:
        if not inside(name):
            raise CheckpointError(f"{path / NAME} names a file outside the checkpoint: {name!r}")
    return manifest


def inside(name: str) -> bool:
    """Whether a file name stays inside its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name and "\0" not in name


def size_problems(path: Path, manifest: Manifest) -> list[str]:
    found = []
    for name, receipt in manifest.files.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            found.append(f"{name} is missing" if not file.is_symlink() else f"{name} is a link")
        elif file.stat().st_size != receipt.size:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {receipt.size}")
    return found


def verify(path: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint, every byte read: manifest, sizes, checksums, files that nobody wrote. [] = good."""
    path = Path(path)
    try:
        manifest = parse(path) if path.is_dir() else None
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return [missing(path)]
    found = size_problems(path, manifest)
    broken = {problem.split(" ")[0] for problem in found}
    whole = {name: receipt for name, receipt in manifest.files.items() if name not in broken}
    found += [f"{name} has a wrong checksum" for name, receipt in whole.items() if sha256_of(path / name) != receipt.sha256]
    known = {*manifest.files, NAME}
    there = (p for p in sorted(path.rglob("*")) if p.is_symlink() or not p.is_dir())
    return found + [f"{name} is not in the manifest" for name in (p.relative_to(path).as_posix() for p in there) if name not in known]
