"""Rules of train.freeze: every glob matches something, tensors stored as one matrix are frozen together, and something
is left to train."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.models.model_config import ModelConfig
from phalanx.planning.blocks import global_numel, whole_specs


def check_freeze(run: Run) -> list[Problem]:
    """For a run whose model has no problem of its own."""
    globs = run.train.freeze
    if not globs:
        return []
    matrices = stored_together(run.model)
    names = [name for matrix in matrices for name in matrix]
    idle = [g for g in globs if not any(fnmatchcase(name, g) for name in names)]
    if idle:
        rest = [g for g in globs if g not in idle]
        kinds = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        return [
            problem(
                "train",
                run.train,
                "freeze",
                "must fit names of tensors",
                {"fits none": ", ".join(idle), "tensors": kinds},
                (rest,),
            )
        ]
    if all(fits(name, globs) for name in names):
        return [problem("train", run.train, "freeze", "must leave something to train", {"tensors": len(names)}, ([],))]
    torn = [matrix for matrix in matrices if len({fits(name, globs) for name in matrix}) > 1]
    if torn:
        missing = [name for matrix in torn for name in matrix if not fits(name, globs)]
        whole = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in missing))
        rule = (
            "must fit all or none of the tensors that are stored as one matrix (q, k and v; gate and up; "
            "the experts of a layer)"
        )
        return [problem("train", run.train, "freeze", rule, {"fits not": missing[0]}, ([*globs, *whole],))]
    return []


def fits(name: str, globs: list[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def stored_together(model: ModelConfig) -> list[tuple[str, ...]]:
    """For each parameter, the names of the global tensors that it holds, as in a Hugging Face checkpoint."""
    return [tuple(piece.name for piece in spec.pieces) for spec in whole_specs(model) if spec.exported]


def frozen_by(run: Run) -> tuple[str, ...]:
    """Globs of names of the weights that stay as they are: with adapters all of the model's own, but for
    `trained_also`."""
    return tuple(run.train.freeze) if run.lora is None else ("*",)


def trained_also(run: Run) -> tuple[str, ...]:
    """Globs of names of weights that are trained whole beside adapters."""
    return () if run.lora is None else tuple(run.lora.also)


def num_frozen(run: Run) -> int:
    """How many parameters train.freeze, or `lora`, keeps as they are."""
    specs = whole_specs(run.model, frozen_by(run), trained_also(run))
    return sum(global_numel(spec) for spec in specs if spec.frozen and spec.trained)
