"""One training step on one rank: forward and backward of all micro-batches, norm, update. Nothing here waits for the
device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.pairwise import pairwise_sum
from phalanx.engine.build import State
from phalanx.engine.embeddings import with_embeddings
from phalanx.engine.guard import NOT_FINITE
from phalanx.engine.in_backward import InBackward
from phalanx.engine.model import Model
from phalanx.engine.reference import with_reference
from phalanx.engine.shadow import begin_history, gradient_distance, reference
from phalanx.nn.moe import MISSING, TALLIED
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import Batch


@dataclass(frozen=True)
class StepResult:
    """Device scalars of one step, equal on all ranks.

    loss       mean of the objective: per token with a loss, or what else it divides by
    grad_norm  of the whole model, before clipping
    skipped    why nothing was updated (guard.REASONS), 0 if it was
    tokens     the divisor: tokens with a loss in the global batch, or what else the objective counts
    stop       how many ranks were asked to stop
    routing    (layers, E + len(TALLIED)) with experts: load of each and sums over tokens (nn.moe), otherwise None
    mtp_loss   mean loss per token of multi-token prediction, if the model has it
    fp8        (L, 3, 5) what FP8 casts lost, as Fp8State.totals, over all ranks; None without train.fp8
    gradient_distance  (L, 2) in steps with a shadow, as shadow.gradient_distance
    metrics    () means of the objective's metrics, by name
    clipped_heads  () heads of attention whose weights QK-clip scaled; None without optim.qk_clip
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    tokens: Tensor
    stop: Tensor
    routing: Tensor | None = None
    mtp_loss: Tensor | None = None
    fp8: Tensor | None = None
    gradient_distance: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    clipped_heads: Tensor | None = None


def train_step(
    state: State, batches: Sequence[Batch], lr: float, stop: bool = False, shadow: bool = False
) -> StepResult:
    """`batches`: this rank's micro-batches, or its shard of each, on the device. `stop`: this rank was asked to stop.
    `shadow`: compare the gradients with those in train.precision (train.fp8.shadow_interval)."""
    if state.in_backward is not None:
        return applied_in_backward(state, state.in_backward, batches, lr, stop)
    kept = shadow_of(state, batches) if shadow else None
    with state.buffers.sending_early():
        tokens = accumulate(state, batches)
    distance = gradient_distance(state, kept)
    return replace(update(state, tokens, lr, stop), gradient_distance=distance)


def applied_in_backward(
    state: State, applying: InBackward, batches: Sequence[Batch], lr: float, stop: bool
) -> StepResult:
    """A step in which each bucket is updated during backward. `skipped` says whether any bucket was skipped."""
    tokens = count_tokens(state.model, batches)
    batches = beforehand(state.model, batches)
    state.before_update()
    applying.begin(lr)
    forward_backward(state, batches, tokens)
    return end_step(state, tokens, stop, None)


def shadow_of(state: State, batches: Sequence[Batch]) -> dict[int, Tensor]:
    batches = beforehand(state.model, batches)
    tokens = count_tokens(state.model, batches)
    return reference(state, lambda: forward_backward(state, batches, tokens))


def accumulate(state: State, batches: Sequence[Batch]) -> Tensor:
    """Sum the gradients of all micro-batches and reduce them; returns the divisor of the sums (count_tokens).
    RuntimeError if the run has no gradients that stay."""
    if state.in_backward is not None:
        raise RuntimeError(
            "with optim.in_backward=true gradients are applied and freed during backward: call train_step(), or set "
            "optim.in_backward=false"
        )
    tokens = count_tokens(state.model, batches)
    batches = beforehand(state.model, batches)
    if state.model.fp8 is not None and state.model.fp8.needs_history:
        begin_history(state, lambda: forward_backward(state, batches, tokens))
    forward_backward(state, batches, tokens)
    if state.plan.experts.room_may_lack and lacked_room(state.model):
        with state.model.by_all_to_all():
            forward_backward(state, batches, tokens)
    return tokens


def beforehand(model: Model, batches: Sequence[Batch]) -> Sequence[Batch]:
    """The batches with what the objective must know before the step's own forward; most need nothing."""
    return with_embeddings(model, with_reference(model, batches))


def forward_backward(state: State, batches: Sequence[Batch], tokens: Tensor) -> None:
    model = state.model
    for block in model.mtp:
        block.tally.zero_()  # type: ignore[union-attr]
    zero_metrics(model)
    model.buffers.begin(len(batches))
    if model.fp8 is not None:
        model.fp8.begin()
    model.stages.begin(batches, seed=state.scaler.scale / tokens)
    execute(model.program(len(batches)), model.handlers)
    model.stages.end()
    model.buffers.finish()


def zero_metrics(model: Model) -> None:
    for head in model.heads:
        head.tally.zero_()  # type: ignore[union-attr]


def lacked_room(model: Model) -> bool:
    """Whether any rank had too little room for its experts' tokens. This is the one thing for which the host waits at
    the end of a step."""
    missing = torch.zeros((), dtype=torch.float64, device=model.mesh.device)
    for layer in model.routed:
        missing += layer.tally[MISSING]  # type: ignore[index]
    return model.mesh.world.all_reduce(missing).wait().item() > 0


def count_tokens(model: Model, batches: Sequence[Batch]) -> Tensor:
    """() float64: the divisor of the sums over the global batch: tokens with a loss, or what else the objective
    counts."""
    mine = torch.stack([model.plan.objective.divisor(b) for b in batches]).sum().double()
    return model.mesh.data.all_reduce(mine).wait()


