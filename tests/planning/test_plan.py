"""Plan, FLOPs, memory and doctor: what is printed agrees with the published sizes, with torch's counters and with
real ranks."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.utils.flop_counter import FlopCounterMode

from phalanx.base.devices import find_device
from phalanx.cli import doctor
from phalanx.comm.dry import DryAxis, ring_bytes
from phalanx.comm.mesh import Mesh
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run
from phalanx.config.run import Fp8Config, Run, TrainConfig
from phalanx.data.loader import train_loader
from phalanx.data_parallel.base_storage import BaseStorage
from phalanx.engine.agree import ROOM_FOR_POOLS, room_for_pools
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import shadow_of, train_step
from phalanx.forecast.check import check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.flops import flops_of, mfu, mfu_lines, step_flops
from phalanx.forecast.memory import OVERHEAD, block_uses, fixed_bytes, fullest_moment, peak_on_host, rank_uses
from phalanx.forecast.text import contents, num_parameters, plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.models.deepseek_v3 import DeepseekV3Config
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.gpt_neox import GPTNeoXConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.mamba2 import Mamba2Config
from phalanx.models.qwen2 import Qwen2Config
from phalanx.models.qwen3 import Qwen3Config
from phalanx.nn.adapter import find_adapter
from phalanx.nn.dry_run import Allocations, FusedAttention, KnownShapes, measure
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.recompute import PRESETS
from phalanx.nn.run_block import run_block
from phalanx.observe.out_of_memory import held
from phalanx.ops.quantized.base_bucket import stored_bytes
from phalanx.ops.quantized.base_formats import FORMATS
from phalanx.planning import blocks as planned
from phalanx.planning import plan as planning
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.planning.freeze import num_frozen
from phalanx.schedule.actions import Backward, Fetch, Forward, Offload
from phalanx.sequence.batch import Batch
from phalanx.verifying.compare import step_batches
from recipes import (
    deepseek_v3,
    gemma3_1b,
    gemma4_e2b,
    gpt3_175b,
    gpt_oss_20b,
    gpt_oss_120b,
    llama3_2_1b_sft,
    llama3_8b,
    llama3_8b_full_one_gpu,
    llama3_8b_qlora,
    llama3_8b_sft_lora,
    llama3_70b,
    llama3_70b_qlora,
    mistral_7b,
    mixtral_8x7b,
    olmo2_7b,
    phi3_mini,
    qwen2_5_7b,
    qwen3_8b,
    qwen3_30b_a3b,
    qwen3_30b_a3b_lora,
    qwen3_235b_a22b,
)
from tests.harness.sample import covering, features, rest_in_soak

H200 = find_device("NVIDIA H200")

# ---- FLOPs


def llama_run(layers: int, batch: int, seq: int, hidden: int, inner: int, heads: int, kv: int) -> Run:
    model = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128,
    )
    return Run(
        model=model, train=TrainConfig(steps=1, global_batch=batch, micro_batch=1, seq_length=seq, precision="bf16")
    )


def test_flops_of_deepseek_v3():
    """Truth: 1,635 TFLOP/s at 6,288 tokens/s of each GPU at 4,096 tokens (Megatron-Bridge's performance summary,
    August 2026), to 0.5 %.

    Counted: matmuls of attention, router, chosen and shared experts, head, and the module that predicts one token
    further with a head of its own (4 % of all); causal attention as half the square. Without that module it would be
    250.4.
    """
    flops = flops_of(deepseek_v3.run()).per_token
    assert flops == pytest.approx(1635e12 / 6288, rel=5e-3)
    alone = replace(deepseek_v3.run(), model=replace(deepseek_v3.run().model, num_nextn_predict_layers=0))
    attention, of_a_token = 128 * (192 + 128) * 4096 / 2, LATENT - 1536 - 512 - 2 * 7168 + 9 * EXPERT + 256 * 7168
    assert flops - flops_of(alone).per_token == pytest.approx(
        6 * (attention + of_a_token + 2 * 7168**2 + 129280 * 7168), rel=1e-9
    )


@pytest.mark.parametrize(
    "run, flop",
    [
        (llama_run(8, 8, 8192, 4096, 14336, 32, 8), 9.982e14),
        (llama_run(32, 16, 8192, 4096, 14336, 32, 8), 6.746e15),
        (llama_run(32, 16, 4096, 2048, 8192, 16, 8), 1.0005e15),
    ],
    ids=["W1", "W2", "W5"],
)
def test_flops_of_the_measured_workloads(run, flop):
    """The numbers that every peer was measured with (benchmarks' one formula)."""
    assert step_flops(run) == pytest.approx(flop, rel=1e-4)


SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}

