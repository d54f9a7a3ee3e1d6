"""The files by which sentence-transformers knows how embeddings are made of a folder's model: modules.json,
1_Pooling/config.json and others. Written beside the weights of a model without a head, and read from such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf_files import read_json
from phalanx.sequence.sample import Pooling

MODULES = "modules.json"
POOLING = "1_Pooling"
SETTINGS = "sentence_bert_config.json"
MODES: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}
OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
PACKAGE = "sentence_transformers.models"


@dataclass(frozen=True)
class EmbedderFacts:
    """How a folder's embeddings are made: of which hidden states, whether their length is made 1, and of how many
    tokens of a text (None: the folder does not say)."""

    pooling: Pooling
    normalized: bool = True
    most_tokens: int | None = None


def embedder_files(facts: EmbedderFacts, width: int) -> dict[str, bytes]:
    """Contents by name. width: of the model's hidden states."""
    kinds = {"": "Transformer", POOLING: "Pooling", **({"2_Normalize": "Normalize"} if facts.normalized else {})}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{PACKAGE}.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    modes = {name: False for name in (*MODES.values(), *OTHER_MODES)}
    pooling = {"word_embedding_dimension": width, **modes, MODES[facts.pooling]: True, "include_prompt": True}
    general: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    found: dict[str, Any] = {
        MODULES: modules,
        f"{POOLING}/config.json": pooling,
        "config_sentence_transformers.json": general,
    }
    if facts.most_tokens is not None:
        found[SETTINGS] = {"max_seq_length": facts.most_tokens, "do_lower_case": False}
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in found.items()}


def is_embedder(folder: Path) -> bool:
    """Whether a folder says how embeddings are made of the model's hidden states."""
    return (folder / MODULES).is_file()


def read_embedder(folder: Path) -> EmbedderFacts:
    """Of a folder with MODULES. CheckpointError for modules that are not supported."""
    try:
        modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        named = [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in modules]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MODULES} cannot be read: {error}") from error
    kinds = [kind for kind, _ in named]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        rule = "supported: Transformer, Pooling, and perhaps Normalize"
        raise CheckpointError(f"{folder / MODULES}: its modules are {', '.join(kinds) or 'none'} ({rule})")
    where = named[1][1]
    if "/" in where or ".." in where or not where:
        raise CheckpointError(f"{folder / MODULES}: the path of its Pooling module, {where!r}, is no folder inside it")
    stated = read_json(folder / where / "config.json")
    on = [name.removeprefix("pooling_mode_") for name, value in stated.items() if value is True and "_mode_" in name]
    known = {name.removeprefix("pooling_mode_"): pooling for pooling, name in MODES.items()}
    mode = stated.get("pooling_mode")  # as newer versions name it
    if isinstance(mode, str):
        on = [{"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}.get(mode, mode)]
    if len(on) != 1 or on[0] not in known:
        rule = f"supported: one of {', '.join(known)}"
        raise CheckpointError(f"{folder / where / 'config.json'}: pools by {', '.join(on) or 'nothing'} ({rule})")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    most = settings.get("max_seq_length")
    return EmbedderFacts(known[on[0]], "Normalize" in kinds, most if type(most) is int and most > 0 else None)


POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