def update(state: State, tokens: Tensor, lr: float, stop: bool = False) -> StepResult:
    """Norm, clip, optimizer. A step that the guard finds unfit is skipped on all ranks, state unchanged."""
    return end_step(state, tokens, stop, lambda skip, factor: state.optimizer.update(lr, skip, factor))


def end_step(state: State, tokens: Tensor, stop: bool, apply: Callable[[Tensor, Tensor], None] | None) -> StepResult:
    """As `update`. apply: called with (skip, factor of the gradients), both (), updates masters; None: they were
    updated in backward."""
    state.before_update()
    clip_scores = state.qk_clip
    if apply is not None:
        state.optimizer.begin()
    if clip_scores is not None:
        clip_scores.begin()
    buffers, scaler, clip = state.buffers, state.scaler, state.plan.run.optim.clip_grad
    norm = (buffers.grad_norm() if state.in_backward is None else state.in_backward.norm) / scaler.scale
    totals = reduce_step_totals(state.model, stop, None if clip_scores is None else clip_scores.clipped())
    verdict = state.guard.judge(totals.loss / tokens, norm)
    skip = (verdict > 0).float()
    if clip_scores is not None:
        clip_scores.settle(skip)
    if apply is not None:
        factor = 1.0 / scaler.scale
        if clip > 0:
            factor = factor * torch.clamp(clip / (norm + 1e-6), max=1.0)
        buffers.open()
        apply(skip, factor)
    buffers.gather()
    buffers.zero_rest()
    before = scaler.scale.clone()
    scaler.update((verdict == NOT_FINITE).float())
    for layer in state.model.routed:
        layer.settle(totals.routing[layer.layer, : layer.router.num_experts], skip)  # type: ignore[index]
    if state.model.fp8 is not None:
        state.model.fp8.settle(state.mesh.world, scaler.scale / before)
        state.model.fp8.renew()
    depths = state.plan.run.model.predict_layers
    return StepResult(
        totals.loss / tokens,
        norm,
        verdict,
        tokens,
        totals.stop,
        totals.routing,
        totals.mtp_loss / (depths * tokens) if depths else None,
        totals.fp8,
        metrics=dict(zip(state.model.metrics, totals.metrics / tokens)),
        clipped_heads=None if clip_scores is None else totals.clipped_heads * (1 - skip),
    )


@dataclass(frozen=True)
class StepTotals:
    """What all ranks know at the end of a step: () float64 summed loss, number of ranks that were asked to stop, summed
    loss of multi-token prediction, number of heads with scores above optim.qk_clip; (K,) summed metrics of the
    objective; routing and fp8 as in StepResult."""

    loss: Tensor
    stop: Tensor
    mtp_loss: Tensor
    clipped_heads: Tensor
    metrics: Tensor
    routing: Tensor | None = None
    fp8: Tensor | None = None


def reduce_step_totals(model: Model, stop: bool = False, clipped_heads: Tensor | None = None) -> StepTotals:
    """One sum over all ranks. The last stage's ranks with tp 0 know the loss of their tokens; each rank has counted its
    own tokens' routing.

    Each of the ranks with tokens of their own has a separate slot for its loss. Slots are added up in a fixed order, so
    losses do not depend on dp.
    """
    config, device = model.plan.run.model, model.mesh.device
    layers, width = (
        config.num_hidden_layers + config.predict_layers,
        config.routed_experts + len(TALLIED) if config.routed_experts else 0,
    )
    lost = torch.zeros(0, dtype=torch.float64, device=device) if model.fp8 is None else model.fp8.totals()
    sizes = (1, 1, 1, model.mesh.data.size, layers * width, lost.numel(), len(model.metrics))
    totals = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    stops, mtp_loss, clipped, losses, routing, fp8, metrics = totals.split(sizes)
    stops.fill_(float(stop))
    if clipped_heads is not None:
        clipped.copy_(clipped_heads)
    fp8.copy_(lost.flatten())
    routing = routing.view(layers, width)
    if model.mesh.at.tp == 0:
        mtp_loss += sum(block.tally for block in model.mtp)  # type: ignore[misc]
        losses[model.mesh.data.index].copy_(model.stages.loss_sum)
        for head in model.heads:
            metrics += head.tally
    for layer in model.routed:
        routing[layer.layer] = layer.tally  # type: ignore[assignment]
        layer.tally.zero_()  # type: ignore[union-attr]
    model.mesh.world.all_reduce(totals).wait()
    loss = pairwise_sum(pairwise_sum(losses.view(-1, model.mesh.grid.cp)))
    of_fp8 = None if model.fp8 is None else fp8.view(lost.shape)
    return StepTotals(loss, stops[0], mtp_loss[0], clipped[0], metrics, routing if width else None, of_fp8)


@torch.no_grad()
def evaluate_step(model: Model, batches: Sequence[Batch]) -> Tensor:
    """(2 + K,) float64 over all data-parallel ranks of forward-only micro-batches: summed loss, its divisor (tokens),
    and the sums of the objective's metrics."""
    model.train(False)
    tokens = count_tokens(model, batches)
    batches = beforehand(model, batches)
    zero_metrics(model)
    if model.fp8 is not None:
        model.fp8.begin()
    model.stages.begin(batches, seed=None)
    execute(model.program(len(batches), backward=False), model.handlers)
    model.stages.end()
    model.train(True)
    totals = reduce_step_totals(model)
    if model.fp8 is not None:
        model.fp8.amax.zero_()  # evaluations are not part of the history
    return torch.cat((torch.stack((totals.loss, tokens)), totals.metrics))
