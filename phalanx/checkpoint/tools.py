"""Operations on checkpoints without a run: compare two, average several, rewrite one in other files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.adapters import FOLDER, adapter_folder, check_wanted
from phalanx.checkpoint.contents import WEIGHTS, Contents
from phalanx.checkpoint.embedder_files import POOLING
from phalanx.checkpoint.gather import File, plan_whole
from phalanx.checkpoint.hf_files import INDEX
from phalanx.checkpoint.keep import step_name
from phalanx.checkpoint.manifest import NAME, read_checked
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.places import place
from phalanx.checkpoint.save import MAX_FILE_BYTES, key_of, state_index_text
from phalanx.checkpoint.storage import FOLDERS, Receipt, Storage, remove_tree, write_file, write_small
from phalanx.checkpoint.tensors import CheckedFile, Entry, write_tensors
from phalanx.layout.box import Box
from phalanx.ops.optimizer.shard import MASTER


def changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`a.b: old -> new` for every value in which two JSON trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from changes(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"


def diff(a: str | Path, b: str | Path) -> Iterator[str]:
    """Every difference between two checkpoints (or Hugging Face folders), in words; nothing if their contents are
    equal."""
    with Contents(a) as first, Contents(b) as second:
        if first.manifest and second.manifest:
            x, y = first.manifest, second.manifest
            for name in ("step", "consumed_samples", "model", "config", "scalars", "optimizer"):
                yield from changes(getattr(x, name), getattr(y, name), name)
        for kind in (kind for kind in first.kinds if kind in second.kinds):
            yield from _tensors(first, second, kind)


def _tensors(first: Contents, second: Contents, kind: str) -> Iterator[str]:
    a, b = first.shapes(kind), second.shapes(kind)
    yield from (f"{kind} {name}: only in {first.path}" for name in a if name not in b)
    yield from (f"{kind} {name}: only in {second.path}" for name in b if name not in a)
    for name in (name for name in a if name in b):
        if a[name] != b[name]:
            yield f"{kind} {name}: shape {list(a[name])} -> {list(b[name])}"
            continue
        x, y = first.read(kind, name), second.read(kind, name)
        if x.dtype != y.dtype:
            yield f"{kind} {name}: {x.dtype} -> {y.dtype}"
        if x.dtype != y.dtype or not torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.dim() else x != y:
            difference = (x.double() - y.double()).abs()
            yield (
                f"{kind} {name}: {int((difference != 0).sum())} of {x.numel()} values differ, by up to "
                f"{float(difference.max()):.3g}"
            )


def average(paths: list[str], out: str | Path) -> Path:
    """A Hugging Face folder with the mean of the weights of several checkpoints of one model (of their masters, if they
    have any).

    The mean is computed in float64, tensor by tensor, and rounded once to the dtype of the first one's weights. On such
    means see Izmailov et al., "Averaging weights leads to wider optima and better generalization", 2018.
    """
    if len(paths) < 2:
        raise CheckpointError("an average needs at least two checkpoints")
    opened = [Contents(path) for path in paths]
    try:
        for contents in opened:
            check_wanted(contents.weights, adapter_folder(contents.weights), {})
        for other in opened[1:]:
            if other.shapes(WEIGHTS) != opened[0].shapes(WEIGHTS):
                lines = list(changes(_listed(opened[0]), _listed(other)))[:20]
                raise CheckpointError(f"{other.path} is of another model than {opened[0].path}:\n" + "\n".join(lines))

        def mean(name: str, like: Tensor) -> Tensor:
            total = torch.zeros(like.shape, dtype=torch.float64)
            for contents in opened:
                total += contents.read(contents.best, name)
            return (total / len(opened)).to(like.dtype)

        return write_weights(opened[0], out, mean)
    finally:
        for contents in opened:
            contents.__exit__()


def _listed(contents: Contents) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in contents.shapes(WEIGHTS).items()}


def write_weights(contents: Contents, out: str | Path, value: Any, dtype: torch.dtype | None = None) -> Path:
    """A Hugging Face folder like that of `contents`: its small files copied, each tensor replaced by `value(name,
    tensor)`.

    dtype: of the tensors written (those that stay in a wider dtype than the model's, such as router biases, stay so).
    """
    folder, storage = new_folder(out), Storage()
    files = contents.files(WEIGHTS)
    model = contents.read(WEIGHTS, next(iter(files))).dtype
    for file in dict.fromkeys(files.values()):
        names = [name for name, where in files.items() if where == file]
        made = {name: contents.read(WEIGHTS, name) for name in names}
        kinds = {name: dtype if dtype is not None and t.dtype == model else t.dtype for name, t in made.items()}
        entries = [(name, tuple(t.shape), kinds[name]) for name, t in made.items()]
        write_tensors(
            storage, folder / file, entries, (value(name, tensor.to(kinds[name])) for name, tensor in made.items())
        )
    copy_small(contents, folder, dtype, frozenset(files.values()))
    return folder


def copy_small(contents: Contents, folder: Path, dtype: torch.dtype | None, but: frozenset[str]) -> None:
    """The files beside the weights, for weights of another dtype if one is given. but: names of those left out."""
    texts = dict[str, bytes]()
    for path in sorted((*contents.weights.glob("*"), *contents.weights.glob(f"{POOLING}/*"))):
        name = path.relative_to(contents.weights).as_posix()
        if path.is_file() and name not in but:
            data = (
                path.read_bytes()
                if contents.manifest is None
                else read_checked(path, contents.manifest.files.get(f"{WEIGHTS}/{name}"))
            )
            texts[name] = _with_dtype(name, data, dtype)
    write_small(Storage(), folder, texts)


def _with_dtype(name: str, data: bytes, dtype: torch.dtype | None) -> bytes:
    if name != "config.json" or dtype is None:
        return data
    kind = str(dtype).removeprefix("torch.")
    return (json.dumps({**json.loads(data), "dtype": kind, "torch_dtype": kind}, indent=2) + "\n").encode()


def new_folder(out: str | Path) -> Path:
    """An empty folder to write to; one that holds something is refused."""
    folder = Path(out)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already: choose a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def reshard(path: str | Path, out: str | Path, files: int, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """The same checkpoint in the folder `out`, with `files` state files of about equal size and weight files of at most
    `max_file_bytes`.

    Loading never needs this, because any layout reads any files. It helps if a different number of readers is to read
    whole files.
    """
    with Contents(path) as contents:
        manifest = contents.manifest
        if manifest is None:
            raise CheckpointError(
                f"{contents.path} is no checkpoint of a run, only weights: there is no state to write anew"
            )
        root = place(out)
        final, storage = root / step_name(manifest.step), storage_for(root)
        if final.exists():
            raise CheckpointError(f"{final} is there already")
        adapters = {name: receipt for name, receipt in manifest.files.items() if name.startswith(f"{FOLDER}/")}
        folder = storage.begin(final, (*FOLDERS, *([FOLDER] if adapters else [])))
        own = {name: r for name, r in manifest.files.items() if name.startswith(f"{WEIGHTS}/")}
        kept = adapters if manifest.base is None else {**adapters, **own}  # the base is where it was
        try:
            receipts = {
                **{name: _copied(contents.path / name, r, folder / name, storage) for name, r in kept.items()},
                **(_weights_anew(contents, folder, storage, max_file_bytes) if manifest.base is None else {}),
                **_state_anew(contents, folder, storage, files),
            }
            write_file(
                storage,
                folder / NAME,
                [dataclasses.replace(manifest, files=dict(sorted(receipts.items()))).text().encode()],
            )
            storage.commit(folder, final)
        except BaseException:
            if not final.exists():
                remove_tree(storage, folder)
            raise
    return final


def _copied(path: Path, receipt: Receipt, to: Path, storage: Storage) -> Receipt:
    """A file of a checkpoint as it is, checked."""
    if not receipt.parts:
        return write_file(storage, to, [read_checked(path, receipt)])
    with CheckedFile(path, receipt) as tensors:
        made = {key: tensors.read(key) for key in tensors.keys()}
    return write_tensors(storage, to, [(key, tuple(t.shape), t.dtype) for key, t in made.items()], made.values())


def _weights_anew(contents: Contents, folder: Path, storage: Storage, max_file_bytes: int) -> dict[str, Receipt]:
    files = plan_whole(((name, tuple(t.shape), t.dtype) for name, t in contents.pairs(WEIGHTS)), max_file_bytes)
    found = {}
    for file in files:
        entries: list[Entry] = [(job.name, job.shape, job.dtype) for job in file.jobs]
        tensors = (contents.read(WEIGHTS, job.name) for job in file.jobs)
        found[f"{WEIGHTS}/{file.name}"] = write_tensors(storage, folder / WEIGHTS / file.name, entries, tensors)
    small = {name: r for name, r in contents.manifest.receipts(WEIGHTS).items() if not r.parts}  # type: ignore[union-attr]
    texts = {
        name: read_checked(contents.weights / name, receipt)
        for name, receipt in small.items()
        if not name.endswith(".index.json")
    }
    if len(files) > 1:
        texts[INDEX] = index_text(files)
    small = write_small(storage, folder / WEIGHTS, texts)
    return {**found, **{f"{WEIGHTS}/{name}": receipt for name, receipt in small.items()}}


def index_text(files: list[File]) -> bytes:
    """Hugging Face's index of a model in several files."""
    size = sum(Box.full(job.shape).numel * job.dtype.itemsize for f in files for job in f.jobs)
    where = {job.name: f.name for f in files for job in f.jobs}
    return (json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n").encode()


def _state_anew(contents: Contents, folder: Path, storage: Storage, files: int) -> dict[str, Receipt]:
    """Whole tensors, the largest first, each to the file with the least so far."""
    shapes = {name: shape for name, shape in contents.shapes(MASTER).items() if name not in contents.frozen}
    shares: list[list[str]] = [[] for _ in range(files)]
    sizes = [0] * files
    for name in sorted(shapes, key=lambda n: -Box.full(shapes[n]).numel):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += Box.full(shapes[name]).numel
    found, tables = {}, dict[str, dict[str, list[Any]]](files={}, kept={})
    for number, names in enumerate(share for share in shares if share):
        file = f"state/rank-{number:05d}.safetensors"
        kinds = contents.state_kinds
        keys = [(kind, name) for kind in kinds for name in names if name in contents.shapes(kind)]
        dtype = contents.read(MASTER, names[0]).dtype
        entries = [(key_of(kind, name, Box.full(shapes[name])), shapes[name], dtype) for kind, name in keys]
        found[file] = write_tensors(
            storage, folder / file, entries, (contents.read(kind, name).to(dtype) for kind, name in keys)
        )
        for table, mine in (
            ("files", [n for n in names if n not in contents.untrained]),
            ("kept", [n for n in names if n in contents.untrained]),
        ):
            tables[table][file] = [(n, shapes[n], (0,) * len(shapes[n]), shapes[n]) for n in mine]
    of_names = {name: list(kinds) for name, kinds in contents.kinds_of_names.items()}
    text = state_index_text(contents.state_kinds, tables, of_names, sorted(contents.frozen))
    return {**found, "state/index.json": write_file(storage, folder / "state/index.json", [text])}
