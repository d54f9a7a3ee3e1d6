"""Training in low precision (train.fp8): casts against the formats' own definitions, products against torch, layouts
against one process."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.base.placement import Placement
from phalanx.base.registry import BUILT_IN
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.comm.axis import Work
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Fp8Config, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import build, init_weights
from phalanx.engine.shadow import gradient_distance
from phalanx.engine.step import accumulate, shadow_of, train_step
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.observe.out_of_memory import held
from phalanx.ops.op import switches
from phalanx.ops.quantized.quantizer import DY
from phalanx.ops.quantized.recipes import (
    E2M1,
    E4M3,
    E5M2,
    Scaled,
    block_amax,
    cast,
    dequantize,
    find_recipe,
    multipliers,
    quantize,
    scaled_product,
)
from phalanx.optim.config import OptimConfig
from phalanx.pipeline.graphs import Eager
from phalanx.training import loop
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.pool import RanksFailed
from tests.harness.sample import covering, features, rest_in_soak

FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}
NARROW = LlamaConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
WIDE = replace(NARROW, hidden_size=128, intermediate_size=256, num_key_value_heads=4, head_dim=64)


def values_of(name: str) -> list[float]:
    """Every finite value of a format, from its bits: sign, exponent, mantissa (OCP 8-bit and microscaling formats)."""
    exponent_bits, mantissa_bits, bias = {"E4M3": (4, 3, 7), "E5M2": (5, 2, 15), "E2M1": (2, 1, 1)}[name]
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = code >> mantissa_bits, code % 2**mantissa_bits
        top = e == 2**exponent_bits - 1
        if (name == "E4M3" and top and m == 7) or (name == "E5M2" and top):
            continue  # NaN, and in E5M2 inf
        found.append(
            (m / 2**mantissa_bits) * 2.0 ** (1 - bias) if e == 0 else (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias)
        )
    return found


def nearest(x: float, values: list[float]) -> float:
    """To the nearest, ties to the even code. Of fp32 numbers all differences here are exact."""
    size = min(abs(x), values[-1])
    at = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return math.copysign(values[at], x)


@pytest.mark.parametrize("name", FORMATS)
def test_cast_is_to_the_nearest(name):
    """Truth: the list of the format's values. All of them, the middles between neighbours and their neighbours in
    fp32, zeros, what is too large."""
    values, format, dtype = values_of(name), FORMATS[name], torch.float32
    assert values[-1] == format.max
    middles = [(a + b) / 2 for a, b in zip(values, values[1:])]
    exact = torch.tensor([*values, *middles, 1.5 * format.max, 1e30], dtype=dtype)
    x = torch.cat(
        [
            exact,
            torch.nextafter(exact, torch.tensor(math.inf, dtype=dtype)),
            torch.nextafter(exact, torch.tensor(0.0, dtype=dtype)),
        ]
    )
    x = torch.cat([x, -x])
    found = cast(x, format).to(dtype)
    truth = torch.tensor([nearest(v, values) for v in x.tolist()], dtype=dtype)
    assert torch.equal(found, truth) and torch.equal(found.signbit(), truth.signbit())


@pytest.mark.parametrize("name", FORMATS)
def test_cast_keeps_what_is_no_number(name):
    found = cast(torch.tensor([math.nan, math.inf, -math.inf, 1.0]), FORMATS[name]).float()
    assert found[:3].isnan().all() and found[3] == 1.0


@pytest.mark.parametrize("name", BUILT_IN["fp8_recipe"])
def test_scales_use_the_whole_range(name):
    """The largest of each block becomes the format's largest (with powers of two, more than half of it), and is
    never cut."""
    recipe = find_recipe(name)
    decades = 1 if recipe.forward is E2M1 else 6  # an E4M3 scale has few: small blocks beside large ones become zero
    x = torch.randn(70, 150, generator=torch.Generator().manual_seed(1)) * torch.logspace(-decades, decades, 150)
    for block in (recipe.tokens, recipe.weight, recipe.tokens[::-1]):
        for format in (recipe.forward, recipe.backward):
            m = multipliers(block_amax(x, block), format, recipe.scale)
            q = quantize(x, block, format, m)
            largest = block_amax(q.quantized.float(), block)
            if recipe.scale == "fp32":
                assert (largest == format.max).all()
            # E4M3 scales of small blocks can round to less than they should be: then the largest is cut by a sixteenth
            # at most
            else:
                assert (largest > format.max / 2.01).all() and largest.max() <= format.max
            if recipe.scale == "power of 2":
                assert (torch.frexp(q.scales)[0] == 0.5).all()


def test_scales_of_zeros_and_of_no_numbers():
    x = torch.zeros(2, 4)
    assert (dequantize(quantize(x, (1, 0), E4M3, multipliers(block_amax(x, (1, 0)), E4M3)), torch.float32) == 0).all()
    for bad in (math.nan, math.inf):
        y = torch.tensor([[1.0, bad], [1.0, 2.0]])
        q = quantize(y, (1, 0), E4M3, multipliers(block_amax(y, (1, 0)), E4M3))
        product = scaled_product(q, q, torch.float32)
        assert not product[0].isfinite().any() and product[1, 1].isfinite()


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128), (32, 1)])
def test_blocks_at_the_edge_are_smaller(block):
    """Truth: each block by itself."""
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(2))
    m = multipliers(block_amax(x, block), E4M3)
    found = dequantize(quantize(x, block, E4M3, m), torch.float32)
    rows, columns = block[0] or 130, block[1] or 200
    for r in range(0, 130, rows):
        for c in range(0, 200, columns):
            part = x[r : r + rows, c : c + columns]
            scale = 448.0 / part.abs().max()
            alone = (part * scale).to(torch.float8_e4m3fn).float() / scale
            torch.testing.assert_close(found[r : r + rows, c : c + columns], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_product_is_that_of_torch(recipe):
    """Truth: torch._scaled_mm, which has its own kernels for 8-bit codes on the CPU (torch 2.11 without scales of
    rows: they come after)."""
    r = find_recipe(recipe)
    x, w = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (48, 32))
    a, b = (quantize(t, r.tokens, E4M3, multipliers(block_amax(t, r.tokens), E4M3)) for t in (x, w))
    one = torch.ones(())
    truth = torch._scaled_mm(a.quantized, b.quantized.t(), one, one, out_dtype=torch.float32) * a.scales * b.scales.t()
    torch.testing.assert_close(scaled_product(a, b, torch.float32), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(truth, x.float() @ w.float().t(), rtol=0.1, atol=1.5)


def test_turned_is_the_transpose():
    x = torch.randn(40, 256)
    q = quantize(x, (1, 128), E4M3, multipliers(block_amax(x, (1, 128)), E4M3))
    assert (
        torch.equal(dequantize(q.transposed(), torch.float32), dequantize(q, torch.float32).t())
        and q.transposed().quantized.is_contiguous()
    )
    assert torch.equal(dequantize(q.rows(slice(8, 24)), torch.float32), dequantize(q, torch.float32)[8:24])
    whole = Scaled(q.quantized, torch.ones(1, 2), (0, 128))
    assert torch.equal(whole.rows(slice(8, 24)).scales, whole.scales)


# ---- layouts -------------------------------------------------------------------------------------

STEPS = 2
parity.MODELS["low"], parity.MODELS["low-wide"] = NARROW, WIDE
parity.MODELS["low-latent"] = replace(
    parity.MODELS["deepseek_v3-dense"],
    hidden_size=64,
    intermediate_size=64,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    v_head_dim=8,
    qk_rope_head_dim=8,
    rope_scaling=None,
)


def low_run(recipe: str, model: str = "low", train: dict | None = None, fp8: dict | None = None, **layout):
    run = parity.base_run(
        model, fp8=Fp8Config(recipe=recipe, **(fp8 or {})), **{"global_batch": 4, "micro_batch": 2, **(train or {})}
    )
    return replace(run, layout=LayoutConfig(bucket_mb=0, **layout))


PLAIN = [
    op for op in switches() if op not in ("swiglu", "quant", "attention", "mlp")
]  # the others take long in Triton's interpreter
LAYOUTS = {  # no block of a scale is cut in these: the same codes as on one process
    "tensorwise, tp2 pp2 dp2": (8, low_run("tensorwise", tp=2, pp=2)),
    "tensorwise, tp2, overlapped": (2, low_run("tensorwise", tp=2, tp_overlap="on")),
    "tensorwise, dp2, level 0, full recompute": (2, low_run("tensorwise", train=dict(recompute="full"), sharding=0)),
    "tensorwise, tp2, MLA": (2, low_run("tensorwise", "low-latent", tp=2)),
    "tensorwise, dp4, level 3": (4, low_run("tensorwise", train=dict(global_batch=8), sharding=3)),
    "rowwise, dp2 tp2, level 2, MLP recomputed": (
        4,
        low_run("rowwise", train=dict(recompute_ops=["up", "activation"]), tp=2, sharding=2),
    ),
    "tensorwise, cp2 tp2": (4, low_run("tensorwise", cp=2, tp=2)),
    "rowwise, cp2 tp2": (4, low_run("rowwise", cp=2, tp=2)),
    "delayed, cp2": (2, low_run("delayed", cp=2)),
    "delayed, tp2 pp2": (4, low_run("delayed", fp8=dict(history=3), tp=2, pp=2)),
    "delayed, dp2, of the last step, selective recompute": (
        2,
        low_run("delayed", train=dict(recompute="selective"), fp8=dict(history=1)),
    ),
    "rowwise, tp2 dp2": (4, low_run("rowwise", tp=2)),
    "rowwise, tp2, overlapped, a layer and names left out": (
        2,
        low_run(
            "rowwise",
            fp8=dict(exclude=["*.o_proj.*", "*.0.mlp.*"]),
            tp=2,
            tp_overlap="on",
            train=dict(recompute="pointwise"),
        ),
    ),
    "rowwise, tp2 pp2, the MLP as one op": (
        4,
        low_run("rowwise", train=dict(kernels="triton", plain_ops=PLAIN), tp=2, pp=2),
    ),
    "mxfp8, tp2 dp2": (4, low_run("mxfp8", "low-wide", train=dict(micro_batch=4, global_batch=8), tp=2)),
    "nvfp4, tp2 pp2": (4, low_run("nvfp4", "low-wide", tp=2, pp=2)),
    "nvfp4, cp2 dp2, full recompute": (
        4,
        low_run("nvfp4", "low-wide", train=dict(seq_length=64, recompute="full"), cp=2),
    ),
    "blockwise, dp2 pp2": (4, low_run("blockwise", "low-wide", pp=2)),
}


@pytest.mark.parametrize(
    "name", rest_in_soak(LAYOUTS, covering({name: features(run) for name, (_, run) in LAYOUTS.items()}))
)
def test_layouts_agree_with_one_process(ranks, name):
    """Emulated in float64: a code that differs anywhere would show as a difference of 1e-2, far more than the bound
    of 1e-9."""
    world, run = LAYOUTS[name]
    truth = parity.truth_of(ranks, run, STEPS, False)
    plain = parity.truth_of(ranks, replace(run, train=replace(run.train, fp8=None)), STEPS, False)
    assert 1e-5 < abs(truth["losses"][1][0] / plain["losses"][1][0] - 1) < 0.1  # it does round
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS), truth, STEPS)


@pytest.mark.parametrize("recipe, tp", [("tensorwise", 4), ("mxfp8", 4), ("nvfp4", 4), ("blockwise", 2)])
def test_cut_blocks_stay_near(ranks, recipe, tp):
    """Key and value heads that ranks share have gradients cast in parts; blocks of 32 and 128 features are cut here.
    Not the same codes, but as near to the run without train.fp8 as one process is."""
    size = {"mxfp8": 8, "blockwise": 16}.get(recipe, 4)  # 32 or 128 tokens on each rank
    run = low_run(recipe, train=dict(micro_batch=size, global_batch=size), tp=tp)
    plain = parity.truth_of(ranks, replace(run, train=replace(run.train, fp8=None)), STEPS, False)
    alone = parity.truth_of(ranks, run, STEPS, False)
    found = ranks.run("tests.harness.parity:run_layout", tp, run, STEPS)
    grads = parity.assemble([r["grads"][0] for r in found])
    for name, exact in plain["grads"][0].items():
        if "norm" not in name and "embed" not in name and "lm_head" not in name:
            near = [np.linalg.norm(g[name] - exact) / np.linalg.norm(exact) for g in (grads, alone["grads"][0])]
            assert near[0] <= 1.5 * near[1] + 0.02, (name, near)


MUTATED = {
    "tensorwise, tp2": (2, low_run("tensorwise", tp=2)),
    "rowwise, cp2 tp2": (4, low_run("rowwise", cp=2, tp=2)),
    "rowwise, tp2, overlapped": (2, low_run("rowwise", tp=2, tp_overlap="on")),
    "delayed, tp2": (2, low_run("delayed", tp=2)),
    "nvfp4, tp2": (2, low_run("nvfp4", "low-wide", tp=2)),
}


def test_each_collective_matters(ranks):
    """Each site in the new files, found by tracing, is dropped once in one of these layouts: the comparison must
    fail."""
    homes: dict[Site, list[str]] = {}
    truths = {}
    for name, (world, run) in MUTATED.items():
        truths[name] = parity.truth_of(ranks, run, STEPS, False)
        for result in ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False, None, True):
            for site in map(Site._make, result["sites"]):
                if site.file in ("ops/quantized/linear.py", "ops/quantized/quantizer.py", "engine/fp8_state.py"):
                    homes.setdefault(site, [])
                    homes[site] += [name] if name not in homes[site] else []
    assert {site.op for site in homes} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {site.axis for site in homes} >= {"tp", "tp x cp", "world"}
    survivors = []
    for site, names in homes.items():
        world, run = MUTATED[random.Random(1).choice(names)]
        try:
            parity.compare(
                ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False, site, timeout=60.0),
                truths[names[0]],
                STEPS,
            )
            survivors.append(site)
        except (AssertionError, RanksFailed):
            pass
    assert not survivors


def histories(rank: int, world: int, run: Run) -> list[tuple[float, np.ndarray]]:
    """The loss scale for the next step, and the largest gradients of the last, of each step."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    init_weights(state.model)
    state.model.train()
    found = []
    for step in range(6):
        train_step(state, parity.step_batches(run, mesh, step, False), lr=1e-3)
        found.append((state.scaler.scale.item(), state.model.fp8.history[:, DY, 0].clone().numpy()))
    return found


