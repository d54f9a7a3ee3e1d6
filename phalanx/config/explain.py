"""What `phalanx explain` lists besides single keys: sections, every key, and the results of a search."""

from __future__ import annotations

import json
from textwrap import indent

from phalanx.base import tree
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.text_table import table
from phalanx.config.read import COMMAND_LINE, INDENT
from phalanx.config.run import Run
from phalanx.config.synonyms import NOT_BUILT, SYNONYMS
from phalanx.config.validate import near_keys

SECTIONS = {
    "model": "what is computed: family and sizes, with Hugging Face's field names",
    "train": "how long, batches, precision, seed, evaluation",
    "layout": "where: tensor, pipeline, context and expert parallelism, sharding (ZeRO 0-3, FSDP)",
    "task": "what is minimised: the objective and its own fields",
    "optim": "optimizer and learning-rate schedule",
    "data": "token files or text, mixture, split, validation sets, tokenizer",
    "checkpoint": "when to save, what to keep, where to start",
    "log": "step lines, TensorBoard, W&B, report",
    "cluster": "where `phalanx launch` starts it: nodes, queue, environment",
}


def sections_text() -> str:
    """One line for each section and each key outside sections."""
    every = list(tree.keys(Run))
    rows = [("section", "keys", "what it decides")]
    for name in tree.field_names(Run):
        inside = {k.path for k in every if k.path.startswith(f"{name}.") and not tree.sections(k.hint)}
        doc = SECTIONS.get(name) or next(k.doc for k in every if k.path == name)
        first = " ".join(doc.partition("\n\n")[0].partition(". ")[0].split()).rstrip(".")
        rows.append((name, str(len(inside)) if inside else "", first))
    more = (
        "`phalanx explain layout` or `phalanx explain layout.tp` says more, `--search WORD` finds keys, "
        "`--all` lists every one."
    )
    return f"{table(rows, left=(0, 2))}\n\n{more}"


def all_text() -> str:
    """Every key with its type and meaning; keys shared by several families are listed once."""
    return "\n".join(dict.fromkeys(key_text(k) for k in tree.keys(Run) if not tree.sections(k.hint)))


def search_text(word: str) -> str:
    """Keys whose path, meaning or values contain the word, those that another framework calls by it, and features that
    are not built yet. ConfigError if there are none."""
    wanted = word.lower().lstrip("-")
    meant = SYNONYMS.get(wanted.rpartition(".")[2])
    found = [
        k
        for k in tree.keys(Run)
        if not tree.sections(k.hint) and (k.path == meant or wanted in f"{k.path} {k.doc} {k.type}".lower())
    ]
    found.sort(key=lambda k: (k.path != meant, wanted not in k.path))
    texts = list(dict.fromkeys(key_text(k) for k in found))
    if wanted in NOT_BUILT:
        texts.insert(0, f"{word}: {NOT_BUILT[wanted]}")
    if not texts:
        raise ConfigError(
            [
                Problem(
                    "--search",
                    word,
                    "is in no config key and no explanation of one",
                    {},
                    near_keys(wanted, ""),
                    COMMAND_LINE,
                )
            ]
        )
    return "\n".join(texts)


def key_text(key: tree.ConfigField) -> str:
    default = ", required" if key.default is tree.REQUIRED else f", default {json.dumps(key.default, default=list)}"
    return f"{key.path}: {key.type}{default}\n{indent(key.doc, INDENT)}".rstrip()
