"""Families with experts against Hugging Face's: logits, loss and the gradient of every tensor in float64, whoever
holds which expert.

Transformers keeps experts stacked in memory and one by one in files, so both weights and gradients go through its own
`save_pretrained` to get their names.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.checkpoint.hf import differences, model_config_from_hf, to_hf
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, reduce_step_totals
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.experts import ExpertsConfig
from phalanx.models.gpt_oss import GptOssConfig
from phalanx.models.mixtral import MixtralConfig
from phalanx.models.registry import load_family
from phalanx.models.rope import RopeScaling
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness.checkpoints import make_run
from tests.harness.parity import MODELS, SEQ, assemble, parts_of, sample_batch
from tests.harness.sample import each_in_two
from tests.models.test_models import WIDE, all_logits, load_weights, places_of, rotation_of, wide_modules

CASES = {
    "mixtral": replace(MODELS["mixtral"], router_aux_loss_coef=0.0, router_z_loss_coef=0.0),
    "mixtral: top 1, tied": replace(
        MODELS["mixtral"],
        router_aux_loss_coef=0.0,
        router_z_loss_coef=0.0,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
    ),
    "qwen3_moe: some layers dense": replace(MODELS["qwen3_moe"], router_aux_loss_coef=0.0),
    "qwen3_moe: renormalised": replace(
        MODELS["qwen3_moe"],
        router_aux_loss_coef=0.0,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=(1,),
        tie_word_embeddings=False,
    ),
    "deepseek_v3": replace(MODELS["deepseek_v3"], router_aux_loss_coef=0.0),
    "deepseek_v3: one group, weights as they are, no first dense layer": replace(
        MODELS["deepseek_v3"],
        router_aux_loss_coef=0.0,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        n_shared_experts=1,
        first_k_dense_replace=0,
    ),
    "llama4_text": replace(MODELS["llama4_text"], router_aux_loss_coef=0.0),
    "llama4_text: two experts a token, no norm of heads, no chunks, biases, tied, llama3 scaling": replace(
        MODELS["llama4_text"],
        router_aux_loss_coef=0.0,
        num_experts_per_tok=2,
        moe_layers=(0, 1),
        interleave_moe_layer_step=1,
        use_qk_norm=False,
        attention_chunk_size=None,
        attn_temperature_tuning=False,
        floor_scale=8192,
        no_rope_layer_interval=5,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=MODELS["llama"].rope_scaling,
    ),
    "minimax_m2": replace(MODELS["minimax_m2"], router_aux_loss_coef=0.0),
    "minimax_m2: tied, one key head, all of a head rotated, linear scaling": replace(
        MODELS["minimax_m2"],
        router_aux_loss_coef=0.0,
        tie_word_embeddings=True,
        num_key_value_heads=1,
        partial_rotary_factor=1.0,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
    "glm4_moe": replace(MODELS["glm4_moe"], router_aux_loss_coef=0.0),
    "glm4_moe: one group, biases, tied, no norm of heads, all layers with experts": replace(
        MODELS["glm4_moe"],
        router_aux_loss_coef=0.0,
        n_group=1,
        topk_group=1,
        use_qk_norm=False,
        attention_bias=True,
        tie_word_embeddings=True,
        norm_topk_prob=False,
        n_shared_experts=2,
        first_k_dense_replace=0,
    ),
    "qwen3_next": replace(MODELS["qwen3_next"], router_aux_loss_coef=0.0, linear_conv_kernel_dim=4),
    "qwen3_next: as many key heads as value heads, weights as they are, biases, tied, yarn": replace(
        MODELS["qwen3_next"],
        router_aux_loss_coef=0.0,
        layer_types=("full_attention", "linear_attention", "linear_attention", "full_attention"),
        linear_num_key_heads=4,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=(),
        attention_bias=True,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    ),
    "kimi_linear": replace(MODELS["kimi_linear"], router_aux_loss_coef=0.0, linear_conv_kernel_dim=4),
    "kimi_linear: queries from latents, two dense layers, weights as they are, one group": replace(
        MODELS["kimi_linear"],
        router_aux_loss_coef=0.0,
        layer_types=("full_attention", "linear_attention", "linear_attention", "full_attention"),
        q_lora_rank=6,
        first_k_dense_replace=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        n_group=1,
    ),
    "qwen3_5_moe_text": replace(MODELS["qwen3_5_moe_text"], router_aux_loss_coef=0.0, linear_conv_kernel_dim=4),
    "nemotron_h with experts": replace(MODELS["nemotron_h-moe"], conv_kernel=4, router_aux_loss_coef=0.0),
    "nemotron_h with experts: latents, biases, one group": replace(
        MODELS["nemotron_h-latent"], conv_kernel=4, router_aux_loss_coef=0.0
    ),
    "gpt_oss": replace(MODELS["gpt_oss"], router_aux_loss_coef=0.0, router_z_loss_coef=0.0),
    "gpt_oss: layers of a kind, tied, no scaling": replace(
        MODELS["gpt_oss"],
        router_aux_loss_coef=0.0,
        router_z_loss_coef=0.0,
        tie_word_embeddings=True,
        rope_scaling=None,
        num_experts_per_tok=1,
        layer_types=("full_attention", "full_attention", "sliding_attention"),
        sliding_window=9,
        swiglu_alpha=1.3,
        swiglu_limit=7.0,
    ),
}
LAYOUTS = {
    "one rank": (1, {}),
    "ep2": (2, dict(ep=2)),
    "tp2": (2, dict(tp=2)),
    "pp2": (2, dict(pp=2)),
    "cp2, ep2": (2, dict(cp=2, ep=2)),
    "tp2, ep2": (2, dict(tp=2, ep=2)),
    "pp2, etp2": (4, dict(pp=2, etp=2)),
    "tp2, ep4 by all-gather": (4, dict(tp=2, ep=4, dispatch="allgather", expert_room=8.0)),
    "tp2, ep4 pushed": (4, dict(tp=2, ep=4, dispatch="push", expert_room=8.0)),
    "tp2, ep2 x etp2 by all-gather": (4, dict(tp=2, ep=2, etp=2, dispatch="allgather", expert_room=8.0)),
}
BATCHES = [sample_batch([1, 2], documents=False), sample_batch([3, 4], documents=False)]


def hf_model(config: ExpertsConfig):
    import transformers

    c = config
    if type(c).__name__ not in BY_HAND:
        options = dict(attn_implementation="sdpa", experts_implementation="eager", bos_token_id=0, eos_token_id=0)
        written = to_hf(c, torch.float64)
        made = transformers.CONFIG_MAPPING[written["model_type"]](**written | options)
        return getattr(transformers, written["architectures"][0])(made)
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "max_position_embeddings",
        "num_experts_per_tok",
    )
    if isinstance(c, GptOssConfig):
        return transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**to_hf(c, torch.float64), experts_implementation="eager")
        )
    options = {k: getattr(c, k) for k in same} | dict(
        attn_implementation="sdpa", experts_implementation="eager", bos_token_id=0, eos_token_id=0
    )
    options["head_dim"] = c.head_dim or c.hidden_size // c.num_attention_heads
    if isinstance(c, MixtralConfig):
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(num_local_experts=c.num_local_experts, **options)
        )
    more = ("num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    options |= {k: getattr(c, k) for k in more} | dict(mlp_only_layers=list(c.mlp_only_layers))
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))


BY_HAND = ("MixtralConfig", "Qwen3MoEConfig", "GptOssConfig")  # written here, whatever to_hf writes


def widen(model, config: ExpertsConfig) -> None:
    """Hugging Face computes norms, rotary angles and routers in float32 whatever the weights are: the same formulas
    in float64."""
    inverse, factor = rotation_of(config).frequencies(
        SEQ
    )  # equal to transformers' own: test_scalings_equal_transformers
    assert len(inverse) == len(model.base_model.rotary_emb.inv_freq), "transformers rotates another part of each head"
    halves = 1 if isinstance(config, GptOssConfig) else 2  # in which its angles are laid out

    def rotary(x, position_ids):
        angle = position_ids.double().unsqueeze(-1) * inverse.repeat(halves)
        return angle.cos() * factor, angle.sin() * factor

    def route(h, m, renormalize):
        logits = F.linear(h.reshape(-1, h.shape[-1]), m.weight)
        weights, experts = torch.topk(F.softmax(logits, -1), m.top_k, -1)
        return logits, weights / weights.sum(-1, keepdim=True) if renormalize else weights, experts

    def route_in_groups(h, m):
        """DeepSeek-V3's, expert by expert: the best groups by their two best scores with the bias, the best experts
        in them."""
        logits = F.linear(h.reshape(-1, h.shape[-1]), m.weight)
        scores = logits.sigmoid()
        chosen_by = (scores + m.e_score_correction_bias.double()).unflatten(1, (m.num_group, -1))
        worst_group = chosen_by.topk(2, -1).values.sum(-1).topk(m.topk_group, -1).values[:, -1:]
        out = chosen_by.topk(2, -1).values.sum(-1) < worst_group
        experts = chosen_by.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1).topk(m.top_k, -1).indices
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True) if m.norm_topk_prob else weights
        return logits, weights * m.routed_scaling_factor, experts

    def route_by_bias(h, m, bias):
        logits = F.linear(h.reshape(-1, h.shape[-1]), m.weight)
        experts = (logits.sigmoid() + bias).topk(m.top_k, -1).indices
        weights = logits.sigmoid().gather(1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda h, m=module: (
                m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )
        if kind in ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"):
            module.forward = lambda h, m=module: route_in_groups(h, m)
        if kind == "MiniMaxM2TopKRouter":
            module.forward = lambda h, bias, m=module: route_by_bias(h, m, bias.double())
        if kind in ("MixtralTopKRouter", "Qwen3MoeTopKRouter") and not isinstance(config, GptOssConfig):
            module.forward = lambda h, m=module: route(h, m, getattr(m, "norm_topk_prob", True))
    getattr(model, "model", model).rotary_emb.forward = rotary


def saved(model) -> dict[str, np.ndarray]:
    """The model's tensors under the names of its files, as they are today."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}
    tensors = load_family(model.config.model_type).tensors  # some are saved under the names of their own code
    return {tensors.today(k): v for k, v in found.items()}