def test_histories_follow_the_loss_scale(ranks):
    """fp16: a scale that doubles with every second step changes what is cast by powers of two, and so nothing else."""
    given = dict(precision="fp16", loss_scale=64.0)
    still, growing = (
        low_run("delayed", train={**given, "loss_scale_window": n}, fp8=dict(history=2)) for n in (1000, 2)
    )
    [truth], [found] = (ranks.run("tests.nn.test_fp8:histories", 1, run) for run in (still, growing))
    assert [scale for scale, _ in truth] == [64.0] * 6 and [scale for scale, _ in found] == [
        64.0,
        128.0,
        128.0,
        256.0,
        256.0,
        512.0,
    ]
    for (one, a), (two, b) in zip(truth, found):
        assert (a > 0).all()
        np.testing.assert_allclose(b / two, a / one, rtol=0.05)


def run_shadow(rank: int, world: int, run: Run, drop: bool = False) -> np.ndarray:
    """What a shadow step tells, and that it leaves nothing behind: the step after it has the gradients of one
    without a shadow."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    parity.random_weights(state.model)
    state.model.train()
    batches = parity.step_batches(run, mesh, 0, False)
    if drop:
        mesh.world.all_reduce = lambda x, op="sum", async_op=False: Work(x)  # type: ignore[method-assign]
    kept = shadow_of(state, batches)
    accumulate(state, batches)
    found = gradient_distance(state, kept)
    norm = state.buffers.grad_norm()
    state.buffers.zero_grads()
    accumulate(state, batches)
    assert drop or abs(norm / state.buffers.grad_norm() - 1) < 1e-12
    assert found is not None
    return found.numpy()


@pytest.mark.parametrize("layout", [dict(tp=2), dict(tp=2, pp=2), dict(sharding=2), dict(sharding=3)], ids=str)
def test_shadows_tell_the_same_in_every_layout(ranks, layout):
    """Truth: one process. Without the sum over ranks they would not."""
    run = low_run("tensorwise", train=dict(global_batch=8), **layout)
    [truth] = ranks.run("tests.nn.test_fp8:run_shadow", 1, replace(run, layout=LayoutConfig()))
    assert (truth[:, 0] > 0.5).all() and (truth[:, 0] < 1 - 1e-6).all() and (truth[:, 1] > 1e-3).all()
    for found in ranks.run("tests.nn.test_fp8:run_shadow", 4, run):
        np.testing.assert_allclose(found, truth, rtol=1e-9)
    with pytest.raises(AssertionError):
        for found in ranks.run("tests.nn.test_fp8:run_shadow", 4, run, True):
            np.testing.assert_allclose(found, truth, rtol=1e-9)


def turns(rank: int, world: int, run: Run) -> tuple[list[tuple[bool, set[str]]], list[str]]:
    """Of steps in the recipe, one of the last, and in the recipe again, the second linear fallen back: whether the
    turn was new, and whose values were cast."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    init_weights(state.model)
    state.model.train()
    names, found = state.model.fp8.names, []
    state.model.fp8.fall_back(names[1:2])
    for step, over in enumerate((False, True, False, False)):
        new = state.model.fp8.turn(over)
        told = train_step(state, parity.step_batches(run, mesh, step, False), lr=1e-3, shadow=step == 3).fp8
        found.append((new, {name for name, values in zip(names, told[..., -1].sum(1).tolist()) if values}))
    return found, list(names)


