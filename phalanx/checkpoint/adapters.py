"""The `adapter/` folder of a checkpoint: what a run with `lora` trains, in PEFT's files and under PEFT's names, beside
the `weights/` that it belongs to.

adapter_model.safetensors   the adapters' weights, as rounded as those of `weights/`
adapter_config.json         what PEFT reads them by; not there of a method that PEFT does not have
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf_files import Shapes, read_config
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.manifest import NAME, read_checked, read_manifest
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox, open_tensors
from phalanx.layout.box import Box
from phalanx.models.model_config import ModelConfig, TensorNames
from phalanx.models.registry import family_of, of_model_type

FOLDER = "adapter"
FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of names in PEFT's files


@dataclass(frozen=True)
class AdapterFolder:
    """A folder of adapters. index: of its tensors, by their global names; receipts: of its files, in one of our
    checkpoints."""

    path: Path
    receipts: dict[str, Receipt]
    index: Index

    @property
    def placed(self) -> Index:
        """The index, with whole paths of files."""
        whole = str((self.path / FILE).absolute())
        return {n: Stored(s.shape, [replace(p, file=whole) for p in s.parts]) for n, s in self.index.items()}

    @property
    def files(self) -> dict[str, Receipt | None]:
        """Receipts by those paths; None: the file has none."""
        return {str((self.path / FILE).absolute()): self.receipts.get(FILE)}

    def read(self, name: str) -> Tensor:
        """A whole tensor, compared with its checksum."""
        with open_tensors(self.path / FILE, self.receipts.get(FILE)) as tensors:
            return tensors.read(self.index[name].parts[0].key)


def peft_names(model: ModelConfig) -> Callable[[str], str]:
    """What PEFT calls the tensor of a global name in its files: after transformers' modules in memory."""
    names = family_of(model).tensors
    return lambda name: PREFIX + names.in_memory(name)


def module_of(name: str) -> tuple[str, str]:
    """Of an adapter's tensor, such as `...q_proj.lora_A.weight`: the name of the matrix that it belongs to,
    `...q_proj.weight`, and its attribute there."""
    module, _, attribute = name.removesuffix(".weight").rpartition(".")
    return f"{module}.weight", attribute


def adapter_folder(weights: Path) -> AdapterFolder | None:
    """The adapters that belong to a folder of weights; None: it has none."""
    if weights.name != "weights" or not (weights.parent / NAME).is_file():
        return None
    receipts = read_manifest(weights.parent).receipts(FOLDER)
    if FILE not in receipts:
        return None
    folder = weights.parent / FOLDER
    for name in receipts.keys() - {FILE}:
        read_checked(folder / name, receipts[name])
    found = of_model_type(read_config(weights).get("model_type"))
    return _read(folder, receipts, None if found is None else found[1].tensors)


def adapter_source(given: str, names: TensorNames | None = None, tied: bool = False) -> AdapterFolder:
    """The adapters of a folder of PEFT, or of a run or checkpoint. CheckpointError if there are none. names: of the
    model's tensors; tied: whether its head is its embedding."""
    path = Path(given)
    if (path / FILE).is_file():
        found = _read(path, {}, names)
        return _one_matrix(found, names) if tied and names is not None and (path / CONFIG).is_file() else found
    saved = adapter_folder(find(given) / "weights")
    if saved is None:
        raise CheckpointError(f"{given} holds no adapters: neither {FILE} nor {FOLDER}/{FILE}")
    return saved


def _read(folder: Path, receipts: dict[str, Receipt], names: TensorNames | None) -> AdapterFolder:
    names = names or TensorNames("", "", "")
    with open_tensors(folder / FILE, receipts.get(FILE)) as tensors:
        # of an embedding or a head with an adapter PEFT writes the base's weights too, which are not trained
        own = [key for key in tensors.keys() if not key.endswith((".base_layer.weight", ".base_layer.bias"))]
        shapes = {names.in_files(key.removeprefix(PREFIX)): (key, tensors.shape(key)) for key in own}
    index = {name: Stored(s, [StoredBox(FILE, key, Box.full(s))]) for name, (key, s) in shapes.items()}
    return AdapterFolder(folder, receipts, index)


def _one_matrix(found: AdapterFolder, names: TensorNames) -> AdapterFolder:
    """PEFT's adapters of a model whose head is its embedding, without the head: PEFT leaves the head as it was where
    the embedding is trained, unless it has trained both alike (`ensure_weight_tying`)."""
    both = (names.embedding, names.head)
    own = [n for n in found.index if n.startswith(tuple(name.removesuffix("weight") for name in both))]
    if not own:
        return found
    if sorted(own) != sorted(both) or not torch.equal(*(found.read(name) for name in both)):
        raise CheckpointError(
            f"{found.path} trains {own[0]}: in this model embedding and head are one matrix, and here they are two: "
            "train with PEFT's modules_to_save and ensure_weight_tying, or merge by PEFT and save the model untied"
        )
    return replace(found, index={name: stored for name, stored in found.index.items() if name != names.head})


def check_wanted(weights: Path, found: AdapterFolder | None, wanted: Shapes) -> None:
    """CheckpointError for adapters that a model without any would leave out."""
    if found is not None and not wanted:
        raise CheckpointError(
            f"{weights} is the base of adapters, which would be left out: take them along with the `lora` section of "
            f"the run that made them, or merge them into the weights: phalanx export {weights.parent} --merge -o FOLDER"
        )


@dataclass(frozen=True)
class Modules:
    """Names of a model's modules. targets: those that have an adapter; whole: those whose weights are trained;
    parameters: tensors that have an adapter of their own. task: of the model, as PEFT names it (its TaskType); None:
    PEFT has no class for such models, and takes them as they are."""

    targets: list[str]
    whole: list[str]
    parameters: list[str]


def peft_text(
    own: dict[str, Any], base: str | None, modules: Modules, fan_in_fan_out: bool, task: str | None
) -> dict[str, Any]:
    """adapter_config.json. own: keys of the method, its peft_type among them; fan_in_fan_out: whether the base's
    matrices are stored as (inputs, outputs); task: for which PEFT wraps the model, None for none of its own."""
    return {
        **own,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "target_modules": modules.targets,
        "target_parameters": modules.parameters or None,
        "modules_to_save": modules.whole or None,
        "task_type": task,
    }
