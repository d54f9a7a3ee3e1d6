"""Lazy tensors: what autograd carries in place of a tensor that is never written to memory. The one op that reads it, a
cast to FP8, computes quantized values directly from its source.

A LazyTensor has a shape, a dtype, a device and a gradient function, but no memory. It passes through custom autograd
Functions as their output, input or gradient. Any op on its values raises LazyTensorRead, including autograd's own
addition of two gradients. So whoever creates one asks the reader first (nn.linear: `takes_lazy`).

Sources are frozen dataclasses: ops.dense.norm.Normed, ops.dense.rope.RopeGrad, ops.experts.permute.Gathered. Those of
ops.dense.activation need no lazy tensor, because they are read within the same op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, device
from torch.utils._pytree import tree_leaves


class LazySource:
    """A source. `x` has its dtype, is on its device, and has its shape unless a subclass says otherwise."""

    x: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    @property
    def device(self) -> device:
        return self.x.device

    def tensor(self) -> Tensor:
        """Compute the tensor."""
        raise NotImplementedError


class LazyTensorRead(RuntimeError):
    """Something other than a cast to FP8 read the values of a lazy tensor."""


_LIKE: dict[Any, Any] = {torch.ops.aten.new_empty.default: torch.empty, torch.ops.aten.new_zeros.default: torch.zeros}
"""Ops that read nothing but dtype and device."""


class LazyTensor(Tensor):
    """A tensor with the shape of what `source` would compute, without values."""

    source: LazySource

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, source: LazySource) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.x.dtype, device=source.device)
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        make = _LIKE.get(func)
        if make is not None:
            like, size = args
            return make(size, **{"dtype": like.dtype, "device": like.device, **(kwargs or {})})
        lazy = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, LazyTensor))
        raise LazyTensorRead(
            f"{func} reads {lazy}, which has no values: only the cast of an FP8 linear takes it. "
            "Read the source instead (source_of(x).tensor()), or let the reader's takes_lazy say no"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = "x".join(map(str, self.shape))
        return f"LazyTensor({type(self.source).__name__} {shape}, {self.dtype}, {self.device})"


def source_of(x: Any) -> Any:
    """The source of a lazy tensor; any other argument is returned as it is."""
    return x.source if isinstance(x, LazyTensor) else x