@pytest.mark.parametrize(
    "recipe, layout", [("tensorwise", dict(sharding=3)), ("delayed", dict(sharding=1)), ("rowwise", dict(sharding=0))]
)
def test_linears_turn_to_bf16_and_back(ranks, recipe, layout):
    """A run that goes back to a step before its last ones is in the recipe again; a linear that fell back never is,
    a shadow step or not."""
    for found, names in ranks.run("tests.nn.test_fp8:turns", 2, low_run(recipe, **layout)):
        rest = set(names) - {names[1]}
        assert found == [(False, rest), (True, set()), (True, rest), (False, rest)] and rest


# ---- runs ----------------------------------------------------------------------------------------


def run_of(folder: Path, fp8: dict | None, **train) -> Run:
    """A tiny model that learns to repeat its input, in bf16."""
    settings = {
        "steps": 12,
        "global_batch": 8,
        "micro_batch": 4,
        "seq_length": 16,
        "device": "cpu",
        "precision": "bf16",
        **train,
    }
    low = None if fp8 is None else Fp8Config(**fp8)
    return Run(
        model=NARROW,
        train=TrainConfig(fp8=low, **settings),
        data=DataConfig(mock=True),
        optim=OptimConfig(lr=3e-3, decay_steps=12),
        checkpoint=CheckpointConfig(interval=6),
        log=LogConfig(report=False),
        dir=str(folder),
    )


