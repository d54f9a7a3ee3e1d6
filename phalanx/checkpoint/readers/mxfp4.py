"""MXFP4 weights of a Hugging Face folder (gpt-oss as published): reads any box as plain numbers.

A tensor NAME of shape (E, C, R) is stored as NAME_blocks, uint8 (E, R, C / 32, 16), two values a byte (the lower four
bits first), and NAME_scales, uint8 (E, R, C / 32): 32 values along C share the factor 2^(scale - 127). Open Compute
Project, "OCP microscaling formats (MX) specification", 2023, sections 5.3.3 and 5.4.1: values are E2M1, and the scale
255 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.tensors import Index, Open, Stored, StoredBox
from phalanx.layout.box import Box

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
BLOCK = 32  # values that share a scale
BIAS, NAN = 127, 255
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class PackedBox(StoredBox):
    """The blocks of a tensor are `key` in `file`; its scales may be in another file."""

    scales_file: str
    scales_key: str

    def read(self, files: Open, where: tuple[slice, ...]) -> Tensor:
        """A box of the tensor, in fp32, which represents every value of the format. Reads only the blocks that the box
        touches."""
        experts, columns, rows = where
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        box = (experts, rows, slice(first, last))
        blocks, scales = files(self.file).read(self.key, box), files(self.scales_file).read(self.scales_key, box)
        if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
            raise CheckpointError(
                f"{self.key} and {self.scales_key} are of {blocks.dtype} and {scales.dtype}, MXFP4 is of torch.uint8"
            )
        if (scales == NAN).any():
            raise DamagedCheckpoint(f"{self.scales_key} holds a scale of {NAN}, which stands for NaN")
        return unpacked(blocks, scales).mT[:, columns.start - first * BLOCK : columns.stop - first * BLOCK]


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks (..., G, 16) and scales (..., G), uint8 -> (..., G * 32) fp32."""
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    return torch.ldexp(table[halves], scales.int().unsqueeze(-1) - BIAS).flatten(-2)


def with_packed(index: Index, where: str) -> Index:
    """The index with one tensor NAME for each pair of NAME_blocks and NAME_scales; CheckpointError names all pairs
    that do not fit."""
    names = [n.removesuffix(BLOCKS) for n in index if n.endswith(BLOCKS) and n.removesuffix(BLOCKS) + SCALES in index]
    found = {n: s for n, s in index.items() if n.removesuffix(BLOCKS).removesuffix(SCALES) not in names or n in names}
    odd = []
    for name in names:
        blocks, scales = index[name + BLOCKS], index[name + SCALES]
        if (
            len(blocks.shape) != 4
            or blocks.shape[-1] != BLOCK // 2
            or blocks.shape[:-1] != scales.shape
            or name in index
        ):
            odd.append(f"{name}{BLOCKS} {blocks.shape} and {name}{SCALES} {scales.shape}")
            continue
        experts, rows, groups, _ = blocks.shape
        shape = (experts, groups * BLOCK, rows)
        part = PackedBox(
            blocks.parts[0].file, blocks.parts[0].key, Box.full(shape), scales.parts[0].file, scales.parts[0].key
        )
        found[name] = Stored(shape, [part])
    if odd:
        raise CheckpointError(f"{where}: not MXFP4 (blocks (E, R, G, 16) with scales (E, R, G)):\n" + "\n".join(odd))
    return found
