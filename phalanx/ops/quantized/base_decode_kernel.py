"""Triton kernel of ops.quantized.base_weights: all matrices of a bucket are decoded in one launch.

A program decodes GROUPS groups of ROW neighbouring values of a row: bytes are read, and values written, ROW at a time.
Which matrix and which groups are its own stands in a table on the device, made once for each bucket. Products and sums
are rounded one after the other, as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.align import room
from phalanx.ops.quantized.base_formats import ROW, scale_table, table
from phalanx.ops.quantized.base_weights import EncodedMatrices, EncodedMatrix

GROUPS, WARPS = 256, 4
FIELDS = 16  # numbers of a matrix in the table


@triton.jit
def _decode(
    stored,
    scales,
    groups,
    out,
    values,
    scale_values,
    matrices,
    programs,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
    DOUBLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """stored (bytes,) uint8, and the same memory as scales (in their dtype) and as fp32 `groups`; programs (P, 2)
    int32: of each program, its matrix and its first group. ALIGNED: no group of ROW values lies in two blocks, and each
    is written to neighbouring elements, so that a group is loaded and stored at once."""
    own = tl.program_id(0)
    m = matrices + tl.load(programs + 2 * own).to(tl.int64) * FIELDS
    first = tl.load(programs + 2 * own + 1)
    values_at, scales_at, groups_at, out_at = tl.load(m), tl.load(m + 1), tl.load(m + 2), tl.load(m + 3)
    down, across = tl.load(m + 4), tl.load(m + 5)
    rows, columns = tl.load(m + 6).to(tl.int32), tl.load(m + 7).to(tl.int32)
    values_at = tl.multiple_of(values_at, 16)
    if ALIGNED:
        out_at, down, columns = tl.multiple_of(out_at, ROW), tl.multiple_of(down, ROW), tl.multiple_of(columns, ROW)
    row, column = tl.load(m + 8).to(tl.int32), tl.load(m + 9).to(tl.int32)
    top, left = tl.load(m + 10).to(tl.int32), tl.load(m + 11).to(tl.int32)
    blocks, all_blocks = tl.load(m + 12).to(tl.int32), tl.load(m + 13)
    group, offset_at = tl.load(m + 14), tl.load(m + 15)

    per_row = (columns + ROW - 1) // ROW
    g = first + tl.arange(0, GROUPS)
    there = g < rows * per_row
    r = g // per_row
    c = ((g - r * per_row) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    mask = there[:, None] & (c < columns)

    at = values_at + g.to(tl.int64)[:, None] * (ROW * BITS // 8)
    if BITS == 4:
        both = tl.load(stored + at + tl.arange(0, ROW // 2)[None, :], mask=there[:, None], other=0)
        numbers = tl.reshape(tl.join(both >> 4, both & 15), (GROUPS, ROW))
    else:
        numbers = tl.load(stored + at + tl.arange(0, ROW)[None, :], mask=there[:, None], other=0)
    v = tl.load(values + numbers.to(tl.int32))

    high = (row + r) // HIGH - top
    if ALIGNED:
        wide = (column + (g - r * per_row) * ROW) // WIDE_BLOCK - left
        s = _scales(
            high,
            wide,
            there,
            scales,
            groups,
            scale_values,
            scales_at,
            groups_at,
            blocks,
            all_blocks,
            top,
            left,
            group,
            offset_at,
            DOUBLE,
        )[:, None]
    else:
        wide = (column + c) // WIDE_BLOCK - left
        s = _scales(
            high[:, None],
            wide,
            mask,
            scales,
            groups,
            scale_values,
            scales_at,
            groups_at,
            blocks,
            all_blocks,
            top,
            left,
            group,
            offset_at,
            DOUBLE,
        )
    y = (v.to(WIDE) * s.to(WIDE)).to(out.dtype.element_ty)
    row_at = out_at + r.to(tl.int64)[:, None] * down
    if ALIGNED:
        tl.store(out + row_at + c, y, mask=there[:, None])
    else:
        tl.store(out + row_at + c.to(tl.int64) * across, y, mask=mask)


@triton.jit
def _scales(
    high,
    wide,
    mask,
    scales,
    groups,
    scale_values,
    scales_at,
    groups_at,
    blocks,
    all_blocks,
    top,
    left,
    group,
    offset_at,
    DOUBLE: tl.constexpr,
):
    """fp32: the scales of blocks (high, wide) of a box."""
    s = tl.load(scales + scales_at + high * blocks + wide, mask=mask, other=0)
    if DOUBLE:
        number = (high + top).to(tl.int64) * all_blocks + wide + left
        of_group = tl.load(groups + groups_at + number // DOUBLE - group, mask=mask, other=0.0)
        return tl.load(scale_values + s.to(tl.int32)) * of_group + tl.load(groups + offset_at)
    else:
        return s.to(tl.float32)


def decode_(out: Tensor, stored: Tensor, what: EncodedMatrices) -> None:
    key = ("triton", out.device)
    if key not in what.made:
        what.made[key] = _tables(what, out.device)
    matrices, programs = what.made[key]
    format, aligned = what.format, all(map(_aligned, what.matrices))
    scales = stored if format.double else stored.view(format.scale)
    _decode[(len(programs),)](
        stored,
        scales,
        stored.view(torch.float32),
        out,
        table(format, out.device),
        scale_table(out.device),
        matrices,
        programs,
        BITS=format.bits,
        HIGH=format.block[0],
        WIDE_BLOCK=format.block[1],
        DOUBLE=format.double,
        ALIGNED=aligned,
        FIELDS=FIELDS,
        GROUPS=GROUPS,
        ROW=ROW,
        WIDE=tl.float64 if out.dtype == torch.float64 else tl.float32,
        num_warps=WARPS,
        enable_fp_fusion=False,  # the reference rounds a product before it adds
    )


def _tables(what: EncodedMatrices, device: torch.device) -> tuple[Tensor, Tensor]:
    """(matrices, FIELDS) int64; (programs, 2) int32."""
    fields = torch.tensor([_fields(m) for m in what.matrices], dtype=torch.int64)
    counts = [-(-_groups(m) // GROUPS) for m in what.matrices]
    of_program = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    first = torch.cat([torch.arange(count) for count in counts]) * GROUPS
    return fields.to(device), torch.stack((of_program, first), 1).int().to(device)


def _aligned(m: EncodedMatrix) -> bool:
    box, (down, across) = m.encoded.box, m.stride
    return across == 1 and not any(n % ROW for n in (box.start[1], box.size[1], m.offset, down))


def _groups(m: EncodedMatrix) -> int:
    rows, columns = m.encoded.box.size
    return rows * (room(columns, ROW) // ROW)


def _fields(m: EncodedMatrix) -> list[int]:
    """Addresses are in elements of the view by which they are read."""
    e = m.encoded
    each = 1 if e.format.double else e.format.scale.itemsize
    groups_at = (m.at + e.groups_at) // 4
    return [
        m.at,
        (m.at + e.scales_at) // each,
        groups_at,
        m.offset,
        *m.stride,
        *e.box.size,
        *e.box.start,
        *e.first_block,
        e.blocks[1],
        e.blocks_across,
        e.groups.start,
        groups_at + len(e.groups),
    ]
