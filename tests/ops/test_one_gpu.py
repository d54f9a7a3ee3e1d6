"""What lets 8 billion weights train on one GPU: masters that are split (optim.masters=split), and moments in 8 bits by
block-wise dynamic quantization (optim.moments=8bit). Values, kernels against references, and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.ops.optimizer.blockwise import BLOCK, Blockwise, dynamic_map, midpoints
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.packed import PackedTensor

CPU = torch.device("cpu")
OPTIONS = AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1)


# ---- masters


def split_of(x: Tensor) -> SplitMaster:
    made = SplitMaster.of(torch.zeros(len(x), dtype=torch.bfloat16))
    made.store_(x)
    return made


@pytest.mark.parametrize("sign", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_every_master_is_given_back_with_every_bit(sign):
    """All lower halves under every exponent, with upper halves whose last bits are 00, 01, 10 and 11: ties to both
    sides, numbers that round to the next power of two or to infinity, subnormal ones, zeros. The weight is the one that
    torch rounds to."""
    low = torch.arange(1 << 16, dtype=torch.int32)
    for exponent in range(256):
        for last in (0, 1, 2, 0x7F):
            upper = (sign << 15) + (exponent << 7) + last
            x = (low + ((upper - (sign << 16)) << 16)).view(torch.float32)
            made = split_of(x)
            if exponent == 255 and last != 0:
                assert made.wide().isnan().all()
                continue
            number = ~x.isnan()  # of exponent 255 only infinity
            assert torch.equal(made.weights.view(torch.int16)[number], x.bfloat16().view(torch.int16)[number])
            assert torch.equal(made.wide().view(torch.int32)[number], x.view(torch.int32)[number])
            assert made.wide()[~number].isnan().all()


def test_two_ties_meet_at_a_weight_whose_last_bit_is_zero():
    """1 - 2^-9 and 1 + 2^-8 both become 1: the differences of their bits from those of 1 are -2^15 and 2^15."""
    made = split_of(torch.tensor([1 - 2.0**-9, 1 + 2.0**-8, 1.0, -1 - 2.0**-8, 0.0, 0.0, 0.0, 0.0]))
    assert made.weights.abs().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert made.rest.tolist() == [-(1 << 15), -(1 << 15), 0, -(1 << 15), 0, 0, 0, 0] and made.ties.tolist() == [0b1010]


def test_masters_begin_as_the_weights():
    weights = torch.randn(64).bfloat16()
    assert torch.equal(SplitMaster.of(weights).wide(), weights.float())
    with pytest.raises(ValueError, match="whole blocks of 8"):
        SplitMaster.of(weights[:12])


def moment(kind: str, n: int, nonnegative: bool) -> Tensor | PackedTensor:
    if kind == "fp8":
        return Narrow.zeros(n, CPU, nonnegative)
    if kind == "8bit":
        return Blockwise.zeros(n, CPU, not nonnegative)
    return torch.zeros(n, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)


def adam_range(kind: str, n: int, split: bool) -> AdamRange:
    x = torch.randn(n, generator=torch.Generator().manual_seed(7)) * 2.0 ** torch.arange(n).remainder(40).sub(20)
    x[:64].view(torch.int32).bitwise_and_(-(1 << 16)).bitwise_or_(1 << 15)  # ties, which the second step leaves
    m, v = moment(kind, n, False), moment(kind, n, True)
    out = None if split else torch.zeros(n, dtype=torch.bfloat16)
    return AdamRange(split_of(x) if split else x, torch.zeros(n), m, v, out)


def tensors_of(p: AdamRange) -> list[Tensor]:
    found = [p.master.wide(torch.float32) if isinstance(p.master, PackedTensor) else p.master]
    for x in (p.m, p.v):
        found += x.tensors if isinstance(x, PackedTensor) else [x]
    return found


@pytest.mark.parametrize("kind", ["master", "bf16", "fp8", "8bit"])
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_steps_with_split_masters_are_those_with_fp32_ones(kernels, kind):
    """To the bit: masters, moments and weights, over steps in which the gradient is zero for some (ties stay) and one
    that is skipped."""
    n = 2112  # no whole number of the kernels' programs
    whole, split = adam_range(kind, n, False), adam_range(kind, n, True)
    for step in range(1, 5):
        grad = torch.randn(n, generator=torch.Generator().manual_seed(step))
        grad[:64] = 0.0
        options = AdamOptions(0.0 if step == 1 else 0.01, 0.9, 0.95, 1e-8, 0.1)
        for p in (whole, split):
            p.grad.copy_(grad)
            adamw_([p], torch.tensor(float(step)), options, torch.tensor(0.5), torch.tensor(float(step == 3)), kernels)
            assert not p.grad.any()
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(whole), tensors_of(split)))
        assert isinstance(split.master, SplitMaster) and isinstance(whole.master, Tensor)
        assert torch.equal(split.master.weights, whole.master.bfloat16())
        assert split.master.ties.any() or step > 1


# ---- moments in 8 bits


def numbers(n: int, signed: bool, seed: int = 0) -> Tensor:
    """Of many sizes, blocks of zeros and zeros among others."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.exp(6 * torch.randn(n // BLOCK, generator=g)).repeat_interleave(BLOCK)
    x = torch.randn(n, generator=g) * scales
    x = torch.where((torch.arange(n) // BLOCK % 7 == 3) | (torch.arange(n) % 11 == 5), 0.0, x)
    return x if signed else x.square()


def stored(x: Tensor, signed: bool, step: float | None = None) -> Blockwise:
    made = Blockwise.zeros(len(x), CPU, signed)
    assert not made.wide(torch.float32).any()
    made.store_(x, None if step is None else torch.tensor(step))
    return made


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_and_the_same_bits_again(signed):
    """Truth: all 256 values compared. What a checkpoint holds (fp32) gives the same bits, also in a skipped step."""
    x = numbers(64 * 3000, signed)
    made = stored(x, signed)
    values = made.wide(torch.float32)
    for step in (None, 3.0):
        again = stored(values, signed, step)
        assert torch.equal(again.quantized, made.quantized) and torch.equal(again.scales, made.scales)
    blocks, scales = x.view(-1, BLOCK), made.scales.unsqueeze(1)
    assert not values.view(-1, BLOCK)[made.scales == 0].any() and (made.scales == 0).any()
    nearest = (blocks.double().unsqueeze(2) - scales.double().unsqueeze(2) * dynamic_map(signed).double()).abs().amin(2)
    off = (values.double().view(-1, BLOCK) - blocks.double()).abs()
    # a positive number is never stored as zero
    tiny = torch.zeros_like(off) if signed else (blocks > 0) * scales * dynamic_map(False)[1].double()
    assert (off <= torch.maximum(nearest, tiny) + 1e-6 * blocks.abs()).all()
    assert signed or (values > 0).eq(x > 0).all()
    largest = blocks.abs().amax(1)
    kept = values.abs().view(-1, BLOCK).amax(1)
    torch.testing.assert_close(kept, largest, rtol=2**-16, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_ranges_begin_where_blocks_do(signed):
    made = stored(numbers(256, signed), signed)
    whole = made.wide(torch.float32)
    assert torch.equal(made[64:192].wide(torch.float32), whole[64:192])
    first, some = made.around(70, 130)
    assert first == 64 and torch.equal(some, whole[64:192])
    with pytest.raises(ValueError, match=r"moments=8bit .*optim\.lr_scale .*at element 40"):
        made[0:40]
    with pytest.raises(ValueError, match="whole blocks of 64"):
        Blockwise.zeros(96, CPU, signed)


@pytest.mark.parametrize("split", [False, True])
def test_the_kernel_stores_what_the_reference_does(split):
    """Quantized values may differ by one where the last bit of a moment decides between neighbours."""
    made = [adam_range("8bit", 2112, split) for _ in range(2)]
    for step in (1, 2):
        for p, update in zip(made, (lambda *a: adamw_(*a, kernels="triton"), adamw_reference_)):
            p.grad.copy_(torch.randn(2112, generator=torch.Generator().manual_seed(step)))
            update([p], torch.tensor(float(step)), OPTIONS, torch.tensor(1.0), torch.tensor(0.0))
        for name in ("m", "v"):
            a, b = (getattr(p, name) for p in made)
            torch.testing.assert_close(a.scales, b.scales, rtol=2**-15, atol=0)
            difference = (a.quantized.int() - b.quantized.int()).abs()
            assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01
        torch.testing.assert_close(tensors_of(made[0])[0], tensors_of(made[1])[0], rtol=1e-5, atol=1e-3)


def test_the_map_is_that_of_bitsandbytes_and_the_paper():
    """Values and what they stand for; which of them is nearest, by bitsandbytes' own comparison with all."""
    functional = pytest.importorskip("bitsandbytes.functional")
    quantize = pytest.importorskip("bitsandbytes.backends.default.ops")
    del quantize
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed)
        assert torch.equal(theirs, dynamic_map(signed))
        x = numbers(64 * 500, signed)
        made = stored(x, signed)
        back = functional.dequantize_blockwise(made.quantized, absmax=made.scales, code=theirs, blocksize=BLOCK)
        assert torch.equal(back.float(), made.wide(torch.float32))
    assert len(midpoints(True)) == 255
