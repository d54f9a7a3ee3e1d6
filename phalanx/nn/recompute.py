"""Full recompute: a block keeps only its input and runs again in backward."""

from __future__ import annotations

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.base.batch import Batch
from phalanx.nn.module import Block


def run_block(block: Block, x: Tensor, batch: Batch) -> Tensor:
    """block(x, batch), made again in backward when the config says so. Dropout is counter-based: no random state to keep."""
    if block.env.recompute == "full" and block.training and block.recomputable:
        return checkpoint(block, x, batch, use_reentrant=False, preserve_rng_state=False)
    return block(x, batch)
