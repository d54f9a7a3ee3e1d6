"""Kinds of attention that the implementations which a run insists on do not have: said as problems of the setting that
insists on them, before anything starts."""

from __future__ import annotations

from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.nn.env import Env, OpChoices
from phalanx.ops.attention.kind import UnsupportedAttention
from phalanx.ops.op import NotInvariant
from phalanx.planning.blocks import make_blocks, num_blocks


def check_supported(run: Run) -> list[Problem]:
    """For a run whose model has no problem of its own. Truth: its blocks, which refuse such attention when they are
    built."""
    train, insists = run.train, dict[str, Any]()
    if train.batch_invariant:
        insists["batch_invariant"] = False
    elif train.kernels == "optional":
        insists["kernels"] = "auto"
    else:
        return []
    ops = OpChoices(kernels=train.kernels, batch_invariant=train.batch_invariant, plain_ops=tuple(train.plain_ops))
    try:
        make_blocks(run.model, Env(ops=ops), range(num_blocks(run.model)))
    except UnsupportedAttention as error:
        rule = str(error).partition(": set ")[0]  # what to set instead is the problem's value
        because = {"model.family": run.model.family}
        return [problem("train", train, name, rule, because, (valid,)) for name, valid in insists.items()]
    except NotInvariant:  # of sizes and ranks, which the blocks of the plan name
        return []
    return []
