"""Megatron-LM: a shell script as in its examples, a line of arguments, or the YAML of its functional tests.

Names, defaults and meanings are those of megatron/training/arguments.py (read at core_v0.15.3).
"""

from __future__ import annotations

import re

from phalanx.config.importers.megatron_files import data, logging, saving
from phalanx.config.importers.megatron_layout import layout, memory, precision
from phalanx.config.importers.megatron_model import TITLE, kind_of, translate_model
from phalanx.config.importers.megatron_rules import RULES
from phalanx.config.importers.megatron_steps import lengths, optimizer, schedule
from phalanx.config.importers.megatron_text import read_text, read_yaml_arguments
from phalanx.config.importers.translation import (
    ConfigImporter,
    ForeignText,
    Imported,
    Translation,
)

TELLING = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--max-position-embeddings",
    "--train-iters",
    "--train-samples",
    "--lr-decay-style",
    "--encoder-num-layers",
)
"""Options by which its command lines are known; two of them must be there."""
RANKS = {"--nproc_per_node": "ranks of a machine", "--nproc-per-node": "ranks of a machine", "--nnodes": "machines"}
OURS_TOO = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "phalanx sets what its streams need",
    "CUBLAS_WORKSPACE_CONFIG": "runs of one layout have the same bits",
}


class Megatron(ConfigImporter):
    title = TITLE
    looks_for = "options such as --num-layers and --micro-batch-size in a script, a line or MODEL_ARGS:"

    def recognises(self, source: ForeignText) -> tuple[str, ...]:
        words = set(re.findall(r"--[a-z][\w-]+", source.text))
        found = tuple(name for name in TELLING if name in words)
        named = ("MODEL_ARGS:",) if re.search(r"^MODEL_ARGS:", source.text, re.MULTILINE) else ()
        return (*named, *found) if named or len(found) > 1 else ()

    def translate(self, source: ForeignText) -> Imported:
        as_yaml = re.search(r"^MODEL_ARGS:", source.text, re.MULTILINE)
        keys, _, program, started = read_yaml_arguments(source) if as_yaml else read_text(source)
        if not any(key.name.startswith("--") for key in keys):
            raise source.refuse("has no command with options of Megatron-LM, and no variable that holds them")
        t = Translation(TITLE, keys)
        ranks = source.ranks or started
        surroundings(t)
        translate_model(t, program)
        for translated in (lengths, schedule, precision, layout, memory, data, saving, logging, optimizer):
            translated(t, ranks)
        if kind_of(t, program) == "gpt":
            t.set("task.name", "pretrain", origin="the program")
        t.apply(RULES)
        return t.finish(ranks)


def surroundings(t: Translation) -> None:
    """Exported variables, the launcher's options, lines that were not read, and the keys of a functional test."""
    for name in t.names():
        kind, _, rest = name.partition(" ")
        if kind == "export":
            ours = rest in OURS_TOO or rest.startswith(("NCCL_", "NVTE_", "TORCH_NCCL_"))
            t.built_in(
                name, OURS_TOO.get(rest, "of its libraries") if ours else "no option: set it where the run starts"
            )
        elif kind == "launcher":
            what = RANKS.get(rest, "how ranks meet")
            t.built_in(name, f"{what}: phalanx train --ranks N, or torchrun and srun as before")
        elif kind in ("line", "lines"):
            t.missing(name, f"not read: {t.value(name)}")
        elif kind == "test":
            t.built_in(name, "of the test that runs it")


IMPORTER = Megatron()
