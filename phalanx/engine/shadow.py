"""Shadow steps: a step's gradients in train.precision compared with those in FP8, linear by linear.

The reference uses the same batches and the same weights with every matmul in train.precision. Everything it leaves
behind (gradients, counts) is discarded, so the step itself is unaffected. It costs a step's time and one more copy of
the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.engine.build import State


@contextmanager
def aside(state: State) -> Iterator[None]:
    """Inside, gradients are those of a pass that is not the step; they and all its counts are discarded afterwards. No
    CUDA graphs."""
    try:
        with state.model.by_all_to_all():
            yield
    finally:
        for layer in state.model.routed:
            layer.tally.zero_()  # type: ignore[union-attr]
        state.model.forget_scores()
        if state.model.fp8 is not None:
            state.model.fp8.totals()
        state.buffers.zero_grads()


def begin_history(state: State, forward_backward: Callable[[], None]) -> None:
    """Before the first step of delayed scaling: find the amaxes of its tensors by running it with scales of their
    own."""
    if state.model.fp8 is None:
        return
    with state.model.fp8.measuring(), aside(state):
        # as in the step itself: all-to-all weighs elsewhere, so its amaxes are others; rows without room only miss here
        for layer in state.model.routed:
            layer.dispatch = layer.env.ops.dispatch
        forward_backward()
    state.model.fp8.settle(state.mesh.world)


def reference(state: State, forward_backward: Callable[[], None]) -> dict[int, Tensor]:
    """The step's reduced gradients in train.precision: this rank's shard of each bucket that has quantized linears."""
    fp8 = state.model.fp8
    if fp8 is None:
        return {}
    kept = {}
    with aside(state):
        with fp8.without():
            forward_backward()
        for flat in state.buffers.flat:
            if fp8.lows.get(flat.bucket.id):
                kept[flat.bucket.id] = flat.own_grad.clone()
    return kept


def gradient_distance(state: State, kept: dict[int, Tensor] | None) -> Tensor | None:
    """(L, 2) float64, the same on all ranks: cosine between the two gradients of each linear's weight, and |difference|
    / |reference|.

    `kept` as returned by `reference` (empty on a rank without quantized linears, which contributes nothing), or None in
    a step without a shadow. NaN if a linear has no gradient. Shards held by several ranks count several times in both.
    """
    fp8 = state.model.fp8
    if fp8 is None or kept is None:
        return None
    sums = torch.zeros(len(fp8.names), 4, dtype=torch.float64, device=state.mesh.device)
    numbers = {id(p.spec): fp8.names.index(lw.name) for lw, p in fp8.here}
    for flat in (f for f in state.buffers.flat if f.bucket.id in kept):
        lo, hi, own = flat.lo, flat.hi, flat.own_grad
        for slot in flat.bucket.slots:
            found = numbers.get(id(slot.spec))
            a, b = max(slot.offset, lo), min(slot.offset + slot.numel, hi)
            if found is None or a >= b:
                continue
            ours, truth = own[a - lo : b - lo].double(), kept[flat.bucket.id][a - lo : b - lo].double()
            sums[found] += torch.stack((ours @ truth, ours @ ours, truth @ truth, (ours - truth).square().sum()))
    state.mesh.world.all_reduce(sums).wait()
    dot, ours, truth, difference = sums.unbind(1)
    return torch.stack((dot / (ours * truth).sqrt(), (difference / truth).sqrt()), 1)
