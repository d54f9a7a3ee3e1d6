"""Adapters merged into the weights that they belong to: a plain Hugging Face folder; and adapters alone, as a folder of
PEFT. One tensor is in memory at a time, whatever layout it was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.adapters import CONFIG, FILE, PREFIX, AdapterFolder, adapter_folder, adapter_source, module_of
from phalanx.checkpoint.base import reading
from phalanx.checkpoint.contents import WEIGHTS, Contents
from phalanx.checkpoint.convert import DTYPES, report
from phalanx.checkpoint.gather import plan_whole
from phalanx.checkpoint.hf_files import INDEX, Shapes, read_config, tensors_of
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.save import MAX_FILE_BYTES
from phalanx.checkpoint.storage import Storage, write_file
from phalanx.checkpoint.tensors import write_tensors
from phalanx.checkpoint.tools import copy_small, index_text, new_folder
from phalanx.nn.adapter import Adapter, AdapterConfig, find_adapter
from phalanx.ops.quantized.base_weights import stored_values


@dataclass(frozen=True)
class Merging:
    """How a run's adapters are merged.

    shapes      of the model's tensors, by name
    transposed  names of the matrices that are stored as (inputs, outputs)
    wide        names of tensors that are kept in a wider dtype than weights, such as routers' biases
    quantized   names of those that are kept as quantized values (lora.base)
    stacks      tensors that hold all experts of a layer, by the matrix that the names of their adapters speak of
    tied        whether the head is the embedding
    """

    method: type[Adapter]
    config: AdapterConfig
    shapes: Shapes
    transposed: frozenset[str]
    wide: frozenset[str]
    quantized: frozenset[str]
    stacks: Mapping[str, str]
    tied: bool

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor, own: dict[str, Tensor]) -> Tensor:
        """A matrix with its adapter's tensors, by attribute, in float64."""
        exact = {attribute: value.double() for attribute, value in own.items()}
        if name in self.stacks.values():
            return self._merged_stack(name, weight.double(), exact)
        flipped = name in self.transposed
        oriented = weight.double().mT if flipped else weight.double()
        made = self.method.merge(self.config, name.removesuffix(".weight"), oriented, exact)
        return made.mT if flipped else made

    def _merged_stack(self, name: str, weight: Tensor, own: dict[str, Tensor]) -> Tensor:
        """weight (experts, inputs, outputs); own: as PEFT has them (nn.adapted_linear.ShardedPiece)."""
        count, made = len(weight), list[Tensor]()
        for e, matrix in enumerate(weight):
            first, second = own["lora_A"].chunk(count)[e], own["lora_B"][:, e::count]
            made.append(self.method.merge(self.config, name, matrix.mT, {"lora_A": first, "lora_B": second}).mT)
        return torch.stack(made)

    def by_matrix(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Names of adapters' tensors by attribute, by the name of the tensor of the model that they belong to."""
        return {self.stacks.get(name, name): own for name, own in by_matrix(names).items()}


@dataclass(frozen=True)
class BaseAndAdapters:
    """What is merged. shapes: of the model's tensors; read: one as the adapters were trained on it; own: tensors of a
    matrix's adapter, by attribute; dtype: of weights; title: for the report."""

    shapes: Shapes
    read: Callable[[str], Tensor]
    own: Callable[[str], dict[str, Tensor]]
    dtype: torch.dtype
    title: str


def merge(
    path: str | Path,
    out: str | Path,
    merging: Merging,
    dtype: str | None = None,
    drawn: Callable[[str], Tensor] | None = None,
) -> Path:
    """The weights of a checkpoint with its adapters merged into them, as a Hugging Face folder; computed in float64
    from the masters and rounded once to `dtype` (default: that of the run). Its report compares what was written, read
    back, with what was computed. drawn: the random weights, by name, that the run kept as quantized values; None: they
    are in a folder."""
    with Contents(path) as contents, ExitStack() as opened:
        beside, shapes = _adapters(contents), dict(merging.shapes)
        adapters = merging.by_matrix(name for name in contents.shapes(contents.best) if name not in shapes)
        _check_matrices(adapters, shapes, beside.path)
        narrow = _stated_dtype(contents.weights)
        read = drawn or opened.enter_context(_base_of(contents, merging))

        def trained_on(name: str) -> Tensor:
            if name in merging.quantized:
                return stored_values(read(name).to(narrow), merging.config.base)
            if name in contents.frozen and name not in merging.wide:
                return contents.read(WEIGHTS, name).to(narrow)
            return contents.read(contents.best, name)

        def own(name: str) -> dict[str, Tensor]:
            return {attribute: contents.read(contents.best, key) for attribute, key in adapters.get(name, {}).items()}

        what = BaseAndAdapters(shapes, trained_on, own, narrow, f"{contents.path}, merged")
        return _write(what, contents, out, merging, dtype)


def _base_of(contents: Contents, merging: Merging) -> AbstractContextManager[Callable[[str], Tensor]]:
    """What reads the weights that the checkpoint has not, because the run kept them as quantized values."""
    base = None if contents.manifest is None else contents.manifest.base
    if not merging.quantized:
        return nullcontext(lambda name: contents.read(WEIGHTS, name))
    if base is None:
        raise CheckpointError(
            f"{contents.path}: the base was drawn at random and kept as quantized values, "
            f"lora.base={merging.config.base}, so it is in no file to merge into"
        )
    return reading(base.folder, dict(merging.shapes))


def merge_folder(adapter: str, base: str, out: str | Path, merging: Merging, dtype: str | None = None) -> Path:
    """The same of a folder of PEFT over the weights of the folder `base`. merging: of a model with these shapes."""
    shapes = dict(merging.shapes)
    found = adapter_source(adapter, tensors_of(shapes), merging.tied)
    adapters = merging.by_matrix(name for name in found.index if name not in shapes)
    _check_matrices(adapters, shapes, found.path)
    with reading(base, shapes) as read, Contents(base) as contents:

        def trained_on(name: str) -> Tensor:
            return found.read(name) if name in found.index else read(name)

        def own(name: str) -> dict[str, Tensor]:
            return {attribute: found.read(key) for attribute, key in adapters.get(name, {}).items()}

        narrow = _stated_dtype(contents.weights)
        what = BaseAndAdapters(shapes, trained_on, own, narrow, f"{found.path} over {base}, merged")
        return _write(what, contents, out, merging, dtype)


def _adapters(contents: Contents) -> AdapterFolder:
    found = adapter_folder(contents.weights)
    if found is None:
        raise CheckpointError(f"{contents.path} holds no adapters")
    return found


def by_matrix(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Names of adapters' tensors by attribute, by the name of the matrix that they belong to."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        matrix, attribute = module_of(name)
        found.setdefault(matrix, {})[attribute] = name
    return found


def _check_matrices(adapters: Iterable[str], shapes: Shapes, where: Path) -> None:
    lost = [name for name in adapters if name not in shapes]
    if lost:
        raise CheckpointError(f"{where} has an adapter of {lost[0]}, which the model has not")


def _stated_dtype(folder: Path) -> torch.dtype:
    """Of the weights, by config.json."""
    config = read_config(folder)
    stated = str(config.get("dtype") or config.get("torch_dtype"))
    found = getattr(torch, stated, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{folder / 'config.json'}: dtype={stated!r} is none that is known")
    return found


def _write(what: BaseAndAdapters, beside: Contents, out: str | Path, merging: Merging, dtype: str | None) -> Path:
    """beside: has the files that the folder gets besides its weights."""
    narrow = what.dtype if dtype is None else DTYPES[dtype]

    def value(name: str) -> Tensor:
        weight, own = what.read(name), what.own(name)
        return merging.merged(name, weight, own) if own else weight

    kinds = {name: what.read(name).dtype if name in merging.wide else narrow for name in what.shapes}
    folder = new_folder(out)
    files = plan_whole(((name, what.shapes[name], kind) for name, kind in kinds.items()), MAX_FILE_BYTES)
    for file in files:
        entries = [(job.name, job.shape, job.dtype) for job in file.jobs]
        write_tensors(Storage(), folder / file.name, entries, (value(job.name).to(job.dtype) for job in file.jobs))
    if len(files) > 1:
        write_file(Storage(), folder / INDEX, [index_text(files)])
    copy_small(beside, folder, DTYPES.get(dtype or ""), frozenset({INDEX, *beside.files(WEIGHTS).values()}))
    return report(folder, ((name, value(name)) for name in kinds), what.title)


def export_adapter(
    path: str | Path, out: str | Path, lora: AdapterConfig, config: dict[str, Any] | None, shapes: Shapes
) -> Path:
    """The adapters of a checkpoint as a folder of PEFT. lora: their section; config: adapter_config.json, None if PEFT
    does not have the method; shapes: of the model's tensors."""
    weights = find(path) / WEIGHTS
    found, method = adapter_folder(weights), find_adapter(lora.method)
    if found is None or config is None:
        rule = "holds no adapters" if found is None else f"has adapters of {lora.method}, which PEFT does not have"
        raise CheckpointError(f"{path} {rule}")
    tensors = {name: found.read(name) for name in found.index if name in shapes}
    for keys in by_matrix(name for name in found.index if name not in shapes).values():
        own = method.for_peft(lora, {attribute: found.read(key) for attribute, key in keys.items()})
        tensors |= {keys[attribute]: value for attribute, value in own.items()}
    names, whole = tensors_of(shapes), config["modules_to_save"] or ()
    if (
        names.head not in shapes and names.in_memory(names.head.removesuffix(".weight")) in whole
    ):  # tied: PEFT tells them apart
        tensors[names.head] = tensors[names.embedding]
    folder, named = new_folder(out), names.in_memory
    entries = [(PREFIX + named(key), tuple(t.shape), t.dtype) for key, t in tensors.items()]
    write_tensors(Storage(), folder / FILE, entries, tensors.values())
    write_file(Storage(), folder / CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])
    return folder
