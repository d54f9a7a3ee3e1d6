"""Lazy tensors: autograd carries them, casts read their source, and nobody else gets values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.norm import Normed
from phalanx.ops.lazy_tensor import LazyTensor, LazyTensorRead, source_of


def normed(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Normed:
    x, scale, weight = (torch.ones(*s, dtype=dtype, device=device) for s in ((16, 32), (16,), (32,)))
    return Normed(x, scale, weight)


READS = {
    "addition": lambda lazy: lazy + 1,
    "matmul": lambda lazy: torch.mm(torch.ones(2, 16, dtype=lazy.dtype), lazy),
    "a view": lambda lazy: lazy.view(-1),
    "a slice": lambda lazy: lazy[:2],
    "a transpose": lambda lazy: lazy.t(),
    "a copy to another tensor": lambda lazy: torch.empty_like(normed().x).copy_(lazy),
    "contiguous in another dtype": lambda lazy: lazy.float(),
    "a number": lambda lazy: lazy.sum().item(),
    "numpy": lambda lazy: lazy.detach().numpy(),
    "torch.cat": lambda lazy: torch.cat([lazy, lazy]),
    "isnan": lambda lazy: lazy.isnan(),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_values_is_told(read):
    with pytest.raises(LazyTensorRead, match=r"reads LazyTensor\(Normed 16x32, torch.bfloat16, cpu\).*takes_lazy"):
        READS[read](LazyTensor(normed()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_has_a_shape_and_no_memory(device):
    source = normed(device)
    lazy = LazyTensor(source)
    assert lazy.shape == (16, 32) and lazy.dtype == torch.bfloat16 and lazy.device.type == device and len(lazy) == 16
    assert lazy.data_ptr() == 0
    assert source_of(lazy) is source and source_of(source.x) is source.x
    like, zeros = lazy.new_empty(3, 4), lazy.new_zeros(2, dtype=torch.float32)
    assert type(like) is Tensor and like.shape == (3, 4) and like.dtype == torch.bfloat16 and like.device.type == device
    assert type(zeros) is Tensor and zeros.dtype == torch.float32 and (device == "meta" or not zeros.any())


class _Make(Function):
    """x -> a lazy tensor of it; its gradient comes as a tensor."""

    @staticmethod
    def forward(ctx, x, scale, weight):
        return LazyTensor(Normed(x, scale, weight))

    @staticmethod
    def backward(ctx, dy):
        assert type(dy) is Tensor
        return dy, None, None


class _Read(Function):
    """A lazy tensor -> twice what it is of; `lazy_grad`: its gradient comes as a lazy tensor."""

    @staticmethod
    def forward(ctx, x, lazy_grad):
        ctx.lazy_grad = lazy_grad
        return 2 * source_of(x).tensor()

    @staticmethod
    def backward(ctx, dy):
        assert isinstance(dy, LazyTensor) == ctx.lazy_grad
        return 2 * (source_of(dy).tensor() if ctx.lazy_grad else dy), None


class _LazyGrad(Function):
    """x as it is; its gradient goes on as a lazy tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return LazyTensor(Normed(dy, dy.new_ones(len(dy)), dy.new_ones(dy.shape[1])))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_autograd_carries_it_as_output_input_and_gradient(device):
    source = normed(device, torch.float32)
    x = source.x.clone().requires_grad_()
    lazy = _Make.apply(x, source.scale, source.weight)
    assert isinstance(lazy, LazyTensor) and lazy.requires_grad
    _LazyGrad.apply(_Read.apply(lazy, True)).sum().backward()
    assert type(x.grad) is Tensor and (device == "meta" or (x.grad == 2).all())


def test_two_readers_of_one_and_two_lazy_gradients_of_one_tensor():
    """Gradients of two readers add up; two gradients that nobody has made cannot, and say so."""
    source = normed(dtype=torch.float32)
    x = source.x.clone().requires_grad_()
    lazy = _Make.apply(x, source.scale, source.weight)
    (_Read.apply(lazy, False) + _Read.apply(lazy, False)).sum().backward()
    assert (x.grad == 4).all()
    made = _Read.apply(_Make.apply(x, source.scale, source.weight), True)
    with pytest.raises(LazyTensorRead, match="add"):
        (_LazyGrad.apply(made) + _LazyGrad.apply(made)).sum().backward()


def test_a_leaf_does_not_take_one_for_its_gradient():
    x = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(LazyTensorRead):
        _LazyGrad.apply(x).sum().backward()
