"""Sums in one binary tree, element by element: their bits depend on the terms and their order alone, not on shapes, on
threads or on what is summed beside them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def sum_in_order(x: Tensor) -> Tensor:
    """The sum over the last dim. Zeros behind the terms do not change it, so that sums of different lengths whose
    further terms are zero have equal bits."""
    length = x.shape[-1]
    x = F.pad(x, (0, (1 << length.bit_length()) - length))  # at least one zero: a sum of -0.0 is +0.0 at every length
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first dim, whose length is a power of two: each half is a subtree, which another rank may have
    added up."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]
