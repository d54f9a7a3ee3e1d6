"""Our models against Hugging Face's: logits, loss and the gradient of every tensor in float64, from the same weights
by name."""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.checkpoint.hf import to_hf
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import State, build, write_slot
from phalanx.engine.step import accumulate, reduce_step_totals
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.decoder import rotation
from phalanx.models.decoder_config import DecoderConfig
from phalanx.models.deepseek_v3 import LatentConfig
from phalanx.models.falcon_h1 import FalconH1Config
from phalanx.models.gated_layers import GatedAttentionConfig
from phalanx.models.gemma2 import Gemma2Config
from phalanx.models.gemma3_text import Gemma3TextConfig
from phalanx.models.gemma4_text import Gemma4TextConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.kimi_linear import KimiLinearConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.llama4_text import Llama4TextConfig
from phalanx.models.mamba2 import Mamba2Config
from phalanx.models.model_config import ModelConfig
from phalanx.models.nemotron_h import NemotronHConfig
from phalanx.models.olmo3 import Olmo3Config
from phalanx.models.olmo_hybrid import OlmoHybridConfig
from phalanx.models.phi3 import Phi3Config
from phalanx.models.registry import family_of
from phalanx.models.rope import ROPE_FIELDS, RopeScaling
from phalanx.nn.head import Head
from phalanx.ops.dense.rope import rotary_table
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness import hf_fuzz
from tests.harness.parity import MODELS, SEQ, assemble, parts_of, sample_batch
from tests.harness.sample import each_in_two

