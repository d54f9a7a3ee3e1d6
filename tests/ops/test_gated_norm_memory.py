"""A forecast counts the gated norm as its kernel works, without the reference's copies in fp32."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.comm.axis import Axis
from phalanx.ops.op import Kernels
from phalanx.ops.scan.gated_norm import NormGroups, gated_norm


class _Peak(TorchDispatchMode):
    """The most bytes at once of the storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


@pytest.mark.parametrize("kernels", ["triton", "auto"])
def test_no_copies_in_fp32(kernels: Kernels) -> None:
    x, gate = (torch.empty(1024, 512, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    weight = torch.empty(512, dtype=torch.bfloat16, device="meta")
    peak = _Peak()
    with peak:
        y = gated_norm(x, gate, weight, NormGroups(8, 64, 1e-5), Axis("tp"), kernels)
        y.backward(torch.empty_like(y))
    assert peak.most < 8 * x.nbytes  # inputs, results and gradients, each in 16 bits
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype
