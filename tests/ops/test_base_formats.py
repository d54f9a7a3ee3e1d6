"""Formats of lora.base against the papers' formulas, bitsandbytes and torchao, and boxes of a matrix against all of
it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.ops.optimizer.blockwise import dynamic_map
from phalanx.ops.quantized.base_formats import FORMATS, NF4, EncodedBox, MatrixBox, scale_table, table
from phalanx.ops.quantized.base_weights import (
    EncodedMatrices,
    EncodedMatrix,
    NotFinite,
    decode_,
    encode,
    scales_of,
    unpack,
)
from tests.ops.test_ops import normal


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (normal(rows, columns, seed=3, dtype=torch.float32) * 0.02).to(dtype)


def box_of(name: str, rows: int, columns: int) -> EncodedBox:
    return EncodedBox(FORMATS[name], MatrixBox.whole((rows, columns)))


def decoded(stored: Tensor, encoded: EncodedBox, dtype: torch.dtype) -> Tensor:
    high, wide = encoded.box.size
    out = torch.full((high, wide), torch.nan, dtype=dtype)
    decode_(out.view(-1), stored, EncodedMatrices(encoded.format, (EncodedMatrix(encoded, 0, 0, (wide, 1)),)))
    return out


def numbers(stored: Tensor, encoded: EncodedBox) -> Tensor:
    rows = stored[: encoded.box.size[0] * encoded.row_bytes].view(encoded.box.size[0], -1)
    return unpack(rows, encoded.format, encoded.box.size[1]).long()


def test_nf4_is_the_papers():
    """Truth: quantiles of the normal distribution (QLoRA, section 3): seven values below zero and
    eight above, the outermost as far out as its code chooses."""
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (torch.special.ndtri(torch.linspace(outermost, 0.5, n, dtype=torch.float64)) for n in (9, 8))
    values = torch.cat((-below[:-1], above)).sort().values
    found = torch.tensor(NF4, dtype=torch.float64)
    torch.testing.assert_close(found, values / values.abs().amax(), rtol=0, atol=2e-7)


def expected(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """For each element, in float64 and block by block: x over the scale of its block, and the scale that is stored."""
    format, (rows, columns), (high, wide) = FORMATS[name], x.shape, FORMATS[name].block
    blocks = [(slice(r, r + high), slice(c, c + wide)) for r in range(0, rows, high) for c in range(0, columns, wide)]
    scales = torch.stack([x[block].abs().max() / format.top for block in blocks]).to(format.scale).float()
    kept = scales
    if format.double:
        parts, values = (scales - scales.mean()).split(format.double), dynamic_map(True)
        nearest = [values[((p / p.abs().max()).unsqueeze(1) - values).abs().argmin(1)] for p in parts]
        kept = torch.cat([v * p.abs().max() for v, p in zip(nearest, parts)]) + scales.mean()
    relative, stored = torch.zeros(2, *x.shape, dtype=torch.float64)
    for block, scale, of_values in zip(blocks, scales.double(), kept.double()):
        relative[block], stored[block] = x[block].double() / scale, of_values
    return relative, stored


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(20, 192), (5, 70), (130, 136)], ids=str)
def test_values_are_the_nearest(name, shape):
    """Truth: a search through the whole table, block by block. Rows of 70 and 136 end in smaller blocks."""
    x, encoded, values = weights(*shape), box_of(name, *shape), table(FORMATS[name]).double()
    x[0, :3] = 0.0
    stored = encode(x, encoded)
    relative, scales = expected(x, name)
    chosen = values[numbers(stored, encoded)]
    best = (relative.unsqueeze(-1) - values).abs().amin(-1)
    assert ((relative - chosen).abs() <= best + 1e-6 * relative.abs()).all()  # fp32 decides in the middle of two
    torch.testing.assert_close(decoded(stored, encoded, torch.float64), chosen * scales, rtol=1e-15, atol=0)
    assert len(values) == 2 ** FORMATS[name].bits


@pytest.mark.parametrize("name", FORMATS)
def test_a_box_has_the_values_of_the_whole(name):
    """Truth: the whole matrix. Wherever a box is cut, and whatever its size, through blocks too."""
    x, whole = weights(140, 300, torch.bfloat16), box_of(name, 140, 300)
    truth = decoded(encode(x, whole), whole, torch.bfloat16)
    for start, stop in (((0, 0), (70, 300)), ((70, 0), (140, 300)), ((0, 150), (140, 300)), ((33, 65), (139, 201))):
        box = replace(whole, box=MatrixBox((140, 300), start, stop))
        source = box.source
        given = x[source.start[0] : source.stop[0], source.start[1] : source.stop[1]]
        found = decoded(encode(given, box), box, torch.bfloat16)
        assert torch.equal(found, truth[start[0] : stop[0], start[1] : stop[1]]), (start, stop)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_what_is_not_finite_is_refused(name):
    x, encoded = weights(8, 512), box_of(name, 8, 512)
    if FORMATS[name].block[0] == 1:
        x[3] = 0.0
    else:
        x[:, 128:256] = 0.0
    found = decoded(encode(x, encoded), encoded, torch.float32)
    assert not found[x == 0].any() and found[x != 0].any()
    x[2, 5] = torch.inf
    with pytest.raises(NotFinite):
        encode(x, encoded)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_a_weight_are_those_counted(name):
    encoded = box_of(name, 4096, 14336)
    assert 8 * encoded.nbytes / (4096 * 14336) == pytest.approx(FORMATS[name].bits_per_weight, rel=1e-5)


# ---- other people's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nf4_as_bitsandbytes_has_it(dtype):
    """Its bytes decode to its values, bit for bit; ours are the same, but for quantized scales where its CPU search
    does not find the nearest value."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    x, encoded = weights(300, 1024, dtype), box_of("nf4", 300, 1024)
    ours = encode(x, encoded)
    quantized, state = theirs.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    stored = torch.zeros_like(ours)
    groups = torch.cat((state.state2.absmax, state.offset.view(1))).view(torch.uint8)
    for at, part in ((0, quantized), (encoded.scales_at, state.absmax), (encoded.groups_at, groups)):
        stored[at : at + part.numel()] = part.flatten()
    assert torch.equal(decoded(stored, encoded, dtype), theirs.dequantize_4bit(quantized, state))
    assert torch.equal(ours[: encoded.scales_at], stored[: encoded.scales_at])
    assert torch.equal(ours[encoded.groups_at :], stored[encoded.groups_at :])
    mine, other = (s[encoded.scales_at : encoded.groups_at][: 300 * 16].int() for s in (ours, stored))
    assert (mine - other).abs().max() <= 1 and (mine != other).float().mean() < 0.01
    truth = x.abs().view(-1, 64).amax(1).float()
    off, other_off = ((scales_of(s, encoded).flatten() - truth).abs() for s in (ours, stored))
    assert (off <= other_off + 1e-9).all()
    assert torch.equal(state.state2.code, scale_table())