CASES = {
    "llama: GQA, wide heads, llama3 scaling": MODELS["llama"],
    "llama: tied": MODELS["llama-tied"],
    "llama: MQA, theta": replace(
        MODELS["llama"], num_key_value_heads=1, head_dim=None, rope_scaling=None, rope_theta=500000.0
    ),
    "qwen3": MODELS["qwen3"],
    "qwen3: tied, MQA": replace(MODELS["qwen3"], num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
    "olmo2": MODELS["olmo2"],
    "olmo2: tied, MQA, biases": replace(
        MODELS["olmo2"], num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, attention_bias=True
    ),
    "olmo3: window in three layers of four, yarn in the fourth": MODELS["olmo3"],
    "gemma3_text: five windows of six, linear scaling in the sixth": MODELS["gemma3_text"],
    "gemma3_text: untied, MQA, biases, capped logits": replace(
        MODELS["gemma3_text"],
        num_hidden_layers=3,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        attention_bias=True,
        rope_scaling=None,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        final_logit_softcapping=3.0,
    ),
    "phi3: fused, window, part of heads rotated, longrope": MODELS["phi3"],
    "phi3: tied, MQA": replace(
        MODELS["phi3"],
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_scaling=None,
        partial_rotary_factor=1.0,
        sliding_window=None,
    ),
    "gemma2": MODELS["gemma2"],
    "gemma2: untied, MQA, biases, windows elsewhere, no caps": replace(
        MODELS["gemma2"],
        num_key_value_heads=1,
        tie_word_embeddings=False,
        attention_bias=True,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma4_text": MODELS["gemma4_text"],
    "gemma4_text: untied, biases, values of their own, heads of one width": replace(
        MODELS["gemma4_text"],
        tie_word_embeddings=False,
        attention_bias=True,
        attention_k_eq_v=False,
        global_head_dim=None,
        num_global_key_value_heads=None,
        rope_scaling=None,
        final_logit_softcapping=None,
    ),
    "gemma4_text: inputs of layers, shared keys, wide MLP": MODELS["gemma4_text-shared"],
    "gemma4_text: experts, one key head, shared keys of its own kind alone": replace(
        MODELS["gemma4_text-experts"],
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        num_kv_shared_layers=1,
        router_aux_loss_coef=0.0,
    ),
    "mistral: window, yarn": MODELS["mistral"],
    "mistral: no window, MQA, tied": replace(
        MODELS["mistral"],
        num_key_value_heads=1,
        head_dim=6,
        sliding_window=None,
        rope_scaling=None,
        tie_word_embeddings=True,
    ),
    "qwen2: window in upper layers": MODELS["qwen2"],
    "qwen2: no window, tied, linear scaling": replace(
        MODELS["qwen2"],
        sliding_window=None,
        max_window_layers=0,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
    "deepseek_v3: latents, yarn": MODELS["deepseek_v3-dense"],
    "deepseek_v3: queries from x, halves, tied": replace(
        MODELS["deepseek_v3-dense"],
        q_lora_rank=None,
        rope_interleave=False,
        tie_word_embeddings=True,
        rope_scaling=None,
    ),
    "deepseek_v3: llama3 scaling": replace(MODELS["deepseek_v3-dense"], rope_scaling=MODELS["llama"].rope_scaling),
    "smollm3: window where nothing is rotated": MODELS["smollm3"],
    "smollm3: tied, biases, layers by number": replace(
        MODELS["smollm3"],
        no_rope_layer_interval=4,
        no_rope_layers=(0, 1, 1),
        sliding_window=None,
        tie_word_embeddings=True,
        mlp_bias=True,
    ),
    "gpt_neox: half of each head rotated": MODELS["gpt_neox"],
    "gpt_neox: one after the other, tied, no biases, linear scaling": replace(
        MODELS["gpt_neox"],
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attention_bias=False,
        activation_function="gelu_new",
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
    "mamba2: limited steps": replace(MODELS["mamba2"], conv_kernel=4),
    "mamba2: one group, tied, biases, no bias of the convolution": replace(
        MODELS["mamba2"],
        n_groups=1,
        tie_word_embeddings=True,
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=(0.0, math.inf),
    ),
    "nemotron_h": replace(MODELS["nemotron_h"], conv_kernel=4),
    "nemotron_h: biases, one group, longer steps": replace(
        MODELS["nemotron_h"], n_groups=1, use_bias=True, mlp_bias=True, time_step_min=0.5, time_step_max=0.7
    ),
    "qwen3_5_text": replace(MODELS["qwen3_5_text"], linear_conv_kernel_dim=4),
    "qwen3_5_text: one key head, biases, tied, linear scaling": replace(
        MODELS["qwen3_5_text"],
        layer_types=("full_attention", "linear_attention", "linear_attention", "full_attention"),
        linear_num_key_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
    "olmo_hybrid": replace(MODELS["olmo_hybrid"], linear_conv_kernel_dim=4),
    "olmo_hybrid: rotated, one key head, beta up to one, biases, tied": replace(
        MODELS["olmo_hybrid"],
        use_rope=True,
        rope_theta=100.0,
        layer_types=("full_attention", "linear_attention", "linear_attention", "full_attention"),
        linear_num_key_heads=1,
        linear_allow_neg_eigval=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "falcon_h1": replace(MODELS["falcon_h1"], mamba_d_conv=4),
    "falcon_h1: norm first, one group, biases, tied, MQA": replace(
        MODELS["falcon_h1"],
        num_key_value_heads=1,
        mamba_n_groups=1,
        mamba_rms_norm=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        projectors_bias=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "falcon_h1: gate first, no multipliers, long steps": replace(
        MODELS["falcon_h1"],
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        time_step_limit=(0.0, math.inf),
        ssm_multipliers=(1.0,) * 5,
        mlp_multipliers=(1.0, 1.0),
        attention_in_multiplier=1.0,
    ),
    "gpt2": replace(MODELS["gpt2"], dropout=0.0, attention_dropout=0.0),
    "gpt2: narrow mlp": replace(
        MODELS["gpt2"], dropout=0.0, attention_dropout=0.0, intermediate_size=37, num_hidden_layers=2
    ),
}
# families of which transformers computes more in float32 than `widen` knows
WIDE = (
    GatedAttentionConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    KimiLinearConfig,
    Llama4TextConfig,
    Mamba2Config,
    NemotronHConfig,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
)
LAYOUTS = {
    "one rank": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "tp2 pp2": dict(tp=2, pp=2),
    "tp4": dict(tp=4),
    "cp2": dict(cp=2),
}
BATCHES = [sample_batch([1, 2], documents=False), sample_batch([3, 4], documents=False)]


def hf_config(config: LlamaConfig | GPT2Config):
    import transformers

    c, options = config, dict(attn_implementation="sdpa", vocab_size=config.vocab_size, bos_token_id=0, eos_token_id=0)
    if isinstance(c, GPT2Config):
        return transformers.GPT2Config(
            n_positions=c.max_position_embeddings,
            n_embd=c.hidden_size,
            n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads,
            n_inner=c.intermediate_size,
            layer_norm_epsilon=c.layer_norm_epsilon,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **options,
        )
    if isinstance(c, WIDE):
        options["attn_implementation"] = "eager"
    if c.routed_experts:
        options["experts_implementation"] = "eager"  # the other takes no float64
    if type(c).__name__ not in BY_HAND:
        written = to_hf(c, torch.float64)
        return transformers.CONFIG_MAPPING[written["model_type"]](**written | options)
    same = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "max_position_embeddings",
    )
    written = to_hf(c, torch.float64)
    scaling = {
        k: written[k]
        for k in ("rope_scaling", "sliding_window", "use_sliding_window", "max_window_layers")
        if written.get(k) is not None
    }
    cls = getattr(transformers, type(c).__name__)
    return cls(
        **{k: getattr(c, k) for k in same}, head_dim=head_dim_of(c), **{"sliding_window": None, **scaling}, **options
    )


BY_HAND = ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config")  # written here, whatever to_hf writes


def head_dim_of(config: DecoderConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def rotation_of(config: DecoderConfig) -> Rotation:
    if isinstance(config, LatentConfig):
        return Rotation(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    return next(r for r in (rotation(config, i) for i in range(config.num_hidden_layers)) if r is not None)


def hf_inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Hugging Face's formulas (modeling_rope_utils.py) in float64, unscaled and of llama3."""
    dim = head_dim_of(config)
    found = []
    for i in range(0, dim, 2):
        f = 1.0 / config.rope_theta ** (i / dim)
        if (s := config.rope_scaling) is not None:
            low, high = (
                s.original_max_position_embeddings / s.low_freq_factor,
                s.original_max_position_embeddings / s.high_freq_factor,
            )
            wavelength = 2 * math.pi / f
            smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            if wavelength > low:
                f = f / s.factor
            elif wavelength >= high:
                f = (1 - smooth) * f / s.factor + smooth * f
        found.append(f)
    return torch.tensor(found, dtype=torch.float64)


def widen(model, config: DecoderConfig) -> None:
    """Hugging Face computes RMSNorm and rotary angles in float32 whatever the weights are: the same formulas in
    float64."""
    inv, factor = rotation_of(config).frequencies(SEQ)  # equal to transformers' own: test_scalings_equal_transformers

    theirs = model.base_model.rotary_emb
    assert len(inv) == len(theirs.inv_freq), "transformers rotates another part of each head"

    def rotary(x, position_ids):
        angle = position_ids.double().unsqueeze(-1) * torch.cat([inv, inv])
        return angle.cos() * factor, angle.sin() * factor

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda h, m=module: (
                m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )
    theirs.forward = rotary


def wide_modules(config: DecoderConfig | GPT2Config) -> AbstractContextManager[None]:
    """For families with more in float32 than `widen` knows: float64 in its place, wherever transformers writes it."""
    return hf_fuzz.wide() if isinstance(config, WIDE) else nullcontext()


@lru_cache
def hugging_face(case: str) -> dict:
    """Weights, and Hugging Face's logits, loss and gradients on BATCHES."""
    import transformers

    config = CASES[case]
    cls = getattr(transformers, to_hf(config, torch.float64)["architectures"][0])
    torch.manual_seed(0)
    tokens, labels = (torch.cat([getattr(b, n) for b in BATCHES]) for n in ("tokens", "labels"))
    with wide_modules(config):
        model = cls(hf_config(config)).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 and not getattr(config, "offset_norms", False) else 0.0)
            for name, b in model.named_buffers():
                if name.endswith("layer_scalar"):
                    b.normal_(1.0, 0.3)
        if isinstance(config, DecoderConfig) and not isinstance(config, WIDE):
            widen(model, config)
        logits = model(tokens.view(-1, SEQ)).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / (labels != IGNORE).sum()
    loss.backward()
    named = by_file_names(model, config)
    constants = {k: t for k, t in model.state_dict().items() if k.endswith("layer_scalar")}
    return {
        "weights": {k: t.detach().numpy() for k, t in [*named.items(), *constants.items()]},
        "grads": {k: p.grad.numpy() for k, p in named.items()},
        "logits": logits.detach().numpy(),
        "loss": loss.item(),
    }


def by_file_names(model: torch.nn.Module, config: ModelConfig) -> dict[str, torch.nn.Parameter]:
    """The model's parameters under the names of its files, which for GPT-NeoX's head is another one."""
    return {family_of(config).tensors.today(name): p for name, p in model.named_parameters()}


def load_weights(state: State, weights: dict[str, np.ndarray]) -> None:
    for flat in state.buffers.flat:
        for slot in flat.bucket.slots:
            storage = torch.zeros(slot.spec.shape, dtype=torch.float64)
            for piece in slot.spec.pieces:
                piece.of(storage).copy_(torch.from_numpy(weights[piece.name][piece.box.slices()]))
            write_slot(flat, slot, storage)


def logits_of_own_tokens(head: Head, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The head's rows are those of the whole micro-batch, which the ranks of cp have one after another."""
    return head.logits(x, head.env.axes.cp.index * batch.num_tokens + torch.arange(batch.num_tokens))


def all_logits(state: State, batches: list[Batch]) -> list[np.ndarray]:
    """Logits of every token of each micro-batch, on the ranks of the last stage."""
    state.model.train(False)
    state.model.stages.finish = logits_of_own_tokens
    state.model.stages.begin(batches, seed=None)
    execute(state.model.program(len(batches), backward=False), state.model.handlers)
    state.model.stages.end()
    return [state.model.stages.outputs[mb].numpy() for mb in sorted(state.model.stages.outputs)]


def run_model(rank: int, world: int, run: Run, weights: dict[str, np.ndarray], batches: list[Batch]) -> dict:
    """Of whole micro-batches, of which a rank of cp takes its shards. places: of its logits among all tokens."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    load_weights(state, weights)
    state.model.train()
    mine = [batch.cut(mesh.part) for batch in batches]
    tokens = accumulate(state, mine)
    return {
        "loss": (reduce_step_totals(state.model, False).loss / tokens).item(),
        "grads": parts_of(state, "grad"),
        "logits": all_logits(state, mine),
        "places": places_of(mine),
    }


def places_of(batches: list[Batch]) -> np.ndarray:
    """Of the tokens of shards, one micro-batch after another, among all tokens of all micro-batches."""
    before = itertools.accumulate((b.all_tokens for b in batches), initial=0)
    return np.concatenate([first + b.take(torch.arange(b.all_tokens)).numpy() for first, b in zip(before, batches)])


@pytest.mark.parametrize("case, layout", each_in_two(CASES, LAYOUTS))
def test_equal_to_hugging_face(ranks, case, layout):
    """Truth: transformers in float64 (SDPA attention), to 1e-10 of each tensor's scale; layouts through the pool of
    ranks."""
    truth, world = hugging_face(case), math.prod(LAYOUTS[layout].values())
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    arguments = (Run(model=CASES[case], train=train, layout=LayoutConfig(**LAYOUTS[layout])), truth["weights"], BATCHES)
    results = (
        [run_model(0, 1, *arguments)]
        if world == 1
        else ranks.run("tests.models.test_models:run_model", world, *arguments)
    )
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    logits = [(np.concatenate(r["logits"]), truth["logits"][r["places"]]) for r in results if r["logits"]]
    assert len(logits) == LAYOUTS[layout].get("tp", 1) * LAYOUTS[layout].get("cp", 1)
    for found, expected in logits:
        assert np.abs(found - expected).max() <= 1e-10 * np.abs(truth["logits"]).max()
    grads = assemble([r["grads"] for r in results])
    assert grads.keys() == truth["grads"].keys()
    largest = max(np.abs(g).max() for g in truth["grads"].values())
    for name, expected in truth["grads"].items():
        off, bound = np.abs(grads[name] - expected).max(), 1e-10 * max(np.abs(expected).max(), 1e-6 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("llama")])
def test_frequencies_equal_the_formula(case):
    """Truth: the formulas of transformers, feature by feature in float64."""
    torch.testing.assert_close(
        rotation_of(CASES[case]).frequencies(SEQ)[0], hf_inverse_frequencies(CASES[case]), rtol=1e-14, atol=0
    )


LONG, SHORT = tuple(1.0 + i / 7 for i in range(32)), tuple(1.0 + i / 90 for i in range(32))
SCALINGS = {
    "none": None,
    "linear": RopeScaling(rope_type="linear", factor=2.5),
    "dynamic": RopeScaling(rope_type="dynamic", factor=2.0),
    "llama3": RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    "yarn": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    "yarn of gpt-oss": RopeScaling(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    ),
    "yarn of DeepSeek": RopeScaling(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7
    ),
    "yarn, all given": RopeScaling(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=512,
        attention_factor=1.3,
        beta_fast=24.0,
        beta_slow=2.0,
    ),
    "longrope": RopeScaling(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=1024
    ),
    "longrope, factor": RopeScaling(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=1024, factor=9.0
    ),
    "longrope, attention factor": RopeScaling(
        rope_type="longrope",
        short_factor=SHORT,
        long_factor=LONG,
        original_max_position_embeddings=1024,
        attention_factor=1.5,
    ),
}


@pytest.mark.parametrize("length", [64, 1024, 1025, 5000])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_equal_transformers(name, theta, length):
    """Truth: cos and sin that transformers' Llama makes for positions up to this length, to float32 rounding of its
    angles."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = replace(
        MODELS["llama"], head_dim=64, rope_theta=theta, rope_scaling=SCALINGS[name], max_position_embeddings=2048
    )
    theirs = LlamaRotaryEmbedding(hf_config(config))
    cos, sin = (t[0] for t in theirs(torch.zeros(1), torch.arange(length)[None]))
    inv, factor = rotation_of(config).frequencies(length)
    torch.testing.assert_close(inv.float(), theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-14)
    ours = rotary_table(torch.arange(length), inv, torch.float64, factor)
    for a, b in zip(ours, (cos, sin)):
        torch.testing.assert_close(a.float(), b[:, : 64 // 2], rtol=0, atol=2e-7 * length)


def test_every_scaling_is_tested():
    elsewhere = {"proportional"}  # which turns a part of each head: tests/models/test_hf_folders.py
    assert {s.rope_type for s in SCALINGS.values() if s} == set(ROPE_FIELDS) - elsewhere


def test_scaling_has_all_three_regimes():
    """The real Llama 3.1 values (head 128, theta 500000): kept, blended and divided frequencies all occur."""
    ours, plain = (
        Rotation(128, 500000.0, SCALINGS["llama3"]).frequencies(8)[0],
        Rotation(128, 500000.0).frequencies(8)[0],
    )
    ratio = (plain / ours).round(decimals=12)
    assert (ratio == 1).any() and (ratio == 8).any() and ((ratio > 1) & (ratio < 8)).any()


def test_llama4s_scaling_has_nothing_in_between():
    """Scout's published factors, which are equal, against transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    ours = Rotation(128, 500000.0, RopeScaling(rope_type="llama3", **scaling)).frequencies(8)[0]
    stated = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    theirs = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=128, rope_parameters=stated), "cpu")[0]
    torch.testing.assert_close(ours.float(), theirs)
    assert 0 < (ours < Rotation(128, 500000.0).frequencies(8)[0]).sum() < 64
