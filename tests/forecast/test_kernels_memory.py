"""The memory that the forecast counts is that of the kernels that a run uses: what `dry` implementations allocate on
tensors without data is what the kernels do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.config.read import load_run
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import BlockUse, block_uses
from phalanx.nn.dry_run import Allocations
from phalanx.ops.dense.activation import Gated, GatedGrad, GatedRows, GatedRowsGrad, gated_rows, parts_of_sums
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.dense.gated_mlp import MLP, DryGemms, gated_mlp
from phalanx.ops.dense.norm import NORM, Normed
from phalanx.ops.dense.relu2 import relu2_rows
from phalanx.ops.dense.rope import ROPE, RopeGrad
from phalanx.ops.experts.permute import PERMUTE, Gathered, plan_rows
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.experts import quantized_grouped_mlp
from phalanx.ops.quantized.quantizer import DY, WeightQuantizer, X
from phalanx.ops.quantized.recipes import find_recipe
from phalanx.ops.scan.carried import SEGMENT, carried
from phalanx.planning.plan import Plan
from tests.harness.sample import rest_in_soak
from tests.harness.weights import make_weight

CASTS = ["tensorwise", "delayed", "rowwise", "blockwise"]
KERNELS = "triton"  # on the CPU in Triton's interpreter


class WithoutGarbage(Allocations):
    """Triton's interpreter leaves cycles of references behind, which keep tensors alive."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gc.collect()
        return super().__torch_dispatch__(func, types, args, kwargs)


def memory(make: Callable[[], Any], backward: bool = True) -> tuple[int, int]:
    """Bytes that are alive after make(), and most at once, also in the backward of what it returns."""
    gc.collect()
    gc.freeze()
    try:
        with WithoutGarbage() as seen:
            made = make()
            gc.collect()
            kept = seen.live
            if backward:
                made.backward(torch.empty_like(made))
        return kept, seen.peak
    finally:
        gc.unfreeze()


def on_both(measure: Callable[[str], tuple[int, int]]) -> None:
    """Truth: what the kernels of the interpreter allocate."""
    kernels, dry = measure("cpu"), measure("meta")
    assert kernels == dry and 0 < dry[0] <= dry[1]


def zeros(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ends_of(device: str) -> Tensor:
    """Of 30 rows, with an expert that has none, and padding."""
    return torch.tensor([10, 13, 13, 28], dtype=torch.int32, device=device)


# ---- ops -----------------------------------------------------------------------------------------


def test_gated_activations():
    def measure(device: str) -> tuple[int, int]:
        x, weights = zeros(device, 30, 2 * 96).requires_grad_(), zeros(device, 30).requires_grad_()
        return memory(lambda: gated_rows(x, ends_of(device), weights, SWIGLU, KERNELS))

    on_both(measure)


def test_squares_of_relu():
    def measure(device: str) -> tuple[int, int]:
        x, weights = zeros(device, 30, 96).requires_grad_(), zeros(device, 30).requires_grad_()
        return memory(lambda: relu2_rows(x, ends_of(device), weights, KERNELS))

    on_both(measure)


@pytest.mark.parametrize("length", [70, SEGMENT + 1])
def test_states_carried_to_outputs(length):
    def measure(device: str) -> tuple[int, int]:
        shapes = (1, 2, length), (1, length, 1, 5), (1, 2, 3, 5)
        reach, c, initial = (zeros(device, *shape).requires_grad_() for shape in shapes)
        y = zeros(device, 1, length, 2, 3)
        return memory(lambda: carried(y, reach - torch.inf, c, initial, KERNELS))

    on_both(measure)


@pytest.mark.parametrize("recipe", rest_in_soak(CASTS, ["rowwise", "blockwise"]))
@pytest.mark.parametrize("turn", [True, False])
def test_casts_of_matrices(recipe, turn):
    def measure(device: str) -> tuple[int, int]:
        x, half = zeros(device, 40, 256), zeros(device, 40, 128)
        scale, weight = zeros(device, 40), zeros(device, 256)
        heads = [zeros(device, 1, n, 40, 128) for n in (2, 1, 1)]
        rope = RopeGrad(*heads, None, ROPE.reference)
        quantizer = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), KERNELS)
        given = [(X, s) for s in (x, Gated(x, KERNELS), Normed(x, scale, weight))]
        given += [(DY, s) for s in (x, GatedGrad(half, x, KERNELS), rope)]

        def casts() -> list[Any]:
            made = [quantizer.both(which, source, 1, turn) for which, source in given]
            again = [quantizer.refresh(x) for _ in range(2)]  # the second time in place
            return [made, again, quantizer.transposed(made[0][0])]

        return memory(casts, backward=False)

    on_both(measure)


