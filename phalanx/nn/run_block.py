"""Runs one block so that only those activations are stored that the plan says (nn.recompute, nn.offload)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from phalanx.nn.module import Block
from phalanx.nn.offload import OffloadedActivations
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import HIDDEN, Streams, hidden


def run_block(
    block: Block, x: Tensor | Streams, batch: Batch, offloaded: OffloadedActivations | None = None
) -> Tensor | Streams:
    """block(x, batch). In training, the ops named in `block.recomputed` run again in backward. Everything else that the
    block saves goes to `offloaded`, if the block's activations are offloaded."""
    if block.is_idle(batch) and not block.takes_streams:
        return x
    if not block.takes_streams and not isinstance(x, Tensor):
        return x | {HIDDEN: hidden(run_block(block, x[HIDDEN], batch, offloaded))}
    recompute, recomputed = block.env.recompute, block.recomputed if block.training else frozenset()
    with recompute.of(batch), recompute.block(recomputed, offloaded if block.offloaded else None):
        if block.takes_streams:
            return _with_streams(block, {HIDDEN: x} if isinstance(x, Tensor) else x, batch)
        if not block.recomputable:
            return block(x, batch)
        return recompute.whole(partial(block, batch=batch), hidden(x))


def _with_streams(block: Block, streams: Streams, batch: Batch) -> Tensor | Streams:
    """`run_block` for a block that takes all streams."""
    if not block.recomputable:
        return block(streams, batch)
    names: list[str] = []

    def make(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = block(dict(zip(streams, tensors, strict=True)), batch)
        if isinstance(made, Tensor):
            return made
        names[:] = made
        return tuple(made.values())

    made = block.env.recompute.whole(make, *streams.values())
    return made if isinstance(made, Tensor) else dict(zip(names, made, strict=True))