def trained(run: Run) -> list[dict]:
    train(run, Placement())
    return [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict]) -> list[float]:
    return [r["loss"] for r in rows if "loss" in r]


@pytest.mark.parametrize(
    "fp8", [dict(recipe="delayed", history=4), dict(recipe="tensorwise", max_lost=2e-4)], ids=lambda c: c["recipe"]
)
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, fp8):
    """Histories, and who fell back, are in the checkpoint: without them the losses after step 6 differ."""
    whole = losses(trained(run_of(tmp_path / "whole", fp8)))
    trained(run_of(tmp_path / "halves", fp8, steps=6))
    assert losses(trained(run_of(tmp_path / "halves", fp8))) == whole
    other = losses(
        trained(run_of(tmp_path / "other", {**fp8, **({"history": 1} if "history" in fp8 else {"max_lost": None})}))
    )
    assert other != whole


@pytest.mark.parametrize(
    "recipe, sharding",
    [
        ("delayed", 1),
        ("tensorwise", 3),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("nvfp4", 2), ("rowwise", 0))),
    ],
)
def test_the_last_steps_are_in_bf16(tmp_path, recipe, sharding):
    """Truth: the same checkpoint continued without train.fp8. A run that is stopped in its last steps goes on to the
    bit."""

    def run(name: str, fp8: dict | None, **train) -> Run:
        return replace(run_of(tmp_path / name, fp8, **train), layout=LayoutConfig(sharding=sharding))

    found = trained(run("whole", dict(recipe=recipe, last_steps=8)))
    first = losses(trained(run("truth", dict(recipe=recipe), steps=4)))
    assert losses(found) == first + losses(trained(run("truth", None)))[4:]
    assert ["fp8_lost" in r for r in found if "loss" in r] == [True] * 4 + [False] * 8
    assert "from step 5 on all linears are in bf16 (train.fp8.last_steps=8)" in (tmp_path / "whole/log.txt").read_text()
    shutil.rmtree(tmp_path / "whole/checkpoints/step-00000012")
    assert losses(trained(run("whole", dict(recipe=recipe, last_steps=8)))) == losses(found)
    assert losses(trained(run("shorter", dict(recipe=recipe, last_steps=2)))) != losses(found)


