"""Runs a block, and stores of its activations what the plan says (nn.recompute does the storing)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from phalanx.nn.module import Block
from phalanx.nn.offload import Held
from phalanx.sequence.batch import Batch


def run_block(block: Block, x: Tensor, batch: Batch, held: Held | None = None) -> Tensor:
    """block(x, batch), of which the ops named in `block.again` are made again in backward; `held` is given what else
    it saves, if the block is one whose activations wait on the host."""
    recompute = block.env.recompute
    with recompute.block(block.recomputed if block.training else frozenset(), held if block.offloaded else None):
        if not block.recomputable:
            return block(x, batch)
        return recompute.whole(partial(block, batch=batch), x)
