"""What makes four-bit gradients usable: stochastic rounding, and a transform that spreads outliers over neighbouring
tokens.

NVIDIA, "Pretraining large language models with NVFP4", 2025, section 4. Both are functions of a seed and of the values
alone. Recipes (ops/quantized/recipes.py) say which tensors use them; quantizers (ops/quantized/quantizer.py,
ops/quantized/expert_quantizer.py) apply them.

Random numbers come from a counter (base.rng), and the counter of a block of values is a hash of its contents. Nothing
needs to know which token or feature it is, or how often it was computed, so every layout, expert, recomputed or resumed
step rounds alike. Blocks with different contents get different numbers; a block that recurs in a later step with
identical contents gets the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.rng import MASK, key_of, philox

Key = tuple[int, int]
GRID = 1024.0  # a block's contents are hashed in steps of 1 / GRID, far above what the order of sums changes in float64
FACTORS = (0x01000193, 0x9E3779B1)  # of two polynomials modulo 2**32


def signs_of(seed: int, size: int) -> int:
    """The signs of the transform of `size` values: bit i is set where value i is negated."""
    return key_of(seed, "hadamard")[0] & ((1 << size) - 1)


def mixed(x: Tensor, size: int, signs: int) -> Tensor:
    """x (T, C) -> (T, C) in at least fp32: each group of `size` tokens, a power of two that divides T, is negated by
    `signs` and multiplied by the orthogonal Hadamard matrix (Sylvester's). Sums over tokens of products of two such
    tensors equal those of the original tensors."""
    rows, columns = x.shape
    if rows % size:
        raise ValueError(f"{rows} tokens are no whole blocks of {size}")
    bits = torch.arange(size, device=x.device)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    y = x.to(wide).view(rows // size, size, columns) * (1 - 2 * ((signs >> bits) & 1)).to(wide).unsqueeze(1)
    for _ in range(
        size.bit_length() - 1
    ):  # the highest bit of a token's number becomes the lowest: after all rounds they are back in place
        a, b = y.view(-1, 2, size // 2, columns).unbind(1)
        y = torch.stack((a + b, a - b), 2).view(-1, size, columns)
    return (y * size**-0.5).view(rows, columns)


def noise_for(x: Tensor, block: tuple[int, int], key: Key) -> Tensor:
    """Uniform numbers in [0, 1) for x (R, C), in multiples of 2**-24 and x's dtype. Those of a block, (1, n) or (n, 1)
    with n a multiple of 4, are derived from its contents, |x| < 2**20."""
    along, size = (1, block[1]) if block[0] == 1 else (0, block[0])
    lines = x if along else x.t()
    count, length = lines.shape
    steps = torch.zeros(count, -(-length // size) * size, dtype=torch.int64, device=x.device)
    steps[:, :length] = torch.round(lines.nan_to_num() * GRID)
    hashes = [
        (steps.view(count, -1, size) * _powers(factor, size, x.device) & MASK).sum(-1, keepdim=True) & MASK
        for factor in FACTORS
    ]
    words = philox((*hashes, torch.arange(size // 4, device=x.device), 0), key)
    u = (torch.stack(torch.broadcast_tensors(*words), -1) >> 8).view(count, -1)[:, :length].to(x.dtype) * 2.0**-24
    return u if along else u.t()


def _powers(factor: int, size: int, device: torch.device) -> Tensor:
    """(size,) powers of a factor, starting with the first, modulo 2**32."""
    made = torch.ones(size, dtype=torch.int64, device=device)
    i = torch.arange(1, size + 1, device=device)
    for bit in range(size.bit_length()):
        made = torch.where(((i >> bit) & 1).bool(), made * pow(factor, 1 << bit, 1 << 32) & MASK, made)
    return made