def test_random_rounding_goes_on_to_the_bit(tmp_path):
    """It has no state: a stopped run rounds as the whole one, and so does what is recomputed in backward."""
    whole = losses(trained(run_of(tmp_path / "whole", dict(recipe="nvfp4"))))
    trained(run_of(tmp_path / "halves", dict(recipe="nvfp4"), steps=6))
    assert losses(trained(run_of(tmp_path / "halves", dict(recipe="nvfp4")))) == whole
    assert losses(trained(run_of(tmp_path / "again", dict(recipe="nvfp4"), recompute="full"))) == whole


def test_statistics_are_in_the_metrics(tmp_path):
    rows = trained(run_of(tmp_path / "run", dict(recipe="tensorwise", exclude=["*.1.mlp.*"], shadow_interval=5)))
    names = [
        f"model.layers.{i}.{part}"
        for i, part in (
            (0, "self_attn.q_proj+k_proj+v_proj"),
            (0, "self_attn.o_proj"),
            (0, "mlp.gate_proj+up_proj"),
            (0, "mlp.down_proj"),
            (1, "self_attn.q_proj+k_proj+v_proj"),
            (1, "self_attn.o_proj"),
        )
    ]
    assert list(rows[0]["fp8"]) == list(rows[-1]["fp8"]) == names and "fp8" not in rows[4]
    for amax, zeros, cut in rows[0]["fp8"].values():
        assert all(0 < a < 100 for a in amax) and all(0 <= z < 0.2 for z in zeros) and cut == [0.0, 0.0, 0.0]
    assert all(0 <= r["fp8_lost"] < 0.01 and r["fp8_worst"].split(" of ")[1] in names for r in rows)
    shadows = {r["step"]: r["fp8_shadow"] for r in rows if "fp8_shadow" in r}
    assert list(shadows) == [1, 5, 10, 12] and all(list(s) == names for s in shadows.values())
    assert all(
        0.97 < cosine < 1 - 1e-6 and 1e-3 < error < 0.3 for s in shadows.values() for cosine, error in s.values()
    )
    log = (tmp_path / "run/log.txt").read_text()
    assert log.count("shadow model.layers.0.mlp.down_proj: cosine 0.9") == 4


