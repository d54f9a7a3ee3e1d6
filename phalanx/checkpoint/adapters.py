"""The `adapter/` folder of a checkpoint: what a run with `lora` trains, in PEFT's files and under PEFT's names, beside
the `weights/` that it belongs to.

adapter_model.safetensors   the adapters' weights, as rounded as those of `weights/`
adapter_config.json         what PEFT reads them by; not there of a method that PEFT does not have
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf_files import Shapes
from phalanx.checkpoint.manifest import NAME, read_checked, read_manifest
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox, open_tensors
from phalanx.layout.box import Box

FOLDER = "adapter"
FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of names in PEFT's files


@dataclass(frozen=True)
class AdapterFolder:
    """The adapters of one of our checkpoints. index: of its tensors, by their global names."""

    path: Path
    receipts: dict[str, Receipt]
    index: Index


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
    with open_tensors(folder / FILE, receipts[FILE]) as tensors:
        shapes = {key: tensors.shape(key) for key in tensors.keys()}
    index = {key.removeprefix(PREFIX): Stored(s, [StoredBox(FILE, key, Box.full(s))]) for key, s in shapes.items()}
    return AdapterFolder(folder, receipts, index)


def check_wanted(weights: Path, found: AdapterFolder | None, wanted: Shapes) -> None:
    """CheckpointError for adapters that a model without any would leave out."""
    if found is not None and not wanted:
        raise CheckpointError(
            f"{weights} is the base of adapters, which would be left out: take them along with the `lora` section of "
            f"the run that made them; merge them into the weights with PEFT ({found.path} is its format); or copy "
            f"{weights} elsewhere to have the base alone"
        )


def peft_text(own: dict[str, Any], base: str | None, modules: list[str], fan_in_fan_out: bool) -> dict[str, Any]:
    """adapter_config.json. own: keys of the method, its peft_type among them; modules: those that have an adapter;
    fan_in_fan_out: whether the base's matrices are stored as (inputs, outputs)."""
    return {
        **own,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
    }
