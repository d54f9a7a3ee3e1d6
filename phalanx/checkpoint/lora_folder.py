"""LoRA adapters in PEFT's files, whoever made them: which matrices of a model they belong to, with which rank and
factor. The values are read when they are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError
from phalanx.base.registry import near
from phalanx.checkpoint.adapters import CONFIG, FILE, FOLDER, PREFIX, adapter_folder
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.manifest import NAME, read_manifest
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import open_tensors
from phalanx.nn.adapter import by_pattern

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
NEEDS_OTHER_BASE = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")  # starts that change the base's weights
MUST_BE_UNSET = {
    "use_dora": "DoRA is not a sum: merge it into its base with PEFT",
    "modules_to_save": "these modules are trained whole, which only a merged model can have",
    "lora_bias": "biases of adapters are not served",
    "target_parameters": "adapters of experts that are one tensor are not served",
    "trainable_token_indices": "trained rows of an embedding are not served",
    "alora_invocation_tokens": "adapters that begin amid a sequence are not served",
    "megatron_config": "it is of a model in another format",
}


@dataclass(frozen=True)
class LoRAFolder:
    """One adapter. By name of the weight that it belongs to:

    ranks    of its matrices
    scales   what it adds is multiplied by

    shapes   of its tensors, by the model's names for them
    receipt  of its file in one of our checkpoints; None: it is from elsewhere
    owner    that checkpoint
    """

    path: Path
    ranks: dict[str, int]
    scales: dict[str, float]
    shapes: dict[str, tuple[int, ...]]
    receipt: Receipt | None = None
    owner: Path | None = None

    @property
    def file(self) -> str:
        return str((self.path / FILE).resolve())


def read_lora_folder(given: str) -> LoRAFolder:
    """Of a PEFT folder, or of a run or checkpoint that has an adapter, whose files are compared with their checksums.
    CheckpointError for what is missing, or is no plain LoRA."""
    path, owner = _folder(given)
    receipt = None if owner is None else read_manifest(owner).receipts(FOLDER)[FILE]
    config = read_peft_config(path)
    with open_tensors(path / FILE, receipt) as tensors:
        shapes = {key: tensors.shape(key) for key in tensors.keys()}
    down = {key.removesuffix(DOWN): shape for key, shape in shapes.items() if key.endswith(DOWN)}
    up = {key.removesuffix(UP): shape for key, shape in shapes.items() if key.endswith(UP)}
    others = [key for key in shapes if not key.startswith(PREFIX) or not key.endswith((DOWN, UP))]
    if others:
        raise CheckpointError(f"{path / FILE}: {others[0]}: only {PREFIX}...{DOWN} and {UP} are read")
    torn = [key for key in {**down, **up} if key not in up or key not in down or down[key][0] != up[key][1]]
    if torn or not down:
        rule = f"{torn[0]} needs both {DOWN} (rank, inputs) and {UP} (outputs, rank)" if torn else "holds no adapter"
        raise CheckpointError(f"{path / FILE}: {rule}")
    modules = [key.removeprefix(PREFIX) for key in down]
    ranks = {f"{name}.weight": down[PREFIX + name][0] for name in modules}
    scales = {f"{name}.weight": _scale(config, name, ranks[f"{name}.weight"]) for name in modules}
    own = {key.removeprefix(PREFIX): shape for key, shape in shapes.items()}
    return LoRAFolder(path, ranks, scales, own, receipt, owner)


def check_base(folder: LoRAFolder, linears: Mapping[str, tuple[int, int]]) -> None:
    """CheckpointError unless all of it belongs to a model with linears of these names, outputs and inputs."""
    for name in folder.ranks:
        if name not in linears:
            like = near(name, tuple(linears))
            hint = f"; it has {', '.join(like)}" if like else ""
            raise CheckpointError(f"{folder.path}: {name} is no linear of this model that can have an adapter{hint}")
        module = name.removesuffix(".weight")
        outputs, inputs = folder.shapes[module + UP][0], folder.shapes[module + DOWN][1]
        if (outputs, inputs) != linears[name]:
            has = "{} outputs of {} inputs".format(*linears[name])
            raise CheckpointError(
                f"{folder.path}: {name} is for {outputs} outputs of {inputs} inputs; this model has {has}"
            )


def _folder(given: str) -> tuple[Path, Path | None]:
    """The folder with PEFT's files, and the checkpoint of ours that it is in; None: it is from elsewhere."""
    path = Path(given)
    if (path / CONFIG).is_file() and not (path.name == FOLDER and (path.parent / NAME).is_file()):
        return path, None
    if (path / FILE).is_file() and not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has {FILE}, but no {CONFIG} that says how to read it")
    weights = find(str(path.parent) if (path / CONFIG).is_file() else given) / "weights"
    found = adapter_folder(weights)
    if found is None or not (found.path / CONFIG).is_file():
        raise CheckpointError(f"{given} holds no adapter in PEFT's format ({CONFIG}, or {FOLDER}/{CONFIG})")
    return found.path, weights.parent


# of MUST_BE_UNSET, what a run can start from although it is not served
STARTED_FROM = ("use_dora", "modules_to_save", "target_parameters")


def read_peft_config(path: Path, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """adapter_config.json of a folder with LoRA. CheckpointError for what is not known; but: keys that may be set."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG}: not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{path / CONFIG}: peft_type={kind!r}: only LORA is served")
    for key, why in MUST_BE_UNSET.items():
        if config.get(key) and key not in but:
            raise CheckpointError(f"{path / CONFIG}: {key}={config[key]!r}: {why}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{path / CONFIG}: bias={config['bias']!r}: trained biases are not served")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(NEEDS_OTHER_BASE):
        rule = "its base is not the model's own weights; convert it with PEFT (save_pretrained's path_initial_...)"
        raise CheckpointError(f"{path / CONFIG}: init_lora_weights={start!r}: {rule}")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise CheckpointError(f"{path / CONFIG}: lora_alpha={config.get('lora_alpha')!r}: must be a number")
    return config


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank). The first of alpha_pattern's regular expressions that fits the end of the
    module's name counts, as in PEFT."""
    alpha = by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