@pytest.mark.parametrize(
    "fp8, step", [(dict(last_steps=8), 5), (dict(max_lost=2e-4), None)], ids=["last steps", "fell back"]
)
def test_graphs_of_other_products_are_forgotten(tmp_path, monkeypatch, fp8, step):
    """Before the step that has other products, and at no other."""
    forgot: list[int] = []
    monkeypatch.setattr(Eager, "forget", lambda self: forgot.append(0))
    rows = trained(run_of(tmp_path / "run", dict(recipe="tensorwise", **fp8)))
    assert len(forgot) == (sum("fp8_fell_back" in r for r in rows) if step is None else 1) > 0


def test_shadow_steps_end_with_the_recipe(tmp_path, monkeypatch):
    """The last before train.fp8.last_steps is one; steps in train.precision have nothing to tell, and are not done
    twice."""
    done: list[bool] = []
    monkeypatch.setattr(loop, "train_step", lambda *args: done.append(args[-1]) or train_step(*args))
    rows = trained(run_of(tmp_path / "run", dict(recipe="tensorwise", shadow_interval=2, last_steps=5)))
    assert [r["step"] for r in rows if "fp8_shadow" in r] == [1, 2, 4, 6, 7]
    assert [step for step, shadow in enumerate(done, 1) if shadow] == [1, 2, 4, 6, 7]


def outlier_run(folder: Path, fp8: dict | None) -> Run:
    """One feature of the values of layer 0 is a million times too large, and what it is multiplied by zero: in bf16
    it changes nothing, but one scale per tensor leaves nothing of the other features. The rate is zero: losses
    differ by what products lose alone."""
    run = run_of(folder, fp8, steps=8)
    return replace(
        run, optim=OptimConfig(lr=0.0), checkpoint=CheckpointConfig(), init_from=str(folder.parent / "outliers")
    )


