"""Frozen base weights as quantized values: encoded once, while they are loaded, and decoded whenever a segment fetches
them. The formats are in ops/quantized/base_formats.py.

Encoding is plain PyTorch, a slice of rows at a time, on the device that has the weight. Decoding is an op: one call for
all matrices of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.align import BYTES, room
from phalanx.base.dataclass import dataclass
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.optimizer.blockwise import midpoints
from phalanx.ops.quantized.base_formats import FORMATS, ROW, BaseFormat, EncodedBox, MatrixBox, scale_table, table
from phalanx.ops.quantized.recipes import E4M3, block_amax, cast, spread

AT_ONCE = 1 << 22  # values that are encoded or decoded together: what is in fp32 for it stays small


class NotFinite(ValueError):
    """A weight holds Inf or NaN, which no block with a scale can store."""


# ---- encoding


def encode(x: Tensor, encoded: EncodedBox) -> Tensor:
    """(nbytes,) uint8 of a box of a matrix, from the values x of `encoded.source`, in any float dtype and memory
    layout. float64 is rounded to fp32 first. NotFinite if a block that is stored holds Inf or NaN."""
    format, box, source = encoded.format, encoded.box, encoded.source
    out = torch.zeros(encoded.nbytes, dtype=torch.uint8, device=x.device)
    largest = torch.cat([block_amax(rows.float(), format.block) for _, rows in _slices(x, format.block[0])])
    if not bool(largest.isfinite().all()):
        raise NotFinite("Inf or NaN")
    scales = (largest / largest.new_full((), format.top)).to(format.scale)
    (top, left), (down, across) = encoded.first_block, encoded.blocks
    at = source.start[0] // format.block[0], source.start[1] // format.block[1]
    mine = slice(top - at[0], top - at[0] + down), slice(left - at[1], left - at[1] + across)
    if format.double:
        numbers, groups, offset = quantize_scales(scales, format.double)
        kept = torch.cat((groups[encoded.groups.start : encoded.groups.stop], offset.view(1))).view(torch.uint8)
        _put(out, encoded.scales_at, numbers[mine].contiguous())
        _put(out, encoded.groups_at, kept)
    else:
        _put(out, encoded.scales_at, scales[mine].contiguous().view(torch.uint8))
    first, stop = box.start[0] - source.start[0], box.stop[0] - source.start[0]
    columns = slice(box.start[1] - source.start[1], box.stop[1] - source.start[1])
    stored = out[: box.size[0] * encoded.row_bytes].view(box.size[0], encoded.row_bytes)
    for start, rows in _slices(x, format.block[0]):
        a, b = max(first, start), min(stop, start + len(rows))
        if a < b:
            of_rows = scales[start // format.block[0] : -(-(start + len(rows)) // format.block[0])].float()
            wide = spread(of_rows, format.block, (len(rows), x.shape[1]))
            numbers = quantize_values(rows.float(), wide, format)[a - start : b - start, columns]
            stored[a - first : b - first] = pack(numbers, format)
    return out


def _slices(x: Tensor, unit: int) -> Iterator[tuple[int, Tensor]]:
    """Slices of rows of about AT_ONCE values, each beginning at a multiple of `unit`, with the number of its first."""
    count = room(max(1, AT_ONCE // x.shape[1]), unit)
    yield from ((start, x[start : start + count]) for start in range(0, len(x), count))


def _put(out: Tensor, at: int, part: Tensor) -> None:
    flat = part.flatten()
    out[at : at + len(flat)] = flat


def quantize_values(x: Tensor, scales: Tensor, format: BaseFormat) -> Tensor:
    """The numbers, uint8, of the values of the table that are nearest to x / scales. A block of zeros has a scale of
    zero, and its values are zeros."""
    if format.kind == "e4m3":
        return cast(torch.where(scales > 0, x / scales, 0.0), E4M3).view(torch.uint8)
    relative = x * torch.where(scales > 0, 1.0 / scales, 0.0)
    if format.kind == "integers":
        half = 1 << (format.bits - 1)
        return (relative.round().clamp(-half, half - 1) + half).to(torch.uint8)
    values = table(format, x.device)
    return torch.bucketize(relative, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def quantize_scales(scales: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Double quantization: numbers of scale_table shaped like `scales`, uint8; the largest difference to the offset in
    each group of so many neighbours, along rows; and the offset (), the mean of all."""
    offset = scales.mean()
    rest = (scales - offset).flatten()
    padded = F.pad(rest, (0, -len(rest) % group)).view(-1, group)
    largest = padded.abs().amax(1)
    relative = torch.where(largest > 0, padded.T / largest, 0.0).T.contiguous()
    numbers = torch.bucketize(relative, midpoints(True, scales.device), out_int32=True).to(torch.uint8)
    return numbers.flatten()[: len(rest)].view(scales.shape), largest, offset