@lru_cache
def hugging_face(case: str) -> dict:
    """Weights, and Hugging Face's logits, loss and gradients on BATCHES."""
    config = CASES[case]
    tokens, labels = (torch.cat([getattr(b, n) for b in BATCHES]) for n in ("tokens", "labels"))
    with wide_modules(config):
        torch.manual_seed(0)
        model = hf_model(config).double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 else 0.0)
            for name, b in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    b.normal_(0.0, 0.3)
        if not isinstance(config, WIDE):
            widen(model, config)
        logits = model(tokens.view(-1, SEQ)).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / (labels != IGNORE).sum()
    loss.backward()
    weights = saved(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    grads = {k: v for k, v in saved(model).items() if not k.endswith("e_score_correction_bias")}
    return {"weights": weights, "grads": grads, "logits": logits.detach().numpy(), "loss": loss.item()}


def run_model(rank: int, world: int, run: Run, weights: dict[str, np.ndarray], batches: list[Batch]) -> dict:
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    load_weights(state, weights)
    state.model.train()
    mine = [batch.cut(mesh.part) for batch in batches[mesh.dp.index :: mesh.dp.size]]
    tokens = accumulate(state, mine)
    grads = parts_of(state, "grad")
    return {
        "loss": (reduce_step_totals(state.model).loss / tokens).item(),
        "grads": grads,
        "logits": all_logits(state, mine),
        "places": places_of(mine[:1]),
        "dp": mesh.dp.index,
    }


@pytest.mark.parametrize("case, layout", each_in_two(CASES, LAYOUTS))
def test_equal_to_hugging_face(ranks, case, layout):
    """Truth: transformers in float64, to 1e-10 of each tensor's scale."""
    truth, (world, options) = hugging_face(case), LAYOUTS[layout]
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    arguments = (Run(model=CASES[case], train=train, layout=LayoutConfig(**options)), truth["weights"], BATCHES)
    results = (
        [run_model(0, 1, *arguments)]
        if world == 1
        else ranks.run("tests.models.test_moe_models:run_model", world, *arguments)
    )
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    dp = 1 + max(r["dp"] for r in results)
    expected = truth["logits"].reshape(len(BATCHES), -1, truth["logits"].shape[-1])
    with_logits = [r for r in results if r["logits"]]
    assert len(with_logits) == dp * options.get("tp", 1) * options.get("cp", 1)
    for r in with_logits:
        for found, right in zip(r["logits"], expected[r["dp"] :: dp], strict=True):
            assert np.abs(found - right[r["places"]]).max() <= 1e-10 * np.abs(right).max()
    grads = assemble([r["grads"] for r in results])
    assert grads.keys() == truth["grads"].keys()
    largest = max(np.abs(g).max() for g in truth["grads"].values())
    for name, right in truth["grads"].items():
        off, bound = np.abs(grads[name] - right).max(), 1e-10 * max(np.abs(right).max(), 1e-6 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


@pytest.mark.parametrize("layout", [dict(tp=2, ep=4), dict(pp=2, ep=2)], ids=str)
def test_folders_of_deepseek_both_ways(ranks, tmp_path, layout):
    """What transformers saves is loaded bit for bit, and what we save is what it loads, the bias that experts are
    chosen by included."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = MODELS["deepseek_v3"]
    torch.manual_seed(0)
    theirs = hf_model(config)
    with torch.no_grad():
        for t in (
            *theirs.parameters(),
            *(b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")),
        ):
            t.normal_()
    theirs.save_pretrained(tmp_path / "hf")
    assert differences(asdict(model_config_from_hf(tmp_path / "hf")), asdict(config)) == []
    truth = {k: v.double().numpy() for k, v in load_file(tmp_path / "hf/model.safetensors").items()}
    assert sum("e_score_correction_bias" in name for name in truth) == 2
    assert (
        ranks.run(
            "tests.harness.checkpoints:load_weights_on_rank",
            4,
            make_run("deepseek_v3", "bf16", **layout),
            tmp_path / "hf",
            truth,
        )
        == [[]] * 4
    )
    ranks.run(
        "tests.harness.checkpoints:save_on_rank", 4, make_run("deepseek_v3", "fp32", **layout), tmp_path / "run", {}
    )
    (folder,) = (tmp_path / "run").glob("**/weights")
    assert differences(asdict(model_config_from_hf(folder)), asdict(config)) == []
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ours, expected = saved(loaded), load_file(folder / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(np.array_equal(ours[name], t.numpy()) and t.any() for name, t in expected.items())
