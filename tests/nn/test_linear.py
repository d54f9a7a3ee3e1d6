"""Linears: what a layer loads, in which order parameters lie in memory, and which method a linear has."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch

from phalanx.nn.env import Env, WeightRules
from phalanx.nn.fp8 import FP8, Fp8Linears
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, RowLinear
from phalanx.nn.linear_method import PLAIN
from phalanx.nn.module import OutputRows
from phalanx.nn.moe import Experts
from phalanx.ops.quantized.recipes import find_recipe
from phalanx.planning.blocks import make_blocks
from tests.harness.parity import MODELS


def test_layers_load_no_file_of_fp8():
    modules = ("nn.attention", "nn.mla", "nn.mlp", "nn.moe", "nn.mtp", "ops.dense.matmul")
    code = (
        f"import sys, {', '.join(f'phalanx.{module}' for module in modules)}\n"
        "print([m for m in sys.modules if m.startswith(('phalanx.ops.quantized', 'phalanx.nn.fp8'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_parameters_of_a_layer_lie_in_memory_with_weights_before_biases():
    """named_parameters has the order of the flat buffers."""
    model = replace(MODELS["llama"], attention_bias=True, mlp_bias=True)
    (layer,) = make_blocks(model, Env(), [1])
    assert [name for name, _ in layer.named_parameters(prefix="layer")] == [
        "layer.norm1.weight",
        "layer.attention.qkv.weight",
        "layer.attention.out.weight",
        "layer.attention.qkv.bias",
        "layer.attention.out.bias",
        "layer.norm2.weight",
        "layer.mlp.gate_up.weight",
        "layer.mlp.down.weight",
        "layer.mlp.gate_up.bias",
        "layer.mlp.down.bias",
    ]
    (layer,) = make_blocks(MODELS["gpt_oss"], Env(), [1])
    (experts,) = (module for module in layer.modules() if isinstance(module, Experts))
    assert [name for name, _ in experts.named_parameters()] == ["gate_up.weight", "down.weight", "gate_up.bias"]
    assert list(experts.parameters()) == [p for _, p in experts.named_parameters()]


def test_a_method_is_chosen_for_each_linear():
    """Truth: the names that train.fp8 takes: layer 1 of layers 0 to 2 without output projections."""
    fp8 = Fp8Linears(find_recipe("tensorwise"), range(1, 2), ("*o_proj*",))
    env = Env(weights=WeightRules(linears=fp8))
    for layer, method in ((0, PLAIN), (1, FP8), (2, PLAIN)):
        at, init = f"model.layers.{layer}.self_attn", Normal(0.02)
        rows = [OutputRows(f"{at}.{name}_proj.weight", 64, 0, 64) for name in "qkv"]
        qkv = ColumnLinear(env, rows, 32, init, bias=True)
        out = RowLinear(env, f"{at}.o_proj.weight", 32, 64, (0, 64), init)
        assert qkv.method is method and out.method is PLAIN and out.weight.quantizer is None
        assert (qkv.weight.quantizer is not None) == (method is FP8) and qkv.is_plain == (method is PLAIN)
        if method is FP8:
            assert qkv.weight.quantizer.name == f"{at}.q_proj+k_proj+v_proj"
            qkv.weight.quantizer.on = False
            assert qkv.is_plain and not qkv.takes_lazy(torch.empty(2, 32))


def test_a_linear_is_a_matmul_and_names_its_bias_like_its_matrix():
    x = torch.randn(4, 6, dtype=torch.float64)
    env, init = Env(weights=WeightRules(dtype=torch.float64)), Normal(0.02)
    column = ColumnLinear(env, [OutputRows("up.weight", 8, 0, 8)], 6, init, bias=True)
    row = RowLinear(env, "down.weight", 5, 8, (0, 8), init, bias=True)
    assert column.bias.spec.name == "up.bias" and row.bias.spec.name == "down.bias"
    values = [torch.randn(p.shape, dtype=torch.float64) for m in (column, row) for p in m.parameters()]
    for m in (column, row):
        for p in m.parameters():
            shape = p.shape
            p.to_empty(torch.device("cpu"))
            p.data = values.pop(0).view(shape)
    expected = (x @ column.weight.t() + column.bias) @ row.weight.t() + row.bias
    assert torch.allclose(row(column(x)), expected, rtol=1e-12, atol=1e-12)