@pytest.mark.parametrize("name, lowest, highest", [("int8", -128, 127), ("int4", -8, 7)])
def test_integers_as_torchao_has_them(name, lowest, highest):
    """Its symmetric quantization, scales in our dtype: the same scales, numbers and values."""
    theirs = pytest.importorskip("torchao.quantization.quant_primitives")
    x, encoded = weights(96, 256), box_of(name, 96, 256)
    block, stored = FORMATS[name].block, encode(x, encoded)
    symmetric, kind = theirs.MappingType.SYMMETRIC, FORMATS[name].scale
    scales, zero = theirs.choose_qparams_affine(
        x, symmetric, block, torch.int8, lowest, highest, scale_dtype=kind, zero_point_dtype=torch.int32
    )
    scales = scales.float()
    quantized = theirs.quantize_affine(x, block, scales, zero, torch.int8, lowest, highest)
    values = theirs.dequantize_affine(
        quantized, block, scales, zero, torch.int8, lowest, highest, output_dtype=torch.float32
    )
    assert torch.equal(scales_of(stored, encoded), scales)
    assert torch.equal(numbers(stored, encoded) + lowest, quantized.long())
    assert torch.equal(decoded(stored, encoded, torch.float32), values)


def test_fp8_as_torchao_has_it():
    theirs = pytest.importorskip("torchao.quantization.quant_primitives")
    x, encoded = weights(256, 384), box_of("fp8", 256, 384)
    stored = encode(x, encoded)
    scales = theirs._choose_scale_float8(x, (128, 128), torch.float8_e4m3fn)
    quantized = theirs._quantize_affine_float8(x, scales, torch.float8_e4m3fn)
    values = theirs._dequantize_affine_float8(quantized, scales, torch.float32)
    assert torch.equal(scales_of(stored, encoded), scales)
    assert torch.equal(stored[: 256 * 384].view(256, 384), quantized.view(torch.uint8))
    assert torch.equal(decoded(stored, encoded, torch.float32), values)
