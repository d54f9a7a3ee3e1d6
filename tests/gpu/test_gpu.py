"""The checks of tests/gpu/run.py as tests; they need a GPU (several for the layouts)."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import all_checks
from tests.gpu.layouts import check_layouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", all_checks())
def test_device(name):
    all_checks()[name](torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least 2 GPUs")
def test_layouts():
    failed = {
        name: text
        for name, text in check_layouts("cuda", torch.cuda.device_count()).items()
        if text.startswith("FAILED")
    }
    assert not failed
