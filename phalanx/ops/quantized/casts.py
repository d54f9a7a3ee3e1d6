"""What the kernels that cast to FP8 take and allocate, of matrices (quantize_kernel.py) and of rows sorted by expert
(quantize_grouped_kernel.py); and the same casts without data, of which a forecast counts the memory.

Values are cast from where they lie, tile by tile: beside its outputs a kernel needs no memory that grows with them. The
definitions in plain PyTorch (recipes.py, expert_quantizer.py) widen whole tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.activation import Gated, GatedGrad, GatedRows, GatedRowsGrad
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import RopeGrad
from phalanx.ops.quantized.recipes import Scaled

if TYPE_CHECKING:
    from phalanx.ops.experts.permute import Gathered
    from phalanx.ops.quantized.recipes import Format

    RowsSource = Tensor | Gathered | GatedRows  # and GatedRowsGrad

MatrixSource = Tensor | Gated | GatedGrad | Normed | RopeGrad
TILE = 128
# Which elements share a scale: the tensor (its amax, or a given number), lines, 1 x 128 (128 x 1), 128 x 128. The last
# two only find amaxes, of the whole tensor and of lines
WHOLE, GIVEN, LINES, BLOCKS, SQUARES, LARGEST, LARGEST_LINES = range(7)


@dataclass(frozen=True)
class CastSpec:
    """What a cast is to do.

    mode           which elements share a scale, one of the above
    first, second  bits of amaxes (int32) as `mode` requires. Of matrices: WHOLE the tensor's, GIVEN the multiplier
                   (fp32), LINES those of rows and of columns. Of rows: WHOLE those of all rows or (E, 1) of each
                   expert's, LINES those of rows (R,) and of features (E, C)
    counts         (SLOTS, COUNTS) int64 in which amax and losses are recorded, for large tensors the losses of some
                   tiles
    """

    format: Format
    mode: int
    first: Tensor | None = None
    second: Tensor | None = None
    counts: Tensor | None = None

    def per_expert(self, count: int) -> bool:
        """Whether each of so many experts has a scale of its own: if an amax of each is given."""
        return self.mode == WHOLE and self.first is not None and self.first.numel() == count and count > 1


def matrix_fits(x: MatrixSource, block: tuple[int, int]) -> bool:
    """Whether x can be quantized by the kernel that computes it: no tile, and no block of columns, spans gate and up or
    two heads, and all of a head is rotated, feature i with i + half."""
    if isinstance(x, GatedGrad):
        return block[1] < 2 or x.dy.shape[1] % block[1] == 0
    if isinstance(x, RopeGrad):
        width = x.dq.shape[-1]
        if x.table is not None and (x.table.interleaved or 2 * x.table.pairs != width):
            return False
        return width >= 16 and width & (width - 1) == 0 and (block[1] < 2 or width == block[1])
    return True


def rows_fit(x: RowsSource, block: tuple[int, int]) -> bool:
    """The same of rows: gate and up of a feature are not interleaved, and no block of columns holds both."""
    whole = not isinstance(x, GatedRowsGrad) or block[1] < 2 or x.inner % block[1] == 0
    return whole and not (isinstance(x, GatedRows) and x.gate.interleaved)


def matrix_amax(x: MatrixSource) -> Tensor:
    """Zeros for the bits of the largest |x|, (1,) int32."""
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def matrix_amaxes(x: MatrixSource) -> tuple[Tensor, Tensor]:
    """Zeros for those of each row (R,) and each column (C,), int32."""
    of_rows, of_columns = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device).split(tuple(x.shape))
    return of_rows, of_columns


def rows_amax(x: RowsSource, ends: Tensor, per_expert: bool) -> Tensor:
    """Zeros for the bits of the largest |x| over all rows (R, C), (1, 1), or over each expert's, (E, 1); int32."""
    return torch.zeros(len(ends) if per_expert else 1, 1, dtype=torch.int32, device=x.device)