def pack(numbers: Tensor, format: BaseFormat) -> Tensor:
    """(R, bytes of a row) of numbers (R, C): two of 4 bits in a byte, the first in its high half."""
    padded = F.pad(numbers, (0, -numbers.shape[1] % ROW))
    return padded if format.bits == 8 else padded[:, ::2] << 4 | padded[:, 1::2]


def unpack(stored: Tensor, format: BaseFormat, columns: int) -> Tensor:
    """The inverse of `pack`."""
    both = stored if format.bits == 8 else torch.stack((stored >> 4, stored & 15), -1).flatten(1)
    return both[:, :columns]


# ---- decoding


@dataclass(frozen=True)
class EncodedMatrix:
    """An encoded box among others: `at`, its first byte; and where its values go in the flat output: number of the
    first element, strides of rows and columns."""

    encoded: EncodedBox
    at: int
    offset: int
    stride: tuple[int, int]


@dataclass(frozen=True)
class EncodedMatrices:
    """What is decoded in one call: matrices of one format. `made`: what an implementation keeps for these, by name and
    device."""

    format: BaseFormat
    matrices: tuple[EncodedMatrix, ...]
    made: dict[tuple[str, torch.device], tuple[Tensor, ...]] = field(default_factory=dict, compare=False, repr=False)


def decode_(out: Tensor, stored: Tensor, what: EncodedMatrices) -> None:
    """Write the values of `what`, whose bytes are `stored`, into the flat `out`, rounded to its dtype once. Elements in
    no matrix are left as they are."""
    for m in what.matrices:
        view = out.as_strided(m.encoded.box.size, m.stride, out.storage_offset() + m.offset)
        for start, rows in _slices(view, m.encoded.format.block[0]):
            rows.copy_(decoded(stored[m.at : m.at + m.encoded.nbytes], m.encoded, start, start + len(rows), out.dtype))


def stored_values(weight: Tensor, format: str) -> Tensor:
    """The values that a whole weight (..., rows, columns) stands for once it is stored in a format, in its dtype."""
    found, shape = torch.empty_like(weight, memory_format=torch.contiguous_format), weight.shape[-2:]
    encoded = EncodedBox(FORMATS[format], MatrixBox.whole((shape[0], shape[1])))
    what = EncodedMatrices(FORMATS[format], (EncodedMatrix(encoded, 0, 0, (shape[1], 1)),))
    for matrix, out in zip(weight.reshape(-1, *shape), found.view(-1, *shape)):
        decode_(out, encode(matrix, encoded), what)
    return found