MODELS = {
    "llama": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=12,
    ),
    "qwen3": Qwen3Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
    ),
    "qwen2": Qwen2Config(
        **SIZES,
        num_key_value_heads=2,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        first_k_dense_replace=3,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,  # one width: else CPUs have no fused kernel
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(
        vocab_size=640, hidden_size=64, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=128
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_flops_agree_with_torchs_counter(family):
    """The counter sees the whole square of attention (the formula: half) and the logits that our loss makes a second
    time."""
    run = Run(model=MODELS[family], train=TrainConfig(steps=1, global_batch=2, micro_batch=2, seq_length=128))
    ids = torch.zeros(256, dtype=torch.int64, device="meta")
    batch = Batch(ids, ids, ids, ids, 2, 128)
    blocks = make_blocks(run.model, Env(), range(num_blocks(run.model)))
    with FlopCounterMode(display=False) as counter:
        x = torch.empty(0, device="meta")
        for block in blocks:
            x = block(x, batch)
        x.backward()
    f = flops_of(run)
    other_half = 6 * f.attention * 128 * 256
    logits_again = 2 * run.model.vocab_size * run.model.hidden_size * 256
    assert counter.get_total_flops() == pytest.approx(step_flops(run) + other_half + logits_again, rel=0.01)
    assert other_half > 0.02 * step_flops(run) and logits_again > 0.02 * step_flops(run)  # the corrections matter here


@pytest.mark.parametrize("window", [1, 5, 31, 32, 40])
def test_flops_of_a_window_count_the_keys_that_are_read(window):
    """Truth: keys counted query by query, of a query's own half (so that a whole triangle is half a square); two of
    three layers have it."""
    model = Qwen2Config(
        vocab_size=640,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=8,
        sliding_window=window,
        max_window_layers=1,
    )
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=32)
    keys = sum(min(i + 0.5, window) for i in range(32)) / 32
    run, full = (
        Run(model=model, train=train),
        Run(model=replace(model, sliding_window=None, max_window_layers=0), train=train),
    )
    fewer = flops_of(full).per_token - flops_of(run).per_token
    assert fewer == pytest.approx(2 * 12 * (16 - keys) * 64, rel=1e-12)


def test_mfu_and_its_line():
    run = llama_run(8, 8, 8192, 4096, 14336, 32, 8)
    assert mfu(run, 65536 / 1.746, H200) == pytest.approx(0.578, abs=5e-4)  # Megatron on W1: 1746 ms, 57.8 %
    assert (
        mfu(run, 1e4, None) is None and mfu(replace(run, train=replace(run.train, precision="fp64")), 1e4, H200) is None
    )
    flop, how = mfu_lines(run, 4, H200, "NVIDIA H200")
    assert flop == "9.982e+14 FLOP per step (`phalanx plan` shows the formula)"
    assert how == "mfu = FLOP / (step_s * 4 * 989e12 FLOP/s of H200)"
    formula = "6*N*T + 6*A*S*T = 9.982e+14 FLOP with N=2.27e+09 A=3.277e+04 S=8192 T=65536"
    assert formula in flops_of(run).text(65536)
    assert "no mfu: no bf16 peak of 'Voodoo 2' in" in mfu_lines(run, 1, None, "Voodoo 2")[1]
    assert len(mfu_lines(run, 1, None, "CPU")) == 1
    assert all(len(line) <= 80 for line in (flop, how))


@pytest.mark.parametrize(
    "name, found",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA L40", None),
    ],
)
def test_devices_by_the_names_drivers_give(name, found):
    device = find_device(name)
    assert (device.name if device else None) == found


# ---- memory and communication


def small(precision: str = "fp32", recompute: str = "none", **layout) -> Run:
    run = load_run("recipes/tiny_llama.yaml")
    return replace(
        run,
        layout=LayoutConfig(**layout),
        train=replace(run.train, precision=precision, recompute=recompute, device="cpu"),
    )


COUNTED_AS = {"etp": "ep", "edp": "dp"}  # whose bytes a plan counts as those of


