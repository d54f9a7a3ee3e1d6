"""Files of a Hugging Face folder: config.json, and the tensors of its safetensors files under the names that a model
asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.manifest import inside
from phalanx.checkpoint.places import missing, place
from phalanx.checkpoint.readers.fp8 import with_scaled
from phalanx.checkpoint.readers.joined_convolutions import joined
from phalanx.checkpoint.readers.mxfp4 import with_packed
from phalanx.checkpoint.readers.stacked_experts import unstacked
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import (
    CheckedFile,
    Index,
    Open,
    PlainFile,
    Stored,
    StoredBox,
    lately,
    open_tensors,
    receipt_of,
)
from phalanx.layout.box import Box
from phalanx.models.decoder_config import decoder_tensors
from phalanx.models.model_config import TensorNames
from phalanx.models.registry import families, of_model_type

Shapes = dict[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"  # of the tensors of a model in several files
COMPARED = 1 << 24  # elements of two tensors compared at a time


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder."""
    path = (Path(folder) if isinstance(folder, str) else folder) / "config.json"
    if not path.parent.is_dir():
        raise CheckpointError(missing(path.parent, "folder"))
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if the file is not one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors files, or says that it does."""
    return any((folder / name).is_file() for name in ("model.safetensors", INDEX))


def stored_in(folder: Path, receipts: dict[str, Receipt] | None) -> Index:
    """Every tensor of a Hugging Face folder; quantized ones as the numbers that they represent."""
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    return with_scaled(with_packed(hf_index(folder, receipts), str(folder)), config, str(folder))


def hf_index(folder: Path, receipts: dict[str, Receipt] | None = None) -> Index:
    """Every tensor of a Hugging Face folder, from the headers of its files."""
    index: Index = {}
    for file in hf_files(folder):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing")
        with open_tensors(folder / file, receipt_of(receipts, folder, file)) as tensors:
            for key in tensors.keys():
                if key in index:
                    raise CheckpointError(f"{folder}: {key} is in {index[key].parts[0].file} and in {file}")
                shape = tensors.shape(key)
                index[key] = Stored(shape, [StoredBox(file, key, Box.full(shape))])
    return index


def hf_files(folder: Path) -> list[str]:
    """Names of the safetensors files: those in the index, or the single one. Names that lead out of the folder are
    refused."""
    if not folder.is_dir():
        raise CheckpointError(missing(folder, "folder"))
    table = folder / INDEX
    if not table.is_file():
        if (folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        if steps := sorted((folder / "checkpoints").glob("step-*/weights")):
            raise CheckpointError(f"{folder} is the folder of a run: name one of its checkpoints, {steps[-1].parent}")
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor {table.name} (pickled .bin and .pt files are not read)"
        )
    try:
        files = sorted({str(file) for file in json.loads(table.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{table} is damaged: {error}") from error
    odd = [f for f in files if not inside(f) or "/" in f]
    if odd:
        raise CheckpointError(f"{table} names files outside its folder: {', '.join(map(repr, odd))}")
    return files


def tensors_of(wanted: Iterable[str]) -> TensorNames:
    """What is known about the names of a model's tensors."""
    there = frozenset(wanted)
    names = [family.tensors for family in families().values()]
    fitting = [one for one in names if one.embedding in there and there.issuperset(one.also)]
    return max(fitting, key=lambda one: len(one.also), default=decoder_tensors)


