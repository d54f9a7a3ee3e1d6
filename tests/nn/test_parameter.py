"""A Parameter keeps what it knows of itself wherever it goes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from torch import nn

from phalanx.layout.param import ParamSpec
from phalanx.nn.env import Env
from phalanx.nn.module import Module
from phalanx.nn.parameter import Parameter


class SomeQuantizer:
    on = True

    def keeps_quantized(self, shape: tuple[int, ...]) -> bool:
        return False


def test_moving_to_a_device_keeps_spec_quantizer_and_extra_gradients():
    spec, quantizer = ParamSpec((2, 3), ()), SomeQuantizer()
    p = Parameter(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"), spec, requires_grad=False)
    p.quantizer = quantizer
    p.add_extra_grads(2)
    extras = list(p.extra_grads)
    p.to_empty(torch.device("cpu"))
    assert isinstance(p, Parameter) and p.spec is spec and p.quantizer is quantizer and not p.requires_grad
    assert all(a is b for a, b in zip(p.extra_grads, extras, strict=True))
    for each in (p, *extras):
        assert each.device.type == "cpu" and each.dtype == torch.bfloat16 and each.untyped_storage().nbytes() == 0
        assert each.spec is spec and each.quantizer is quantizer


def test_a_module_names_itself_when_a_parameter_has_no_spec():
    module = Module(Env())
    module.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match=r"Module has a parameter without a spec: make it with self\.param"):
        list(module.parameters())


def test_an_env_has_at_most_eight_fields():
    assert len(fields(Env)) <= 8


def test_the_modules_of_a_model_are_names_of_the_room():
    """`from phalanx.nn import Attention`; asking for one loads no FP8 file."""
    from phalanx import nn

    assert [name for names in nn.FILES.values() for name in names] and set(nn.__all__) == {
        name for names in nn.FILES.values() for name in names
    }
    for file, names in nn.FILES.items():
        assert all(getattr(nn, name).__module__ == f"phalanx.nn.{file}" for name in names)
    code = (
        "import sys; from phalanx.nn import Attention; "
        "assert not [m for m in sys.modules if m.startswith('phalanx') and ('quantized' in m or 'fp8' in m)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
