"""Triton's interpreter with its language made ready once: as it was after each launch, and right in helpers."""

from __future__ import annotations

import os

import pytest
import torch

tl = pytest.importorskip("triton.language")
import triton  # noqa: E402

from tests.harness.interpreter import Language  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on a GPU")


def twice(x):
    return x * 2


def doubled(x_ptr, size: tl.constexpr):
    at = tl.arange(0, size)
    x = twice(tl.load(x_ptr + at))
    if tl.sum(x) > 1e6:
        raise ValueError("too much")
    tl.store(x_ptr + at, x)


def language() -> list[dict]:
    places = (tl, tl.core, tl.tensor, tl.math, tl.dtype, tl.condition)
    return [{name: x for name, x in vars(of).items() if name != "__annotations__"} for of in places]


def test_the_language_is_as_before_after_each_launch():
    """Also after one that failed; in it helpers and sums find functions of numpy."""
    from triton.runtime import interpreter

    assert isinstance(interpreter._patch_lang, Language)
    global twice
    plain, twice = twice, triton.jit(twice)
    try:
        kernel, x = triton.jit(doubled), torch.arange(8, dtype=torch.float32)
        before = language()
        kernel[(1,)](x, 8)
        assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        with pytest.raises(Exception, match="too much"):
            kernel[(1,)](torch.full((8,), 1e6), 8)
        assert language() == before
    finally:
        twice = plain
