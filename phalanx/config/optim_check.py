"""Rules between the `optim` section and others: split masters, and gradients that are applied in backward."""

from __future__ import annotations

from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect, problem
from phalanx.config.run import Run
from phalanx.optim.optimizer import find_optimizer


def check_memory(run: Run, world_size: int) -> list[Problem]:
    """Whether fields of optim that save memory can do so here."""
    return check_masters(run) + check_in_backward(run, world_size)


def check_masters(run: Run) -> list[Problem]:
    """Split masters need bf16 weights in the place where they are updated."""
    c = run.optim
    if c.masters == "whole":
        return []
    found: list[tuple[str, dict[str, Any]]] = []
    if run.train.precision != "bf16":
        rule = "split needs bf16 weights, of which masters are then stored as the missing bits"
        found.append((rule, {"train.precision": run.train.precision}))
    if run.train.fp8 is not None and run.layout.sharding > 0:
        rule = "split needs bf16 weights; with sharding, train.fp8 stores FP8 values of the masters instead"
        found.append((rule, {"train.fp8.recipe": run.train.fp8.recipe, "layout.sharding": run.layout.sharding}))
    named = {"optim.name": c, "optim.fallback.name": c.fallback}
    for key, own in named.items():
        if own is not None and find_optimizer(own.name).owns == "matrix":
            rule = "split needs masters beside their weights; those of whole matrices are at the ranks that update them"
            found.append((rule, {key: own.name}))
    return [problem("optim", c, "masters", rule, because, ("whole",)) for rule, because in found]


def check_in_backward(run: Run, world_size: int) -> list[Problem]:
    """What needs all gradients of a step at once excludes applying them in backward."""
    c, train, layout = run.optim, run.train, run.layout
    if not c.in_backward:
        return no_effect("optim", c, ("clip_by",), "optim.in_backward=true", {"optim.in_backward": False})
    found = check_clipping(run)
    unit = train.micro_batch * (world_size // max(1, layout.tp * layout.cp * layout.pp))
    if unit > 0 and train.global_batch != unit:
        rule = "must be micro_batch * dp with optim.in_backward: one micro-batch a step, whose gradients are complete"
        because = {"micro_batch * dp": unit}
        found.append(problem("train", train, "global_batch", rule, because, (unit,)))
    if train.guard.sigmas is not None:
        rule = "must be unset with optim.in_backward: a spike of the norm is known when weights have changed already"
        found.append(problem("train.guard", train.guard, "sigmas", rule, {}, (None,)))
    if layout.pp > 1:
        rule = "must be 1 with optim.in_backward, whose one micro-batch a step would leave all stages but one idle"
        found.append(problem("layout", layout, "pp", rule, {}, (1,)))
    found += [problem("optim", c, "in_backward", rule, because, (False,)) for rule, because in _obstacles(run)]
    return found


def check_clipping(run: Run) -> list[Problem]:
    """Only norms of buckets are known in backward."""
    c = run.optim
    if c.clip_grad == 0:
        because = {"optim.clip_grad": c.clip_grad}
        return no_effect("optim", c, ("clip_by",), "optim.clip_grad > 0", because)
    if c.clip_by == "bucket":
        return []
    rule = (
        "must be bucket with optim.in_backward, or clip_grad 0: when the norm of the whole model is known, gradients "
        "have been applied"
    )
    return [problem("optim", c, "clip_by", rule, {"optim.clip_grad": c.clip_grad}, ("bucket",))]


def _obstacles(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """What excludes applying gradients in backward: why, and the field that says so."""
    train, layout, named = run.train, run.layout, {"optim.name": run.optim, "optim.fallback.name": run.optim.fallback}
    found: list[tuple[str, dict[str, Any]]] = []

    def excludes(what: str, key: str, value: Any) -> None:
        found.append((f"excludes {what}", {key: value}))

    if train.precision == "fp16":
        excludes("fp16, whose loss scale is judged by all gradients of a step", "train.precision", train.precision)
    if train.deterministic:
        excludes("keeping gradients to add them up in a fixed order", "train.deterministic", True)
    if train.fp8 is not None:
        excludes("train.fp8, which may repeat a backward to find its scales", "train.fp8.recipe", train.fp8.recipe)
    if train.cuda_graphs == "on":
        excludes("CUDA graphs, which need gradients in fixed places", "train.cuda_graphs", train.cuda_graphs)
    if run.model.routed_experts and layout.ep * layout.etp > 1 and layout.dispatch in ("auto", "push"):
        what = "push, which repeats a backward if experts had too little room: type layout.dispatch=alltoall"
        excludes(what, "layout.dispatch", layout.dispatch)
    for key, own in named.items():
        if own is not None and find_optimizer(own.name).owns == "matrix":
            excludes("optimizers of whole matrices, which collect the gradients of all of them", key, own.name)
    return found