def decoded(stored: Tensor, encoded: EncodedBox, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows start..stop of an encoded box, in fp32; for float64, in that."""
    format, box = encoded.format, encoded.box
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = stored[start * encoded.row_bytes : stop * encoded.row_bytes].view(-1, encoded.row_bytes)
    numbers = unpack(rows, format, box.size[1])
    scales = scales_of(stored, encoded).to(wide)
    high = (torch.arange(box.start[0] + start, box.start[0] + stop) // format.block[0] - encoded.first_block[0]).to(
        stored.device
    )
    across = (torch.arange(box.start[1], box.stop[1]) // format.block[1] - encoded.first_block[1]).to(stored.device)
    return table(format, stored.device).to(wide)[numbers.int()] * scales[high][:, across]


def scales_of(stored: Tensor, encoded: EncodedBox) -> Tensor:
    """(blocks down, across) fp32 of an encoded box."""
    format, count = encoded.format, encoded.blocks[0] * encoded.blocks[1]
    if not format.double:
        part = stored[encoded.scales_at : encoded.scales_at + count * format.scale.itemsize]
        return part.view(format.scale).float().view(encoded.blocks)
    (top, left), (down, across) = encoded.first_block, encoded.blocks
    numbers = stored[encoded.scales_at : encoded.scales_at + count].int()
    end = encoded.groups_at + 4 * (len(encoded.groups) + 1)
    *_, offset = groups = stored[encoded.groups_at : end].view(torch.float32)
    block = (torch.arange(top, top + down) * encoded.blocks_across)[:, None] + torch.arange(left, left + across)
    group = (block.flatten() // format.double - encoded.groups.start).to(stored.device)
    return (scale_table(stored.device)[numbers] * groups[group] + offset).view(encoded.blocks)


def laid_out(encoded: Sequence[EncodedBox]) -> tuple[list[int], int]:
    """Where each of these begins if they follow each other, and the number of bytes of all."""
    at = [0]
    for each in encoded:
        at.append(at[-1] + room(each.nbytes, BYTES))
    return at[:-1], at[-1]


# ---- the op


def _case(name: str, boxes: Sequence[MatrixBox], transposed: bool = False, large: bool = False) -> Case:
    """Boxes of one matrix, encoded, and decoded in one call; some elements of the output belong to no box."""
    format, (rows, columns) = FORMATS[name], boxes[0].shape
    aligned = not any(n % ROW for box in boxes for n in (*box.start, *box.stop))

    def call(x: Tensor, kernels: Kernels) -> Tensor:
        given = x.detach().cpu()  # what is compared is decoding: the mean of scales has other last bits on a GPU
        encoded = [EncodedBox(format, box) for box in boxes]
        at, total = laid_out(encoded)
        stored = torch.zeros(total, dtype=torch.uint8)
        matrices, offset = [], 0 if aligned else 5
        for each, first in zip(encoded, at):
            source, (high, wide) = each.source, each.box.size
            box = given[source.start[0] : source.stop[0], source.start[1] : source.stop[1]]
            stored[first : first + each.nbytes] = encode(box, each)
            matrices.append(EncodedMatrix(each, first, offset, (1, high) if transposed else (wide, 1)))
            offset += high * wide + (0 if aligned else 3)
        out = torch.ones(offset, dtype=x.dtype, device=x.device)
        BASE_DECODE.choose(kernels, out).decode_(out, stored.to(x.device), EncodedMatrices(format, tuple(matrices)))
        return (out,)  # type: ignore[return-value]

    size = f"{len(boxes)} box{'es' * (len(boxes) > 1)} of {rows} x {columns}{', transposed' * transposed}"
    dtypes = (torch.bfloat16,) if large else (torch.float16, torch.float64)  # interpreted, casts to bf16 cut bits off
    return Case(f"{name}, {size}", call, ((rows, columns),), dtypes=dtypes, large=large, exact=True)


def _cases(name: str) -> tuple[Case, ...]:
    whole, odd = (70, 320), (37, 203)
    cut = [MatrixBox(whole, (0, 0), (70, 160)), MatrixBox(whole, (0, 160), (70, 320)), MatrixBox.whole(whole)]
    ragged = [MatrixBox(odd, (0, 0), (21, 67)), MatrixBox(odd, (21, 67), (37, 203))]
    return (
        _case(name, cut),
        _case(name, ragged),
        _case(name, [MatrixBox.whole((24, 136))], transposed=True),
        _case(name, [MatrixBox.whole((4096, 14336))], large=True),
    )


BASE_DECODE = Op(
    "base_decode",
    "frozen weights from their quantized values (lora.base)",
    __name__,
    ("decode_",),
    (triton("phalanx.ops.quantized.base_decode_kernel"),),
    cases=tuple(case for name in FORMATS for case in _cases(name)),
)