def rank_reality(rank: int, world: int, run: Run) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """One real step: bytes of the flat buffers after it and when they were most, and bytes this rank sent per axis
    as rings count them."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    init_weights(state.model)
    loader = train_loader(
        run.data,
        seq_length=run.train.seq_length,
        seed=1,
        vocab_size=run.model.vocab_size,
        samples=run.train.global_batch,
    )
    most = [held(state)]

    def watched(handler):
        def run(instruction) -> None:
            handler(instruction)
            most.append(held(state))

        return run

    state.model.handlers = {kind: watched(handler) for kind, handler in state.model.handlers.items()}

    def decoding(storage) -> None:
        decode(storage)
        most.append(held(state))  # while gathered bytes are still there

    decode, BaseStorage.decode = BaseStorage.decode, decoding
    try:
        return one_real_step(run, state, mesh, loader, most)
    finally:
        BaseStorage.decode = decode


def one_real_step(run, state, mesh, loader, most):
    fp8, batches = run.train.fp8, step_batches(run, loader, mesh, 0)
    shadow = shadow_of(state, batches) if fp8 is not None and fp8.shadow_interval is not None else {}
    if state.model.fp8 is not None and fp8 is not None:
        state.model.fp8.turn(over=fp8.last_steps > 0)
        state.model.fp8.renew()  # a step finds codes of its weights, and leaves those of the next
    mesh.watch.on = True
    train_step(state, batches, lr=1e-3)
    state.buffers.ready()
    sizes = {axis.name: axis.size for axis in mesh.axes}
    sent: dict[str, float] = {}
    for site, (_, nbytes) in mesh.watch.calls.items():
        axis = "pp" if site.axis.startswith("edge") else COUNTED_AS.get(site.axis.split()[0], site.axis.split()[0])
        n = sizes[site.axis]
        whole = nbytes * n if site.op == "all_gather" else nbytes
        if not (site.op == "send" and site.axis.endswith(f">{mesh.at.pp}")):
            sent[axis] = sent.get(axis, 0.0) + (nbytes if site.op in ("send", "hop") else ring_bytes(site.op, whole, n))
    kept = {"shadow": sum(t.nbytes for t in shadow.values())} if shadow else {}
    return {**held(state), **kept}, {**max(most, key=lambda h: sum(h.values())), **kept}, sent


def based(run: Run, base: str) -> Run:
    return replace(run, lora=find_adapter("lora").Config(rank=4, base=base))


def frozen(run: Run, *globs: str) -> Run:
    return replace(run, train=replace(run.train, freeze=list(globs)))


def coded(run: Run, **fp8) -> Run:
    return replace(run, train=replace(run.train, fp8=Fp8Config(**fp8)))


def placed(run: Run) -> Run:
    return replace(run, train=replace(run.train, cuda_graphs="on"))


def tiny(family: str, **layout) -> Run:
    run = load_run(f"recipes/tiny_{family}.yaml")
    return replace(run, layout=LayoutConfig(**layout), train=replace(run.train, precision="fp32", device="cpu"))


LAYOUTS = {
    "tp2 dp2": (small(tp=2), 4),
    "pp2 dp2 in bf16": (small("bf16", pp=2), 4),
    "tp2 pp2, full recompute, level 0": (small("bf16", "full", tp=2, pp=2, sharding=0), 8),
    "cp2 tp2 dp2 in bf16": (small("bf16", cp=2, tp=2), 8),
    "cp4, level 0": (small(cp=4, sharding=0), 4),
    "cp4, all-gather": (small(cp=4, cp_attention="allgather"), 4),
    "cp4, heads in pairs": (small("bf16", cp=4, cp_ulysses=2), 4),
    "mixtral ep2, tp2 pp2 by all-gather": (
        tiny("mixtral", pp=2, tp=2, ep=2, dispatch="allgather", expert_room=math.inf),
        8,
    ),
    "qwen3_moe ep2 x etp2, edp2, level 0": (
        tiny("qwen3_moe", ep=2, etp=2, dispatch="allgather", expert_room=math.inf, sharding=0),
        8,
    ),
    "tied gpt2 pp2": (replace(load_run("recipes/tiny_gpt2.yaml"), layout=LayoutConfig(pp=2)), 2),
    "level 2, tied gpt2 pp2 dp2": (
        replace(load_run("recipes/tiny_gpt2.yaml"), layout=LayoutConfig(pp=2, sharding=2, bucket_mb=0)),
        4,
    ),
    "level 2, dp4 in bf16": (small("bf16", sharding=2, bucket_mb=0, prefetch=0), 4),
    "level 2, tp2 dp4 in pairs, optimizer over both": (
        small("bf16", tp=2, sharding=2, shard_group=2, shard_across="optimizer", bucket_mb=0),
        8,
    ),
    "level 1, dp4 in pairs": (small("bf16", sharding=1, shard_group=2), 4),
    "level 3, dp4 in bf16": (small("bf16", sharding=3, bucket_mb=0), 4),
    "level 3, dp4 in bf16, by copies": (small("bf16", sharding=3, bucket_mb=0, dp_overlap="on"), 4),
    "level 1, tp2 dp2 in FP8, by copies": (
        coded(small("bf16", tp=2, bucket_mb=0, dp_overlap="on"), recipe="tensorwise"),
        4,
    ),
    "level 3, dp4 in bf16, attention and the embedding frozen": (
        frozen(small("bf16", sharding=3, bucket_mb=0), "*attn*", "*embed_tokens*"),
        4,
    ),
    "level 1, dp2 in FP8, codes gathered": (coded(small("bf16", bucket_mb=0), recipe="tensorwise"), 2),
    "level 2, tp2 dp2 in FP8, codes gathered, a layer left out": (
        coded(small("bf16", tp=2, sharding=2, bucket_mb=0), recipe="tensorwise", exclude=["*.1.*"]),
        4,
    ),
    "level 3, dp4 in pairs in FP8, optimizer over both": (
        coded(small("bf16", sharding=3, shard_group=2, shard_across="optimizer", bucket_mb=0), recipe="tensorwise"),
        4,
    ),
    "level 3, dp2 in FP8, places of CUDA graphs": (
        placed(coded(small("bf16", sharding=3, bucket_mb=0), recipe="tensorwise")),
        2,
    ),
    "level 1, tp2 dp2 in FP8, with a shadow, the last step in bf16": (
        coded(
            small("bf16", tp=2, bucket_mb=0), recipe="tensorwise", shadow_interval=2, last_steps=1, exclude=["*.1.*"]
        ),
        4,
    ),
    "level 2, dp2 in FP8, the last step in bf16": (
        coded(small("bf16", sharding=2, bucket_mb=0), recipe="tensorwise", last_steps=1),
        2,
    ),
    "level 3, dp2 in FP8, with a shadow, the last step in bf16": (
        coded(small("bf16", sharding=3, bucket_mb=0), recipe="tensorwise", shadow_interval=2, last_steps=1),
        2,
    ),
    "level 3, dp2 in FP8, places of CUDA graphs, the last step in bf16": (
        placed(coded(small("bf16", sharding=3, bucket_mb=0), recipe="tensorwise", last_steps=1)),
        2,
    ),
    "level 3, dp4 in bf16, places of CUDA graphs": (placed(small("bf16", sharding=3, bucket_mb=0)), 4),
    "level 2, tp2 pp2 dp2 in bf16, places of CUDA graphs": (
        placed(small("bf16", tp=2, pp=2, sharding=2, bucket_mb=0)),
        8,
    ),
    "level 2, tp2 dp2 in bf16, attention and the embedding frozen": (
        frozen(small("bf16", tp=2, sharding=2, bucket_mb=0), "*attn*", "*embed_tokens*"),
        4,
    ),
    "level 3, tp2 pp2 dp2, kept until the step's end": (
        small(tp=2, pp=2, sharding=3, bucket_mb=0, reshard_after_forward=False),
        8,
    ),
    "level 3, pp2 dp2, split backward": (small("bf16", pp=2, schedule="zb_h1", sharding=3, bucket_mb=0), 4),
    "level 3, tied gpt2 pp2 x 2 virtual stages, dp2, prefetch 2": (
        replace(
            load_run("recipes/tiny_gpt2.yaml"),
            layout=LayoutConfig(pp=2, virtual_stages=2, sharding=3, bucket_mb=0, prefetch=2),
        ),
        4,
    ),
    "level 3, dp4 in pairs, optimizer over both": (
        small("bf16", "full", sharding=3, shard_group=2, shard_across="optimizer", bucket_mb=0),
        4,
    ),
    **{
        f"level {level}, {base} base": (based(small("bf16", sharding=level, bucket_mb=0), base), 2)
        for base in FORMATS
        for level in (0, 3)
    },
    "level 3, nf4 base, kept until the step's end": (
        based(small("bf16", tp=2, sharding=3, bucket_mb=0, reshard_after_forward=False), "nf4"),
        4,
    ),
    "level 3, nf4 base, places of CUDA graphs": (placed(based(small("bf16", sharding=3, bucket_mb=0), "nf4")), 2),
    "level 1, pp2, int8 base, places of CUDA graphs": (
        placed(based(small("bf16", pp=2, sharding=1, bucket_mb=0), "int8")),
        4,
    ),
    "level 3, nf4 base of mixtral, ep2": (
        based(
            replace(load_run("recipes/tiny_mixtral.yaml"), layout=LayoutConfig(ep=2, sharding=3, bucket_mb=0)), "nf4"
        ),
        4,
    ),
    "level 3, mixtral edp2 x ep2, tp2": (
        replace(load_run("recipes/tiny_mixtral.yaml"), layout=LayoutConfig(tp=2, ep=2, sharding=3, bucket_mb=0)),
        4,
    ),
}


@pytest.mark.parametrize("sharding", [1, 2, 3])
@pytest.mark.parametrize("fp8", [dict(shadow_interval=2), dict(max_lost=0.5)], ids=str)
def test_weights_kept_as_codes_have_room_for_their_values(fp8, sharding):
    """Truth: the forecast for train.fp8.last_steps, which a real step has below; without any of them nothing comes
    back."""
    run = small("bf16", sharding=sharding, bucket_mb=0)
    forecast = [
        rank_uses(make_plan(coded(run, recipe="tensorwise", **c), 2), 1)[0][0].memory["weights"]
        for c in (fp8, dict(last_steps=1), {})
    ]
    assert forecast[0] == forecast[1] > forecast[2]


SAMPLE = covering(
    {name: features(run) for name, (run, _) in LAYOUTS.items()}, {name: world for name, (_, world) in LAYOUTS.items()}
)


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, SAMPLE))
def test_bytes_agree_with_a_real_step(ranks, name):
    run, world = LAYOUTS[name]
    plan = make_plan(run, world)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    for rank, (rest, most, sent) in enumerate(ranks.run("tests.planning.test_plan:rank_reality", world, run)):
        at = plan.grid.coords(rank)
        if at.tp == 0 and at.cp == plan.grid.cp - 1:
            use = uses[at.pp]
            assert {k: use.memory[k] for k in most} == most
            assert {k: use.memory[k] - use.passing.get(k, 0) for k in rest} == rest
            stays = run.layout.sharding < 2 or plan.fixed_slots
            if run.lora is not None:  # of quantized weights, what is decoded has slots; gathered bytes have none
                stays = plan.fixed_slots and run.layout.sharding < 3
            assert stays == (rest == most)
            if run.train.fp8 is not None and run.train.fp8.last_steps:
                continue  # what is sent is forecast of steps in the recipe
            for axis, nbytes in use.sent.items():
                assert nbytes == pytest.approx(sent.get(axis, 0.0), rel=1e-6, abs=64), axis  # abs: token counts


KEPT = MODELS | {
    "mamba2": Mamba2Config(
        vocab_size=640, hidden_size=64, num_hidden_layers=3, num_heads=4, head_dim=32, n_groups=2, state_size=16
    )
}


@pytest.mark.parametrize("recompute", ["none", "pointwise", "selective", "full"])
@pytest.mark.parametrize("family", KEPT)
def test_measured_on_meta_as_on_a_device(family, recompute):
    """The same block on the meta device and with real tensors, whose attention is a real fused kernel."""
    env, recomputed = Env(weights=WeightRules(dtype=torch.float32)), frozenset(PRESETS[recompute])

    def kept(device: str) -> int:
        (block,) = make_blocks(KEPT[family], env, range(1, 2))
        block.recomputed = recomputed
        if device == "cpu":
            block = block.to_empty(device="cpu")
        ids = torch.zeros(256, dtype=torch.int64, device=device)
        batch = Batch(ids, ids, ids, ids, 2, 128)

        def new_input():
            return torch.zeros(256, 64, device=device)

        with torch.no_grad(), FusedAttention() if device == "meta" else nullcontext():
            run_block(block, new_input(), batch)  # what all layers share (rotary table) is not this block's
        if device == "meta":
            return measure(lambda x: run_block(block, x, batch), new_input, block.parameters(), torch.float32).kept
        with Allocations() as seen:
            y = run_block(block, new_input().requires_grad_(), batch)
            return seen.live - y.untyped_storage().nbytes()

    meta, real = kept("meta"), kept("cpu")
    assert meta == pytest.approx(real, rel=0.02)
    if recompute == "full":
        assert meta == 256 * 64 * 4  # the input alone
    if (
        recompute == "pointwise"
    ):  # the norms' outputs (two of the width, two of latents) and the MLP's product are not kept
        recomputed = frozenset()
        inner = KEPT[family].intermediate_size or 4 * 64  # of mamba2 the norm behind the gate
        # and the scales of the two norms, or of the norm by two groups, which run again whole
        latents = {"deepseek_v3": 24 + 16 + 2, "mamba2": 2}.get(family, 0)
        norms = 1 if family == "mamba2" else 2
        assert kept("meta") - meta == 256 * 4 * (norms * 64 + inner + latents)


def test_allocations_count_a_storage_once_and_forget_it():
    with Allocations() as seen:
        a = torch.empty(1000, device="meta")
        b = a.view(10, 100)[3:]
        assert seen.live == 4000
        c = a + 1
        assert seen.live == seen.peak == 8000
        del a, c
        assert seen.live == 4000 and seen.peak == 8000
        del b
        assert seen.live == 0


def test_ops_of_known_shapes_are_not_asked_again():
    """What is made anew looks as before and is other memory; views, changes in place and other inputs go to the op
    itself."""
    x, y = torch.empty(6, 4, device="meta"), torch.empty(4, 6, dtype=torch.bfloat16, device="meta").t()

    def once(x):
        new = [
            x + y,
            x * 2,
            x > 0,
            x.sum(0),
            x.transpose(0, 1).contiguous(),
            *torch.max(x, 1),
            x.to(torch.bfloat16),
            torch.empty_like(y),
        ]
        return new, [x.view(4, 6), x[1:], x.add_(1), *x.split(2)]

    with KnownShapes() as known, Allocations() as seen:
        first, views = once(x)
        size, live = len(known._made), seen.live
        second, recomputed = once(x)
        assert len(known._made) == size and seen.live == 2 * live
        others, _ = once(x.double())
    storages = {t.untyped_storage()._cdata for t in first + second}
    assert len(storages) == len(first + second) and all(
        t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in views + recomputed
    )
    assert [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in first + views] == [
        (t.shape, t.stride(), t.dtype, t.storage_offset()) for t in second + recomputed
    ]
    assert others[0].dtype == torch.float64 and recomputed[2] is x


def test_a_stage_without_flops_is_planned():
    run = load_run("recipes/tiny_llama.yaml", ["layout.pp=2", "layout.stages=[1,5]", "train.recompute=full"])
    assert "embedding: block" in plan_text(run, 2)


@pytest.mark.parametrize("dtype, sums", [(torch.bfloat16, 3 * 2), (torch.float32, 0)])
def test_backward_of_attention_adds_up_in_fp32(dtype, sums):
    """Beside output, its gradient, and those of q, k and v, backward has what flash kernels add narrow gradients up
    in."""
    q, k, v = (torch.empty(1, 2, 64, 32, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    with Allocations() as seen, FusedAttention():
        out = F.scaled_dot_product_attention(q, k, v)
        kept = seen.live
        _engine_run_backward(
            (out,), (torch.empty_like(out),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    assert seen.peak - kept == (1 + 3 + sums) * q.nbytes


def test_working_memory_of_the_head_holds_a_chunk_of_logits():
    run = llama_run(2, 1, 1024, 256, 512, 2, 2)
    uses, _ = rank_uses(make_plan(run, 1), 1)
    logits = 1024 * 128256 * 4
    assert logits < uses[0].memory["working"] < 6 * logits


def test_dry_axis_gives_the_shapes_and_bytes_of_a_ring():
    axis = DryAxis("tp", 4)
    x = torch.empty(8, 3, dtype=torch.bfloat16, device="meta")
    assert axis.all_gather(x).wait().shape == (32, 3) and axis.reduce_scatter(x).wait().shape == (2, 3)
    axis.all_reduce(x)
    assert axis.sent == {"all_gather": 3 * 48, "reduce_scatter": 36, "all_reduce": 72}
    alone = DryAxis("tp", 1)
    assert alone.all_gather(x).wait() is x and alone.reduce_scatter(x).wait() is x and not sum(alone.sent.values())


def test_the_fullest_moment_of_a_rank():
    """Two stages, the first of two runs, two micro-batches: by hand. What leaves is there while the next run
    computes, what comes back too."""
    runs, moved = {0: [(10, 5), (20, 1)], 4: [(100, 50)]}, {0: {0: 8, 1: 0}, 4: {0: 0}}
    first = [Forward(0, 0, 0), Forward(0, 1, 0), Forward(0, 0, 1), Forward(4, 0, 0), Backward(4, 0, 0)]
    then = [Forward(0, 1, 1), Backward(0, 1, 0), Backward(0, 0, 0), Backward(0, 1, 1), Backward(0, 0, 1)]
    assert fullest_moment(first + then, runs, moved) == (10 + 20 + 10 + 100, 50)
    away = [*first[:1], Offload(0, 0, 0), *first[1:], *then[:1], Fetch(0, 0, 0), *then[1:]]
    assert fullest_moment(away, runs, moved) == (140 - 8, 50) and peak_on_host(away, moved) == 8
    assert fullest_moment(first[:1] + [Offload(0, 0, 0)] + first[1:2], runs, moved) == (10 + 20, 1)


# ---- recipes and their text

GPT3 = 50257 * 12288 + 2048 * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288

# DeepSeek-V3, tensor by tensor: latent attention with its norms, an expert, what surrounds them in layers with a dense
# MLP and with experts
LATENT = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512 + 2 * 7168
EXPERT = 3 * 7168 * 2048
SPARSE = LATENT + 257 * EXPERT + 256 * 7168
DEEPSEEK_V3 = 2 * 129280 * 7168 + 7168 + 3 * (LATENT + 3 * 7168 * 18432) + 58 * SPARSE  # the published 671 B
DEEPSEEK_V3 += SPARSE + 2 * 7168**2 + 3 * 7168  # the module that predicts one token further

# rank 16 x (inputs + outputs) of q, k, v, o, gate, up and down
LORA_8B = 32 * 16 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
LORA_30B = 48 * 8 * (2 * 6144 + 2 * (2048 + 512) + 128 * 3 * (2048 + 768))  # and rank 8 on each expert
LORA_70B = 80 * 16 * (2 * 16384 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
RECIPES = {
    "llama3_8b on 8": (llama3_8b.run(), 8, 8_030_261_248),
    "llama3_8b on 4": (llama3_8b.run(gpus=4), 4, 8_030_261_248),
    "llama3_8b on 1": (llama3_8b.run(gpus=1), 1, 8_030_261_248),
    "llama3_8b_full_one_gpu": (llama3_8b_full_one_gpu.run(), 1, 8_030_261_248),
    "llama3_2_1b_sft": (llama3_2_1b_sft.run(), 1, 1_235_814_400),
    "llama3_8b_sft_lora": (llama3_8b_sft_lora.run(), 1, 8_030_261_248 + LORA_8B),
    "llama3_8b_qlora": (llama3_8b_qlora.run(), 1, 8_030_261_248 + LORA_8B),
    "llama3_70b_qlora": (llama3_70b_qlora.run(), 1, 70_553_706_496 + LORA_70B),
    "qwen3_30b_a3b_lora": (qwen3_30b_a3b_lora.run(), 1, 30_532_122_624 + LORA_30B),
    "llama3_70b on 128": (llama3_70b.run(), 128, 70_553_706_496),
    "llama3_70b, 2 virtual stages": (llama3_70b.run(virtual_stages=2), 128, 70_553_706_496),
    "llama3_70b on 1024": (llama3_70b.run(), 1024, 70_553_706_496),
    "olmo2_7b on 8": (olmo2_7b.run(), 8, 7_298_617_344),
    "gemma3_1b on 8": (gemma3_1b.run(), 8, 999_885_952),
    "gemma4_e2b on 8": (gemma4_e2b.run(), 8, 4_628_569_344),  # transformers' Gemma4ForCausalLM has as many
    "phi3_mini on 8": (phi3_mini.run(), 8, 3_821_079_552),
    "qwen3_8b on 8": (qwen3_8b.run(), 8, 8_190_735_360),
    "mistral_7b on 8": (mistral_7b.run(), 8, 7_241_732_096),
    "qwen2_5_7b on 8": (qwen2_5_7b.run(), 8, 7_615_616_512),
    "deepseek_v3 on 2048": (deepseek_v3.run(), 2048, DEEPSEEK_V3),
    "gpt3_175b on 128": (gpt3_175b.run(), 128, GPT3),
    "mixtral_8x7b on 64": (mixtral_8x7b.run(), 64, 46_702_792_704),
    "qwen3_30b_a3b on 8": (qwen3_30b_a3b.run(), 8, 30_532_122_624),
    "qwen3_235b_a22b on 64": (qwen3_235b_a22b.run(), 64, 235_093_634_560),
    "qwen3_235b_a22b on 256": (qwen3_235b_a22b.run(), 256, 235_093_634_560),
    "gpt_oss_20b on 8": (gpt_oss_20b.run(), 8, 20_914_757_184),
    "gpt_oss_120b on 64": (gpt_oss_120b.run(), 64, 116_829_156_672),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    run, world, parameters = RECIPES[name]
    assert [
        str(p) for p in check(run, Facts(world_size=world, local_ranks=min(world, 8), files=False, device="cuda"))
    ] == []
    assert num_parameters(make_plan(run, world)) == parameters
    start = time.process_time()
    text = plan_text(run, world, H200)
    assert time.process_time() - start < 20  # a few seconds, on a machine that others use too
    assert f"{parameters:,}" in text and max(len(line) for line in text.splitlines()) <= 100
    verdict = "DOES NOT FIT" if name == "llama3_8b on 1" else "fits H200"  # 18 bytes per parameter are 145 GB
    assert verdict in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_all_weights_of_8b_on_one_gpu():
    """By hand: 2 bytes a weight; 2 and a bit of 8 for its master; 1 and 4 of 64 for each moment; gradients of the
    embedding, the largest bucket."""
    text, numel = plan_text(llama3_8b_full_one_gpu.run(), 1, find_device("H100")), 8_030_261_248
    assert "It fits H100" in text
    uses, _ = rank_uses(make_plan(llama3_8b_full_one_gpu.run(), 1), 1)
    memory = uses[0].memory
    assert memory["weights"] == 2 * numel
    assert memory["masters"] == memory["moments"] == numel * 17 / 8
    assert memory["gradients"] == 4 * (128256 * 4096 + 4096)  # with the last norm, in the head's


def test_base_of_4_bits():
    """By hand: 4 bits a weight, 8 of 64 and 32 of 64 x 256 for scales; of 8B the embedding, head and norms in bf16. 70B
    on one GPU of 80 GB; on four, a rank keeps a fourth of the base."""
    linears, rest = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336), 2 * 128256 * 4096 + 65 * 4096
    assert linears + rest == 8_030_261_248
    plan = make_plan(llama3_8b_qlora.run(), 1)
    kept = [b for b in plan.rank(0).buckets if b.base_format is not None]
    by_hand = linears * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 4 * 32 * 7  # and an offset for each matrix
    assert sum(map(stored_bytes, kept)) == pytest.approx(by_hand, abs=32 * (7 * 16 + 64))  # alignment
    uses, _ = rank_uses(plan, 16)
    segment = max(b.numel for b in kept)
    assert uses[0].memory["weights"] == sum(map(stored_bytes, kept)) + 2 * (segment + rest + LORA_8B)
    text = plan_text(llama3_70b_qlora.run(), 1, find_device("H100"))
    gib = 80 * (8192 * (8192 + 1024) * 2 + 3 * 8192 * 28672) * (4 + 8 / 64 + 32 / (64 * 256)) / 8 / 2**30
    assert f"linears in nf4, 4.13 bits a weight, {gib:.2f} GiB per rank" in text and "It fits H100" in text
    assert f" {gib / 4:.2f} GiB per rank" in plan_text(llama3_70b_qlora.run(gpus=4), 4, find_device("H100"))


def test_one_gpu_of_the_8b_recipe():
    assert "It fits B200 (180 GB)." in plan_text(llama3_8b.run(gpus=1), 1)
    assert "fits H200" in plan_text(llama3_8b.run(gpus=1, layers=8), 1, H200)
    with pytest.raises(ValueError, match="1, 4 or 8"):
        llama3_8b.run(gpus=3)


def test_plan_of_70b():
    run = llama3_70b.run()
    plan = make_plan(run, 128)
    assert [len(s) for s in plan.stages] == [21, 21, 20, 20]  # embedding + 20 | 21 | 20 | 19 + head
    assert [contents(plan, s) for s in plan.stages] == [
        "embedding, layers 0-19",
        "layers 20-40",
        "layers 41-60",
        "layers 61-79, head",
    ]
    uses, trace = rank_uses(plan, 64)
    assert [u.live for u in uses] == [4, 3, 2, 1] and trace.bubble < 0.08
    assert uses[0].memory["weights"] == pytest.approx(2 * 70_553_706_496 / 16, rel=0.03)
    assert (
        uses[0].memory["gradients"] == 2 * uses[0].memory["weights"]
        and uses[0].memory["moments"] == uses[0].memory["gradients"] * 2 // 8
    )
    text = plan_text(run, 128)
    assert "128 = pp 4 x dp 8 x tp 4" in text and "rank 3 |" in text and "fits" in text
    assert f"{max(u.total for u in uses) / 2**30:.2f}" in text and OVERHEAD == 2 * 2**30


def test_plan_of_kernels_that_do_not_run_here():
    """Truth: the plan of the same run with the reference chosen by itself, but for the line that says what is asked."""
    chosen = [
        load_run("recipes/tiny_llama.yaml", [f"train.kernels={kernels}", "layout.tp=2"])
        for kernels in ("auto", "triton")
    ]
    auto, triton = (plan_text(run, 2).splitlines() for run in chosen)
    assert [line for line in triton if line not in auto] == ["kernels         triton"]
    assert [line for line in triton if line in auto] == auto


def test_every_full_recipe_is_planned():
    assert {p.stem for p in Path("recipes").glob("*.py")} - {"__init__"} == {
        name.split()[0].rstrip(",") for name in RECIPES
    }


@pytest.mark.parametrize("name", sorted(p.stem for p in Path("recipes").glob("tiny_*.yaml")))
def test_tiny_recipes(name):
    run = load_run(f"recipes/{name}.yaml")
    assert check(run, Facts(files=False)) == []
    assert "1 = pp 1 x dp 1 x tp 1" in plan_text(run, 1)
    if run.model.routed_experts:
        spread = replace(run, layout=LayoutConfig(tp=2, ep=4))
        assert check(spread, Facts(world_size=4, files=False)) == []
        assert "experts edp 1 x ep 4 x etp 1" in plan_text(spread, 4)


# TFLOP/s and tokens/s of one GPU at 4,096 tokens, as Megatron-Bridge publishes them
# (docs/performance-summary-archive.md, container 26.06, and docs/performance-summary.md, 26.08): what their framework
# counts for a token. Routed experts count as many times as a token chooses, the router and the head count, causal
# attention counts as half the square; embedding, norms and recompute do not.
PUBLISHED = {
    "qwen3_30b_a3b": [(1041, 45275), (936, 40706), (938, 40769), (1029, 44544), (923, 39936), (203, 8826)],
    "qwen3_235b_a22b": [(1335, 9015), (1092, 7376), (1306, 8816), (1077, 7280)],
}


@pytest.mark.parametrize("recipe", [qwen3_30b_a3b, qwen3_235b_a22b])
def test_flops_of_experts_are_those_that_others_count(recipe):
    for tera, tokens in PUBLISHED[recipe.__name__.removeprefix("recipes.")]:
        assert flops_of(recipe.run()).per_token == pytest.approx(tera * 1e12 / tokens, rel=5e-3)


def test_flops_of_experts_by_the_formula():
    """Truth: weights that a token meets, counted by hand for Qwen3-30B-A3B, times 6, and 6 * layers * heads *
    head_dim * S."""
    layer = 2048 * 128 * (32 + 4 + 4 + 32) + 128 * 2048 + 8 * 3 * 2048 * 768
    by_hand = 6 * (48 * layer + 151936 * 2048) + 6 * 48 * 32 * 128 * 4096
    assert flops_of(qwen3_30b_a3b.run()).per_token == pytest.approx(by_hand, rel=1e-12)


# ---- doctor


def test_doctor():
    start = time.process_time()
    text = doctor.report()
    assert time.process_time() - start < 3
    for word in (
        "phalanx",
        "torch",
        torch.__version__,
        "attention",
        "AdamW",
        "triton",
        "tensorboard",
        "wandb",
        "open files",
        "GiB available",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120


def test_doctor_says_what_a_missing_package_costs(monkeypatch):
    monkeypatch.setitem(doctor.OPTIONAL, "no-such-package", "log.nothing=true")
    assert ("no-such-package", "not installed; without it: no log.nothing=true") in doctor.optional_packages()


def test_doctor_warns(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (256, 1024))
    assert any(name == "open files" and "256" in text for name, text in doctor.warnings())


def test_graphs_take_pools_where_memory_allows():
    """A stage has a pool for each micro-batch that is ever in flight in it (with one stage a rank these are what
    activations are anyway), and backward has one in which there is room for the largest layer at work."""
    run = load_run(
        "recipes/tiny_llama.yaml", ["model.num_hidden_layers=6", "train.global_batch=8", "train.micro_batch=1"]
    )
    one, several = (make_plan(replace(run, layout=LayoutConfig(pp=2, virtual_stages=v)), 2) for v in (1, 2))
    alone = make_plan(run, 1)
    at_work = max(use.bytes.working for use in block_uses(alone)[:-1])
    assert [use.pools for use in rank_uses(alone, 8)[0]] == [at_work]
    assert [use.pools for use in rank_uses(one, 8)[0]][0] == at_work
    uses, trace = rank_uses(several, 8)
    blocks = block_uses(several)
    for pp, use in enumerate(uses):
        most = {s: max(change.live for change in trace.live[pp] if change.stage == s) for s in several.stages_of(pp)}
        kept = {s: sum(blocks[b].bytes.kept for b in several.stages[s]) + fixed_bytes(several, s, blocks) for s in most}
        head = (most[3] - 1) * max(blocks[b].bytes.working for b in several.stages[3]) if pp == 1 else 0
        layers = [b for s in most for b in several.stages[s] if b < len(blocks) - 1]
        more = head + max(blocks[b].bytes.working for b in layers)
        assert use.pools == sum(most[s] * kept[s] for s in most) + more - use.memory["activations"] > at_work
    need = max(use.total + use.pools for use in uses) + OVERHEAD
    assert room_for_pools(several, int(need / ROOM_FOR_POOLS) + 1) and not room_for_pools(
        several, int(need / ROOM_FOR_POOLS) - 1
    )
    assert "pools of micro-batches in flight, if a tenth stays free" in plan_text(
        several.run, 2
    ) and "pools" not in plan_text(run, 1)


def test_a_plan_makes_blocks_once_to_decide(monkeypatch):
    """However many programs and forecasts are asked for, the blocks of each pipeline rank are made once for them; and
    the whole model once for its facts, for names that train.freeze and train.fp8 fit, and for shapes."""
    overrides = ["layout.pp=2", "layout.sharding=3", "train.cuda_graphs=on", "train.freeze=['*embed_tokens*']"]
    run, made, real = load_run("tiny-llama", [*overrides, "train.fp8.recipe=rowwise"]), [], planned.make_blocks
    for module in (planned, planning):
        monkeypatch.setattr(
            module, "make_blocks", lambda model, env, which: (made.append([*which]), real(model, env, which))[1]
        )
    planned.whole_model.cache_clear()
    planned.model_facts.cache_clear()
    planned.whole_linears.cache_clear()
    planned.cut_linears.cache_clear()
    plan, wider = make_plan(run, 4), replace(run, train=replace(run.train, seq_length=64))
    assert check(run, Facts(world_size=4, local_ranks=4, files=False)) == [] and make_plan(wider, 4).facts != plan.facts
    assert num_frozen(run) > 0 and plan.fp8_names and planned.exported_shapes(run.model)
    assert made == [list(range(len(plan.facts)))]
    uses = block_uses(plan)
    made.clear()
    for size in (2, 4):
        plan.proved_program(size)
        plan.proved_program(size, backward=False)
        rank_uses(plan, size, uses)
    plan.recomputing([frozenset({"norm"})] * len(plan.facts)).replicas(0)
    assert made == [[b for s in plan.stages_of(pp) for b in plan.stages[s]] for pp in (0, 1)]
    assert plan.slots and all(rank.buckets for rank in plan.ranks())