@pytest.mark.parametrize("recipe", rest_in_soak(CASTS, ["rowwise", "blockwise"]))
def test_casts_of_rows(recipe):
    def measure(device: str) -> tuple[int, int]:
        tokens, ends = zeros(device, 10, 128), ends_of(device)
        rows = plan_rows(zeros(device, 10, 3, dtype=torch.int64), 0, 4, 30, "plain")
        both, dy, weights = zeros(device, 30, 256), zeros(device, 30, 128), zeros(device, 30)
        sums = zeros(device, parts_of_sums(128), 30)
        gated = GatedRows(both, weights, ends[-1], SWIGLU, KERNELS)
        slopes = GatedRowsGrad(both, weights, ends[-1], SWIGLU, KERNELS, dy=dy, sums=sums)
        quantizer = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), KERNELS)
        given = [(X, dy), (X, gated), (DY, slopes), (DY, Gathered(tokens, rows, PERMUTE.reference))]

        def casts() -> list[Any]:
            made = [quantizer.rows(which, source, ends) for which, source in given]
            return [made, *(quantizer.refresh(zeros(device, 4, 128, 128)) for _ in range(2))]

        return memory(casts, backward=False)

    on_both(measure)


@pytest.mark.parametrize("recipe", rest_in_soak(CASTS, ["rowwise", "blockwise"]))
def test_experts_in_fp8(recipe):
    """Forward and backward of all that experts compute."""

    def measure(device: str) -> tuple[int, int]:
        x, row_weights = zeros(device, 30, 128).requires_grad_(), zeros(device, 30).requires_grad_()
        weights = []
        for shape in ((4, 256, 128), (4, 128, 128)):
            quantizer = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), KERNELS)
            weights.append(make_weight(zeros(device, *shape), quantizer, zeros(device, *shape)))
            quantizer.refresh(weights[-1])
        quantizers = tuple(w.quantizer for w in weights)
        ends = ends_of(device)
        return memory(
            lambda: quantized_grouped_mlp(x, *weights, ends, row_weights, SWIGLU, KERNELS, quantizers=quantizers)
        )

    on_both(measure)


def test_a_fused_mlp_is_counted_where_its_package_is_asked_for():
    """On a machine without the package, and for what the package takes."""
    x = torch.empty(4, 16, dtype=torch.bfloat16, device="meta")
    assert MLP.fast("optional", x, 16, 24) is DryGemms
    refused = [("auto", x, 24), ("triton", x, 24), ("plain", x, 24), ("optional", x, 12), ("optional", x.float(), 24)]
    assert all(MLP.fast(kernels, each, 16, inner) is None for kernels, each, inner in refused)
    assert NORM.choose("triton", x) is NORM.reference  # insisted on, but here is nothing to run on


def test_what_a_fused_mlp_keeps():
    """Truth: what it keeps on a CPU, by the definition of its GEMMs."""

    def kept(device: str, gemms: Any) -> int:
        x, gate_up, down = (zeros(device, *s).requires_grad_() for s in ((64, 16), (48, 16), (16, 24)))
        return memory(lambda: gated_mlp(x, gate_up, down, Axis("tp"), gemms), backward=False)[0]

    assert kept("cpu", MLP.reference) == kept("meta", DryGemms)


# ---- runs ----------------------------------------------------------------------------------------


def planned(*words: str) -> Plan:
    base = {"data": {"mock": True}, "train": {"precision": "bf16", "device": "cuda"}}
    return make_plan(load_run("recipes/tiny_llama.yaml", words, base=base), 1)


def layer_of(plan: Plan) -> BlockUse:
    return block_uses(plan)[1]


def test_the_kernels_of_a_config_are_forecast():
    """Truth: the hidden tokens, which a fused MLP does not keep."""
    plan = planned("train.kernels=triton")
    train = plan.run.train
    hidden = train.micro_batch * train.seq_length * plan.run.model.intermediate_size * 2
    kept = {
        words: layer_of(planned(*words.split())).bytes.kept
        for words in ("train.kernels=auto", "train.kernels=optional", "train.kernels=optional train.plain_ops=[mlp]")
    }
    stored = layer_of(plan).bytes.kept
    assert list(kept.values()) == [stored, stored - hidden, stored]


@pytest.mark.parametrize("words", ["train.kernels=auto", "train.fp8.recipe=delayed"])
def test_the_device_of_a_run_is_forecast(words):
    """Kernels need less memory than what runs on CPUs; before the ranks have met, `auto` is a GPU."""
    on_gpu, on_cpu = (planned(words, f"train.device={device}") for device in ("cuda", "cpu"))
    used = layer_of(on_gpu)
    assert used.bytes.working < layer_of(on_cpu).bytes.working
    assert layer_of(planned(words, "train.device=auto")) == used
    without_triton = replace(on_gpu, kernels=replace(on_gpu.kernels, triton=False))
    assert layer_of(without_triton) == layer_of(on_cpu) == layer_of(planned(words, "train.kernels=plain"))
    assert used.bytes.kept == layer_of(on_cpu).bytes.kept
