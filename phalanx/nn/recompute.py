"""Activations that are made again in backward: whole blocks, or what a cheap pointwise op made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from phalanx.base.batch import Batch
from phalanx.nn.env import Env
from phalanx.nn.module import Block


def run_block(block: Block, x: Tensor, batch: Batch) -> Tensor:
    """block(x, batch), made again in backward when the config says so. Dropout is counter-based: no random state to keep."""
    if block.env.recompute == "full" and block.training and block.recomputable:
        return checkpoint(block, x, batch, use_reentrant=False, preserve_rng_state=False)
    return block(x, batch)


def remade(env: Env, x: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """With recompute=pointwise: ops inside that keep `x` for their backward keep `make` instead, which makes it again then."""
    if env.recompute != "pointwise" or not torch.is_grad_enabled():
        return nullcontext()
    storage, shape = x.untyped_storage()._cdata, x.shape

    def pack(kept: Tensor) -> Any:
        return make if kept.untyped_storage()._cdata == storage and kept.shape == shape else kept

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept()

    return saved_tensors_hooks(pack, unpack)
