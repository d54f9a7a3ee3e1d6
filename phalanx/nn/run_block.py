"""Runs one block so that of its activations only what the plan says is stored (nn.recompute, nn.offload)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from phalanx.nn.module import Block
from phalanx.nn.offload import OffloadedActivations
from phalanx.sequence.batch import Batch


def run_block(block: Block, x: Tensor, batch: Batch, offloaded: OffloadedActivations | None = None) -> Tensor:
    """block(x, batch). In training the ops named in `block.recomputed` run again in backward. What else the block
    saves goes to `offloaded` if the block is one whose activations are offloaded."""
    recompute, recomputed = block.env.recompute, block.recomputed if block.training else frozenset()
    with recompute.block(recomputed, offloaded if block.offloaded else None):
        if not block.recomputable:
            return block(x, batch)
        return recompute.whole(partial(block, batch=batch), x)
