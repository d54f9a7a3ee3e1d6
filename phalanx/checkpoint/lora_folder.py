"""LoRA adapters in PEFT's files, whoever made them: which matrices of a model they belong to, with which rank and
factor. The values are read when they are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.base.registry import near
from phalanx.checkpoint.adapters import CONFIG, FILE, FOLDER, PREFIX, adapter_folder
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.manifest import NAME, read_manifest
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import open_tensors
from phalanx.nn.adapter import by_pattern

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
START = ".start_A.weight", ".start_B.weight"  # of PiSSA, what it takes out of the matrix (nn/adapters/lora.py)
LENGTHS = ".lora_magnitude_vector"  # of DoRA, the trained lengths of the matrix' rows
NEEDS_OTHER_BASE = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")  # starts that change the base's weights
MUST_BE_UNSET = {
    "modules_to_save": "these modules are trained whole, which only a merged model can have",
    "lora_bias": "biases of adapters are not served",
    "target_parameters": "adapters of experts that are one tensor are not served",
    "trainable_token_indices": "trained rows of an embedding are not served",
    "alora_invocation_tokens": "adapters that begin amid a sequence are not served",
    "megatron_config": "it is of a model in another format",
}


@dataclass(frozen=True)
class LowRank:
    """Two tensors of an adapter, by the ends of their names, and what their product is multiplied by."""

    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True)
class LoRAFolder:
    """One adapter. By name of the weight that it belongs to:

    terms    what is added to it: one product; of PiSSA a second
    lengths  names of those whose rows get trained lengths (DoRA)

    shapes   of its tensors, by the model's names for them
    receipt  of its file in one of our checkpoints; None: it is from elsewhere
    owner    that checkpoint
    """

    path: Path
    terms: dict[str, tuple[LowRank, ...]]
    lengths: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    receipt: Receipt | None = None
    owner: Path | None = None

    @property
    def ranks(self) -> dict[str, int]:
        """Of all terms of a matrix together."""
        return {name: sum(term.rank for term in terms) for name, terms in self.terms.items()}

    @property
    def file(self) -> str:
        return str((self.path / FILE).resolve())


def read_lora_folder(given: str) -> LoRAFolder:
    """Of a PEFT folder, or of a run or checkpoint that has an adapter, whose files are compared with their checksums.
    CheckpointError for what is missing, or is no plain LoRA."""
    path, owner = _folder(given)
    receipt = None if owner is None else read_manifest(owner).receipts(FOLDER)[FILE]
    config = read_peft_config(path, ("use_dora",)) if (path / CONFIG).is_file() else _own_config(given, owner)
    with open_tensors(path / FILE, receipt) as tensors:
        shapes = {key.removeprefix(PREFIX): tensors.shape(key) for key in tensors.keys()}
        foreign = [key for key in tensors.keys() if not key.startswith(PREFIX)]
    pairs = ((DOWN, UP), *((START,) if config.get("starts") else ()))
    ends = [end for pair in pairs for end in pair] + ([LENGTHS] if config.get("use_dora") else [])
    others = [*foreign, *(key for key in shapes if not key.endswith(tuple(ends)))]
    if others:
        raise CheckpointError(f"{path / FILE}: {others[0]}: only {PREFIX}...{' and '.join(ends)} are read")
    modules = list(dict.fromkeys(key.removesuffix(end) for key in shapes for end in ends if key.endswith(end)))
    torn = [m for m in modules if any(m + end not in shapes for end in ends) or not _fit(shapes, m, pairs)]
    if torn or not modules:
        lacks = f"{torn[0]} needs all of {', '.join(ends)}, of one rank" if torn else "holds no adapter"
        raise CheckpointError(f"{path / FILE}: {lacks}")
    terms = {f"{m}.weight": _terms(config, m, shapes, pairs) for m in modules}
    lengths = frozenset(terms) if config.get("use_dora") else frozenset[str]()
    return LoRAFolder(path, terms, lengths, shapes, receipt, owner)


def _fit(shapes: Mapping[str, tuple[int, ...]], module: str, pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether both matrices of each pair have the same rank."""
    return all(shapes[module + down][0] == shapes[module + up][1] for down, up in pairs)


def _terms(
    config: dict[str, Any], module: str, shapes: Mapping[str, tuple[int, ...]], pairs: Iterable[tuple[str, str]]
) -> tuple[LowRank, ...]:
    """What is taken out again (PiSSA) has the same scale, with another sign."""
    made = list[LowRank]()
    for sign, (down, up) in zip((1.0, -1.0), pairs):
        rank = shapes[module + down][0]
        made.append(LowRank(down, up, rank, sign * _scale(config, module, rank)))
    return tuple(made)


def check_base(folder: LoRAFolder, linears: Mapping[str, tuple[int, int]]) -> None:
    """CheckpointError unless all of it belongs to a model with linears of these names, outputs and inputs."""
    for name in folder.terms:
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
    """The folder with the adapter, and the checkpoint of ours that it is in; None: it is from elsewhere."""
    path = Path(given)
    inside = path.name == FOLDER and (path.parent / NAME).is_file()
    if (path / CONFIG).is_file() and not inside:
        return path, None
    if (path / FILE).is_file() and not inside:
        raise CheckpointError(f"{path} has {FILE}, but no {CONFIG} that says how to read it")
    weights = find(str(path.parent) if inside else given) / "weights"
    found = adapter_folder(weights)
    if found is None:
        raise CheckpointError(f"{given} holds no adapter in PEFT's format ({CONFIG}, or {FOLDER}/{CONFIG})")
    return found.path, weights.parent


def _own_config(given: str, owner: Path | None) -> dict[str, Any]:
    """What adapter_config.json would say of a checkpoint's adapters that PEFT does not read as they are: those of
    PiSSA."""
    lora = {} if owner is None else read_manifest(owner).config.get("lora") or {}
    if lora.get("also"):
        raise CheckpointError(
            f"{given} trains weights of the model whole (lora.also): merge it (phalanx export --merge)"
        )
    if lora.get("method") != "lora" or lora.get("start") != "pissa":
        raise CheckpointError(f"{given} holds adapters of {lora.get('method')}: LoRA, PiSSA and DoRA are served")
    own = {"lora_alpha": lora["alpha"], "use_rslora": lora["rank_stabilised"], "alpha_pattern": lora["alpha_pattern"]}
    return {**own, "starts": True}


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
