"""Keys of optim that nothing in the model reads: learning rates of tensors that the other of two optimizers updates,
and heads where no matrix has any."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect
from phalanx.config.run import Run
from phalanx.optim.config import OptimConfig
from phalanx.optim.muon import MuonConfig
from phalanx.optim.optimizer import find_optimizer
from phalanx.planning.blocks import whole_specs
from phalanx.planning.freeze import frozen_by, trained_also


def check_optimizer_keys(run: Run) -> list[Problem]:
    """For a run whose model has no problem of its own."""
    c, found = run.optim, list[Problem]()
    per_head = isinstance(c, MuonConfig) and c.per_head
    if c.fallback is None or not (c.lr_scale or c.fallback.lr_scale or per_head):
        return []
    specs = [s for s in whole_specs(run.model, frozen_by(run), trained_also(run)) if s.learns]
    taken = find_optimizer(c.name).roles
    pieces = [(s.role in taken, piece) for s in specs for piece in s.pieces]
    if run.lora is None:  # adapters have further names
        names = [{piece.name for mine, piece in pieces if mine == own} for own in (True, False)]
        found += check_globs("optim", c, *names) + check_globs("optim.fallback", c.fallback, *reversed(names))
    if per_head and not any(each.heads for mine, piece in pieces if mine for each in piece.outputs):
        because = {"model.family": run.model.family} | ({"lora.method": run.lora.method} if run.lora else {})
        found += no_effect("optim", c, ("per_head",), "matrices that have heads of attention and are trained", because)
    return found


def check_globs(section: str, config: OptimConfig, own: Iterable[str], others: Iterable[str]) -> list[Problem]:
    """Problems with globs of lr_scale that fit tensors, but none of its `own`."""

    def fits(glob: str, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, glob) for name in names)

    rule = (
        "must fit tensors that this optimizer updates: optim.lr_scale is of those of optim.name, "
        "optim.fallback.lr_scale of the others"
    )
    idle = [glob for glob in config.lr_scale if fits(glob, others) and not fits(glob, own)]
    because = {f"{section}.name": config.name}
    return [Problem(f"{section}.lr_scale.{glob}", config.lr_scale[glob], rule, because) for glob in idle]
