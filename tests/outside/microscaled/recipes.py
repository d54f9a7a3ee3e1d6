"""FP8 recipes as a package of somebody else's has them, and values that are none."""

from __future__ import annotations

from phalanx.ops.quantized.recipes import E4M3, E5M2, Recipe

SQUARES = Recipe(E4M3, E5M2, tokens=(1, 32), weight=(32, 32), scale="power of 2", emulated=True)
"""Blocks of 32 as in MXFP8, with gradients in E5M2, and weights in squares, whose transposes have the same scales."""

ALL_E4M3 = Recipe(E4M3, E4M3, tokens=(0, 0), weight=(0, 0), delayed=True, capability=(8, 9))
"""One scale per tensor, from earlier steps, and gradients in E4M3, too."""

NAMES = ("E4M3", "E5M2")