def rows_amaxes(x: RowsSource, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros for those of each row (R,) and of each feature over each expert's rows (E, C); int32."""
    (rows, columns), count = x.shape, len(ends)
    both = torch.zeros(rows + count * columns, dtype=torch.int32, device=x.device)
    of_rows, of_columns = both.split((rows, count * columns))
    return of_rows, of_columns.view(count, columns)


@dataclass(frozen=True)
class CastMatrix:
    """Where a kernel writes the cast of a matrix (R, C).

    out, other              quantized values, and those with scales for sums along rows: (C, R) if `turn`; None: the
                            same
    row_scales, col_scales  flat, in the order of quantize_kernel._write
    """

    out: Tensor
    other: Tensor | None
    row_scales: Tensor
    col_scales: Tensor
    mode: int
    turn: bool

    @staticmethod
    def of(x: MatrixSource, cast: CastSpec, turn: bool, into: tuple[Scaled, Scaled] | None) -> CastMatrix:
        """New memory; that of quantized values is taken from `into`, if given."""
        (rows, columns), mode, dtype = x.shape, cast.mode, cast.format.dtype
        if turn and rows % 4:
            raise ValueError(f"{rows} rows: the transposed matrix is written in words of four quantized values")
        down, across = -(-rows // TILE), -(-columns // TILE)
        wanted = turn or mode not in (WHOLE, GIVEN, SQUARES)
        other = None
        if into is not None:
            out, other = into[0].quantized, into[1].quantized if wanted else None
        else:
            out = torch.empty(rows, columns, dtype=dtype, device=x.device)
            if wanted:
                other = torch.empty((columns, rows) if turn else (rows, columns), dtype=dtype, device=x.device)
        sizes = {LINES: (rows, columns), BLOCKS: (across * rows, down * columns), SQUARES: (down * across, 1)}
        row_scales, col_scales = (torch.empty(n, device=x.device) for n in sizes.get(mode, (1, 1)))
        return CastMatrix(out, other, row_scales, col_scales, mode, turn)

    def scaled(self, into: tuple[Scaled, Scaled] | None) -> tuple[Scaled, Scaled]:
        """What was written; with `into`, whose scales are overwritten, that."""
        if into is not None:
            self._copy_scales(into)
            return into
        (rows, columns), other = self.out.shape, self.other
        if self.mode in (WHOLE, GIVEN):
            q = Scaled(self.out, self.row_scales.view(1, 1), (0, 0))
            return q, q if other is None else Scaled(other, q.scales, (0, 0))
        if self.mode == SQUARES:
            q = Scaled(self.out, self.row_scales.view(-1, -(-columns // TILE)), (TILE, TILE))
            return q, q if other is None else Scaled(other, q.scales.t().contiguous(), (TILE, TILE))
        block = (1, 0) if self.mode == LINES else (1, TILE)
        q = Scaled(self.out, self.row_scales.view(-1, rows).t(), block)
        if other is None:
            return q, q
        by_column = self.col_scales.view(-1, columns)
        return q, Scaled(other, by_column.t(), block) if self.turn else Scaled(other, by_column, block[::-1])

    def _copy_scales(self, into: tuple[Scaled, Scaled]) -> None:
        first, second = (q.scales for q in into)
        if self.mode in (LINES, BLOCKS):
            columns = second.t() if self.turn else second
            first.t().copy_(self.row_scales.view(first.t().shape))
            columns.copy_(self.col_scales.view(columns.shape))
        else:
            first.copy_(self.row_scales.view(first.shape))
            if second is not first and self.mode == SQUARES:
                second.copy_(first.t())


def cast_rows_memory(x: RowsSource, count: int, tiles: int, cast: CastSpec) -> tuple[Scaled, Scaled]:
    """New memory for quantized rows (R, C) of `count` experts in their own order, and transposed by places, (C, tiles *
    TILE), with their scales."""
    (rows, columns), device, mode, dtype = x.shape, x.device, cast.mode, cast.format.dtype
    across = -(-columns // TILE)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    other = torch.empty(columns, tiles * TILE, dtype=dtype, device=device)
    if mode == LINES:
        row_scales, col_scales = torch.empty(rows, 1, device=device), torch.empty(count, columns, device=device)
        return Scaled(out, row_scales, (1, 0)), Scaled(other, col_scales.t(), (1, 0))
    if mode == BLOCKS:
        row_scales, col_scales = torch.empty(across, rows, device=device), torch.empty(tiles, columns, device=device)
        return Scaled(out, row_scales.t(), (1, TILE)), Scaled(other, col_scales.t(), (1, TILE))
    if mode == SQUARES:
        scales, block = torch.empty(tiles, across, device=device), (TILE, TILE)
    else:
        scales, block = torch.empty(count if cast.per_expert(count) else 1, 1, device=device), (0, 0)
    return Scaled(out, scales, block), Scaled(other, scales.t(), block)


class DryMatrices:
    """quantize_kernel.py without data: allocates what it does."""

    takes = staticmethod(matrix_fits)
    amax = staticmethod(matrix_amax)
    amax_lines = staticmethod(matrix_amaxes)

    @staticmethod
    def cast_both(
        x: MatrixSource, cast: CastSpec, turn: bool, into: tuple[Scaled, Scaled] | None = None
    ) -> tuple[Scaled, Scaled]:
        return CastMatrix.of(x, cast, turn, into).scaled(into)

    @staticmethod
    def transposed(quantized: Tensor, out: Tensor | None = None) -> Tensor:
        return quantized.new_empty(quantized.shape[::-1]) if out is None else out


class DryRows:
    """quantize_grouped_kernel.py without data: allocates what it does."""

    takes = staticmethod(rows_fit)

    @staticmethod
    def amax(x: RowsSource, ends: Tensor, tiles: int, per_expert: bool) -> Tensor:
        return rows_amax(x, ends, per_expert)

    @staticmethod
    def amax_lines(x: RowsSource, ends: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
        return rows_amaxes(x, ends)

    @staticmethod
    def cast_both(
        x: RowsSource, ends: Tensor, tiles: int, cast: CastSpec, into: tuple[Scaled, Scaled] | None = None
    ) -> tuple[Scaled, Scaled]:
        return cast_rows_memory(x, len(ends), tiles, cast) if into is None else into