def adapt(
    index: Index, wanted: Shapes, where: str, same: Callable[[Stored, Stored], bool], headless: bool = False
) -> Index:
    """The index under the model's names: a missing base prefix is added; constants, copies, empty tensors and heads for
    other tasks are dropped; experts in stacks are told apart and convolutions joined; the head is resolved.

    where   the folder with the config.json, for messages
    same    whether two stored tensors hold the same numbers
    headless   the model has no head: one that the folder has is left out
    """
    names = [family.tensors for family in families().values()]
    own = tensors_of(wanted)
    constants = tuple(end for one in names for end in one.constants)
    copies = [one.copies for one in names if one.copies is not None]
    kept = {
        name: s
        for name, s in index.items()
        if not name.endswith(constants) and not any(re.fullmatch(copy, name) for copy in copies)
    }
    # transformers writes shared experts of width 0
    kept = {name: s for name, s in kept.items() if name in wanted or 0 not in s.shape}
    kept = {own.today(name): s for name, s in kept.items()}
    prefixes = sorted({one.prefix for one in names}, key=len, reverse=True)  # some families have none
    prefix = next((p for p in prefixes if any(n.startswith(p) for n in wanted)), "")
    if prefix and not any(n.startswith(prefix) for n in kept):
        kept = {n if n == own.head else prefix + n: s for n, s in kept.items()}
    kept = joined(unstacked(kept, wanted), wanted)
    for pattern in (own.others, own.unread):
        if pattern is not None:
            kept = {n: s for n, s in kept.items() if n in wanted or n == own.head or not re.fullmatch(pattern, n)}
    head = own.head
    if head in wanted and head not in kept and own.embedding in kept:  # else it lacks more, which is listed later
        raise CheckpointError(
            f"{where} has no {head}: it uses the input embedding as head; set model.tie_word_embeddings=true"
        )
    if headless and own.embedding in kept:
        kept.pop(head, None)
    elif head in kept and head not in wanted:
        matrix = kept.pop(head)
        _check_tied(where, head)
        if own.embedding not in kept:  # both are one tensor, saved under the other name
            kept[own.embedding] = matrix
        elif not same(kept[own.embedding], matrix):
            differs = f"{where} has a {head} that differs from its {own.embedding}, although its config.json ties them"
            raise CheckpointError(f"{differs}; set model.tie_word_embeddings=false to keep both, as transformers does")
    return kept


def _check_tied(where: str, head: str) -> None:
    """A head beside a tied embedding must be a copy of it; in an untied model it is weights that must not get lost."""
    config = read_config(where) if (Path(where) / "config.json").is_file() else {}
    found = of_model_type(config.get("model_type"))
    by_default = "model_type" not in config if found is None else found[1].json_keys["tie_word_embeddings"].default
    if not config.get("tie_word_embeddings", by_default):
        raise CheckpointError(f"{where} has a {head} of its own; set model.tie_word_embeddings=false")


def same_in(folder: Path, receipts: dict[str, Receipt] | None = None) -> Callable[[Stored, Stored], bool]:
    """A function that compares two tensors of a folder."""

    def opener(name: str) -> CheckedFile | PlainFile:
        return open_tensors(folder / name, receipt_of(receipts, folder, name))

    def same(a: Stored, b: Stored) -> bool:
        with lately(opener) as files:
            return same_values(a, b, files)

    return same


@torch.no_grad()
def same_values(a: Stored, b: Stored, files: Open) -> bool:
    """Whether two stored tensors hold the same numbers; read some rows at a time, up to the first difference."""
    if a.shape != b.shape:
        return False
    rows = max(1, COMPARED // max(1, a.shape[1] if len(a.shape) > 1 else 1))
    for first in range(0, a.shape[0] if a.shape else 0, rows):
        where = (slice(first, min(first + rows, a.shape[0])), *(slice(0, n) for n in a.shape[1:]))
        left, right = (stored.parts[0].read(files, where) for stored in (a, b))
        if not torch.equal(left.double(), right.double()):
            return False
    return True


def two_heads(index: Index, same: Callable[[Stored, Stored], bool]) -> bool:
    """Whether the files of a folder whose config ties head and embedding hold two different ones; transformers then
    does not tie them."""
    kinds = [family.tensors for family in families().values()]
    names = [(name, one.head) for one in kinds for name in (one.embedding, one.embedding.removeprefix(one.prefix))]
    found = next(((index[name], index.get(head)) for name, head in names if name in index), None)
    return found is not None and found[1] is not None and not same(found[0], found[1])


def depths_in(index: Index) -> int:
    """The number of multi-token prediction modules in the files of a folder."""
    return len(predictors_in(index))


def predictors_in(names: Iterable[str]) -> set[str]:
    """The numbers of the multi-token prediction modules to which tensors of these names belong."""
    patterns = [p for family in families().values() if (p := family.tensors.predictors) is not None]
    return {found[1] for name in names for p in patterns if (found := re.fullmatch(p, name))}


def folder_of(path: str | Path) -> Path:
    """The Hugging Face folder for a path; for one of our checkpoints, its `weights`."""
    found = place(path)
    return found / "weights" if (found / "manifest.json").is_file() else found
