"""The manifest of a checkpoint: its files with sizes and checksums, and what must be known before any tensor is
read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.places import missing, place
from phalanx.checkpoint.staging import StagingBuffer
from phalanx.checkpoint.storage import Receipt, sum_of
from phalanx.checkpoint.tensors import CheckedFile
from phalanx.checkpoint.unreachable import Unreachable

FORMAT = 4  # receipts state how many bytes are under one checksum
EARLIER = (2, 3)  # formats that are read as well; 3 was that of checkpoints that name their base
NAME = "manifest.json"
SEAL = ',\n "sha256": "'


@dataclass(frozen=True)
class Base:
    """The weights that the adapters of a checkpoint belong to, if they are not in it. files: size and checksum of those
    of the folder that hold weights."""

    folder: str
    files: dict[str, Receipt]


@dataclass(frozen=True)
class Manifest:
    """What a manifest states.

    step, consumed_samples   progress of the run: applied and skipped steps together, and sequences taken from the data
    parent                   step of the previous checkpoint in the same run; None: the run did not start from one
    model, config, layout    dicts of the configs that made it; the layout is for people, loading never reads it
    scalars                  exact JSON values (floats in their shortest exact form): the loop's counters
    optimizer                numbers of the optimizer, the loss scaler and the guard, as `float.hex`, separated by
                             spaces
    files                    path inside the checkpoint -> receipt
    base                     the weights of adapters, if they are not in the checkpoint
    """

    step: int
    consumed_samples: int
    parent: int | None = None
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    files: dict[str, Receipt] = field(default_factory=dict)
    base: Base | None = None
    format: int = FORMAT
    program: str = "phalanx"

    def text(self) -> str:
        """JSON with a hash of the config and, last, a checksum of everything before it; in today's format, also if what
        was read had an earlier one."""
        body = {**dataclasses.asdict(self), "format": FORMAT, "config_sha256": digest(self.config)}
        return seal(json.dumps(body, indent=1).removesuffix("\n}"))

    def receipts(self, folder: str) -> dict[str, Receipt]:
        """Receipts of the files in a folder of the checkpoint, by their names in it."""
        return {name.removeprefix(f"{folder}/"): r for name, r in self.files.items() if name.startswith(f"{folder}/")}


def seal(text: str) -> str:
    """A JSON object (without its closing brace) with the SHA-256 of its text, which covers every byte before it."""
    return f'{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}"\n}}'


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest, after a quick check of the files: their sizes are compared now, their bytes when they are read.

    Raises CheckpointError if there is no such folder (with similar names) or it has another format; DamagedCheckpoint
    if the manifest is missing or damaged, or a file is missing or has another size.
    """
    path = place(path)
    if not path.is_dir():
        raise CheckpointError(missing(path))
    manifest = parse(path)
    problems = size_problems(path, manifest)
    if problems:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: " + "; ".join(problems))
    return manifest


def parse(path: Path) -> Manifest:
    """The manifest alone, without checking the files."""
    try:
        text = (path / NAME).read_bytes().decode()
    except Unreachable:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise DamagedCheckpoint(f"{path} is not a complete checkpoint: {NAME} cannot be read ({reason})") from error
    good = seal(text[: text.rfind(SEAL)]) == text
    try:
        body = json.loads(text)
        version = body["format"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path / NAME} is damaged: {type(error).__name__}: {error}") from error
    if version not in (*EARLIER, FORMAT):
        known = (
            f"{path / NAME} has format {version!r}; this version of phalanx reads formats "
            f"{EARLIER[0]} to {FORMAT}{way_out(version, path)}"
        )
        raise CheckpointError(known) if good else DamagedCheckpoint(f"{known} (and its checksum is wrong)")
    if not good:
        raise DamagedCheckpoint(f"{path / NAME} is damaged: its checksum is wrong")
    try:
        body["files"] = _receipts(body["files"])
        if body.get("base") is not None:
            body["base"] = Base(body["base"]["folder"], _receipts(body["base"]["files"]))
        manifest = Manifest(**{k: v for k, v in body.items() if k not in ("sha256", "config_sha256")})
    except (TypeError, AttributeError, KeyError) as error:
        raise DamagedCheckpoint(f"{path / NAME} is damaged: {error}") from error
    for name in (*manifest.files, *(manifest.base.files if manifest.base is not None else ())):
        if not inside(name):
            raise CheckpointError(f"{path / NAME} names a file outside the checkpoint: {name!r}")
    return manifest


def _receipts(table: dict[str, dict[str, Any]]) -> dict[str, Receipt]:
    return {name: Receipt(**receipt) for name, receipt in table.items()}


def way_out(version: Any, path: Path) -> str:
    """What can be done with a checkpoint of another format."""
    if type(version) is int and version > FORMAT:
        return ": continue with the newer version that wrote it"
    return (
        f": its weights are a Hugging Face folder all the same: copy {path / 'weights'} elsewhere, and "
        "begin a new run with init_from=THE COPY"
    )


def read_checked(path: Path, receipt: Receipt | None) -> bytes:
    """A small file of a checkpoint, compared with its receipt."""
    try:
        data = path.read_bytes()
    except Unreachable:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    if receipt is None or xxhash.xxh3_128_hexdigest(data) != receipt.xxh3:
        raise DamagedCheckpoint(
            f"{path} is damaged: " + ("it is not in the manifest" if receipt is None else "its checksum is wrong")
        )
    return data


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
    """Everything that is wrong with a checkpoint, after reading every byte: manifest, sizes, checksums, files that are
    not in the manifest. [] = good."""
    path = place(path)
    try:
        manifest = parse(path) if path.is_dir() else None
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return [missing(path)]
    found = size_problems(path, manifest)
    broken = {problem.split(" ")[0] for problem in found}
    for name in manifest.files.keys() - broken:
        found += _damage(path / name, name, manifest.files[name])
    known = {*manifest.files, NAME}
    there = (p for p in sorted(path.rglob("*")) if p.is_symlink() or not p.is_dir())
    return sorted(found) + [
        f"{name} is not in the manifest"
        for name in (p.relative_to(path).as_posix() for p in there)
        if name not in known
    ]


def _damage(file: Path, name: str, receipt: Receipt) -> list[str]:
    """What is wrong with the bytes of a file of the right size; for tensors, which and where."""
    if sum_of(file) == receipt.xxh3:
        return []
    found = []
    if receipt.parts:
        try:
            memory = StagingBuffer(None)
            with CheckedFile(file, receipt) as tensors:
                for key in tensors.keys():
                    try:
                        tensors.check(key, memory.take)
                    except DamagedCheckpoint as error:
                        found.append(str(error).removeprefix(f"{file} is damaged: "))
        except DamagedCheckpoint as error:
            found.append(str(error).removeprefix(f"{file} is damaged: "))
    return [f"{name} has a wrong checksum" + (f": {'; '.join(found)}" if found else "")]