def make_outliers(folder: Path) -> None:
    run = run_of(folder / "start", None, steps=60)
    train(replace(run, optim=OptimConfig(lr=1e-2), checkpoint=CheckpointConfig(interval=60)), Placement())
    shutil.copytree(folder / "start/checkpoints/step-00000060/weights", folder / "outliers")
    [file] = (folder / "outliers").glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.0.self_attn.v_proj.weight"][0] *= 1e6
    weights["model.layers.0.self_attn.o_proj.weight"][:, [0, 16]] = 0  # two heads of queries share that of values
    save_file(weights, file, {"format": "pt"})


def test_a_layer_with_outliers_is_caught_and_cured(tmp_path):
    """Truth: the run that leaves that layer's attention out from the start, which is nearer to the one in bf16 than
    without."""
    make_outliers(tmp_path)
    plain = np.array(losses(trained(outlier_run(tmp_path / "bf16", None))))
    truth = np.array(
        losses(trained(outlier_run(tmp_path / "without", dict(recipe="tensorwise", exclude=["*.0.self_attn.*"]))))
    )
    bad = trained(outlier_run(tmp_path / "bad", dict(recipe="tensorwise")))
    assert bad[0]["fp8_lost"] > 0.9 and "layers.0.self_attn" in bad[0]["fp8_worst"]
    cured = trained(outlier_run(tmp_path / "cured", dict(recipe="tensorwise", max_lost=0.5)))
    told = [name for r in cured if "fp8_fell_back" in r for name in r["fp8_fell_back"]]
    assert set(told) == {"model.layers.0.self_attn.q_proj+k_proj+v_proj", "model.layers.0.self_attn.o_proj"}
    assert "goes on in bf16: casts lost 9" in (tmp_path / "cured/log.txt").read_text()
    off = [np.abs(np.array(losses(rows)) - truth) for rows in (bad, cured)]
    assert off[0].min() > 0.1 and off[1][:2].min() > 0.1 and off[1][5:].max() == 0, off
    assert np.abs(truth - plain).mean() < 0.5 * np.abs(np.array(losses(bad)) - plain).mean()


# ---- moments of the optimizer --------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["bf16", "fp8", "8bit"])
def test_a_run_with_narrow_moments_goes_on_to_the_bit(tmp_path, moments):
    def run(name: str, **train) -> Run:
        made = run_of(tmp_path / name, None, **train)
        return replace(made, optim=replace(made.optim, moments=moments))

    whole = losses(trained(run("whole")))
    trained(run("halves", steps=6))
    assert losses(trained(run("halves"))) == whole != losses(trained(run_of(tmp_path / "wide", None)))
    [file] = (tmp_path / "whole/checkpoints/step-00000012/state").glob("rank-*.safetensors")
    dtypes = {key.partition("/")[0] if "/" in key else key.split(".")[0]: t.dtype for key, t in load_file(file).items()}
    assert set(dtypes.values()) == {torch.float32, *([] if moments == "8bit" else [torch.bfloat16])}


@pytest.mark.parametrize("moments", ["bf16", "fp8"])
def test_narrow_moments_are_those_of_one_process(ranks, moments):
    run = parity.base_run("low", global_batch=4)
    run = replace(run, optim=OptimConfig(moments=moments), layout=LayoutConfig(tp=2, sharding=2))
    truth = parity.truth_of(ranks, run, 3, False)
    wide = parity.truth_of(ranks, replace(run, optim=OptimConfig()), 3, False)
    assert abs(truth["losses"][2][0] / wide["losses"][2][0] - 1) > 1e-6
    parity.compare(ranks.run("tests.harness.parity:run_layout", 4, run, 3), truth, 3)


def test_moments_in_bf16_take_half_the_memory():
    run = replace(parity.base_run("low", precision="bf16"), layout=LayoutConfig(tp=2))
    [wide], [narrow] = (
        rank_uses(make_plan(replace(run, optim=OptimConfig(moments=m)), 4), 4)[0] for m in ("master", "bf16")
    )
    assert (
        2 * narrow.memory["moments"] == wide.memory["moments"] and narrow.total == wide.total - narrow.memory["moments"]
    )


def test_moments_in_fp8_take_what_the_plan_says():
    run = replace(parity.base_run("low", precision="bf16"), optim=OptimConfig(moments="fp8"))
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    elements = sum(len(s.master) for s in state.optimizer.shards)
    assert rank_uses(plan, 4)[0][0].memory["moments"] == held(state)["moments"] == 2 * elements * 33 / 32
