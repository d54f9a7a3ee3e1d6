"""Block-scaled FP8 weights of a Hugging Face folder (DeepSeek-V3 as published): reads any box as plain numbers.

A matrix NAME of shape (R, C) is stored as NAME, float8 (R, C), and NAME_scale_inv (ceil(R / b), ceil(C / c)): element
(i, j) represents its value times scale [i // b, j // c]. DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section
3.3.2; blocks are 128 x 128 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.tensors import Index, Open, Stored, StoredBox
from phalanx.layout.box import Box

SCALES = "_scale_inv"
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class ScaledBox(StoredBox):
    """A matrix `key` in `file`; its scales may be in another file. `block`: rows and columns that share a scale."""

    scales_file: str
    scales_key: str
    block: tuple[int, int]

    def read(self, files: Open, where: tuple[slice, ...]) -> Tensor:
        """A box of the matrix, in fp32. Reads only the box and the scales of the blocks that it touches."""
        blocks = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(where, self.block))
        values, scales = files(self.file).read(self.key, where), files(self.scales_file).read(self.scales_key, blocks)
        if values.dtype not in FLOAT8 or not scales.is_floating_point():
            raise CheckpointError(
                f"{self.key} and {self.scales_key} are of {values.dtype} and {scales.dtype}, not of float8 and a float"
            )
        return values.float() * spread(scales.float(), where, self.block)


def spread(scales: Tensor, where: tuple[slice, ...], block: tuple[int, int]) -> Tensor:
    """Scales of the blocks that the box `where` touches -> one for each element of the box."""
    for dim, (s, b) in enumerate(zip(where, block)):
        of = torch.arange(s.start, s.stop, device=scales.device) // b - s.start // b
        scales = scales.index_select(dim, of)
    return scales


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, if this config.json belongs to a folder in this format."""
    stated = config.get("quantization_config")
    if (
        not isinstance(stated, dict)
        or stated.get("quant_method") != "fp8"
        or stated.get("fmt", "e4m3") not in ("e4m3", "e5m2")
    ):
        return None
    match stated.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def with_scaled(index: Index, config: Mapping[str, Any], where: str) -> Index:
    """The index with each matrix and its scales as one tensor; CheckpointError names all pairs that do not fit."""
    names = [n.removesuffix(SCALES) for n in index if n.endswith(SCALES) and n.removesuffix(SCALES) in index]
    if not names:
        return index
    block = block_of(config)
    if block is None:
        stated = f"quantization_config={config.get('quantization_config')!r}"
        raise CheckpointError(
            f"{where} has {names[0]}{SCALES}, but its config.json does not tell the block that a scale is of ({stated})"
        )
    found, odd = dict(index), []
    for name in names:
        values, scales = index[name], found.pop(name + SCALES)
        expected = tuple(-(-n // b) for n, b in zip(values.shape, block))
        if len(values.shape) != 2 or scales.shape != expected:
            odd.append(f"{name} {values.shape} with {name}{SCALES} {scales.shape}")
        part, of = values.parts[0], scales.parts[0]
        found[name] = Stored(
            values.shape, [ScaledBox(part.file, part.key, Box.full(values.shape), of.file, of.key, block)]
        )
    if odd:
        raise CheckpointError(f"{where}: not a scale for each block of {block[0]} x {block[1]}:\n" + "\n".join(odd))
    return found
