"""Triton implementations of the ops. Whether they run is decided here: `auto` takes Triton on a GPU and plain PyTorch
elsewhere. The few twins that come in optional packages are chosen in ops/dense/optional_kernels.py.

The `*_kernel` modules beside the definitions import triton, so they are imported only when a kernel is to run. On
the CPU they run in Triton's interpreter (TRITON_INTERPRET=1 before the first import), which is how the tests compare
them with the reference implementations.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

Kernels = Literal["auto", "plain", "triton", "optional"]
OPS = (
    "norm",
    "swiglu",
    "rope",
    "loss",
    "adamw",
    "route",
    "permute",
    "grouped",
    "quant",
)  # the ops that have a Triton implementation


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def use_triton(kernels: Kernels, x: Tensor) -> bool:
    """Whether the op on `x` is to run its Triton implementation. `auto`: on a GPU of compute capability 8.0 or newer,
    where triton is installed."""
    if kernels == "auto":
        return x.is_cuda and has_triton() and capable(x.device.index or 0)
    return kernels in ("triton", "optional")


@cache
def capable(index: int) -> bool:
    """Whether GPU number `index` is an NVIDIA one of compute capability 8.0 or newer."""
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0)
