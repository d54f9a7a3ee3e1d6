"""Adam's moments in 8 bits (optim.moments=fp8): what is kept, how it is rounded, the kernel against the reference
implementation to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.ops.optimizer.moments import BLOCK, MAX, Narrow, rounded

CPU = torch.device("cpu")


def numbers(n: int, seed: int = 0) -> Tensor:
    """Of many sizes, blocks of zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * torch.exp(6 * torch.randn(n // BLOCK, generator=g)).repeat_interleave(BLOCK)
    return torch.where(torch.arange(n) // BLOCK % 7 == 3, 0.0, x)


def stored(x: Tensor, root: bool, step: float | None = 1.0) -> Narrow:
    made = Narrow.zeros(len(x), CPU, root)
    made.store_(x, None if step is None else torch.tensor(step))
    return made


@pytest.mark.parametrize("root", [False, True])
def test_what_was_stored_is_stored_again_to_the_bit(root):
    """By a checkpoint (to the nearest, through bf16) and by a skipped step (at random)."""
    x = numbers(32 * 4000).abs() if root else numbers(32 * 4000)
    made = stored(x, root)
    values = made.wide(torch.float32)
    assert torch.equal(made.wide(torch.bfloat16).float(), values)
    for step in (None, 1.0, 5.0):
        assert torch.equal(stored(made.wide(torch.bfloat16), root, step).wide(torch.float32), values)
    near = (values.sqrt() - x.sqrt()).abs() if root else (values - x).abs()
    largest = (x.sqrt() if root else x).abs().view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)
    assert (near <= largest / 8).all() and (near > 0).any()
    assert not root or (values[x > 0] > 0).all()


def test_rounded_to_one_of_the_neighbours():
    """Truth: torch's codes. Up with as much chance as the number is near."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    share = torch.tensor([0.0, 0.125, 0.25, 0.75])
    size = (codes[:-1, None] + share * codes.diff()[:, None]).flatten()
    ups = torch.zeros(len(size))
    for noise in range(0, 1 << 20, 1 << 14):
        found = rounded(size, torch.full_like(size, noise, dtype=torch.int64)).view(126, 4)
        assert torch.equal(found.to(torch.float8_e4m3fn).float(), found)
        up = found == codes[1:, None]
        assert (up | (found == codes[:-1, None])).all()
        ups += up.flatten()
    assert (
        torch.equal(ups.view(126, 4), (64 * share).expand(126, 4))
        and rounded(torch.tensor([600.0]), torch.tensor([0])) == MAX
    )


@pytest.mark.parametrize("root", [False, True])
def test_right_on_average(root):
    """Over steps. Of small numbers the second moment is kept larger: it never becomes zero."""
    x = torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.2
    mean = torch.stack(
        [(v.sqrt() if root else v) for s in range(1000) for v in [stored(x, root, float(s)).wide(torch.float32)]]
    ).mean(0)
    torch.testing.assert_close(
        mean, x.sqrt() if root else x, rtol=0, atol=0.01
    )  # codes 0.125 apart, 1000 of them: 5 deviations


def parts(seed: int) -> list[AdamRange]:
    """Of gradients with which all sums and products of the step are exact."""
    g = torch.Generator().manual_seed(seed)
    master, grad = torch.randn(1120, generator=g), torch.randint(-8, 9, (1120,), generator=g).float()
    return [AdamRange(master, grad, Narrow.zeros(1120, CPU, False), Narrow.zeros(1120, CPU, True), torch.zeros(1120))]


@pytest.mark.parametrize("twin", ["triton", "plain"])
def test_update_is_that_of_the_slow_twin(twin):
    """Every code and exponent; a skipped step changes nothing."""
    options = AdamOptions(0.01, 0.5, 0.5, 1e-8, 0.1)
    found, slow = parts(0), parts(0)
    for number in (1.0, 2.0):
        for made, update in ((found, lambda *a: adamw_(*a, kernels=twin)), (slow, adamw_reference_)):
            made[0].grad.copy_(parts(int(number))[0].grad)
            update(made, torch.tensor(number), options, torch.tensor(1.0), torch.tensor(0.0))
        for name in ("m", "v"):
            a, b = getattr(found[0], name), getattr(slow[0], name)
            assert torch.equal(a.exponents, b.exponents)
            difference = (a.quantized.view(torch.uint8).int() - b.quantized.view(torch.uint8).int()).abs()
            if number == 1.0:
                assert not difference.any()
            # squares of roots are rounded, by each twin in its way, and the last bit of the sum decides what is rounded
            # up
            else:
                assert difference.max() <= 1 and (difference > 0).float().mean() < 0.1
        torch.testing.assert_close(found[0].master, slow[0].master, rtol=1e-5, atol=1e-5 if number == 1.0 else 1e-3)
        assert not found[0].grad.any() and found[0].m.quantized.float().any()
    before = [t.clone() for t in (found[0].master, found[0].m.wide(torch.float32), found[0].v.wide(torch.float32))]
    found[0].grad.fill_(3.0)
    adamw_(found, torch.tensor(2.0), options, torch.tensor(1.0), torch.tensor(1.0), kernels=twin)
    after = (found[0].master, found[0].m.wide(torch.float32), found[0].v.wide(torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and not found[0].grad.any()


def test_runs_begin_where_blocks_do():
    made = Narrow.zeros(128, CPU, False)
    assert len(made[32:96].exponents) == 2
    with pytest.raises(ValueError, match=r"optim\.lr_scale .*at element 40"):
        made[0:40]
    with pytest.raises(ValueError, match="whole blocks"):
        Narrow.zeros(33, CPU, False)
