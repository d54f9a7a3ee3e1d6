"""Modules that predict further tokens: their losses and every gradient against transformers' own modules, and what
they read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, evaluate_step, reduce_step_totals, train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.gated_layers import GatedAttentionConfig
from phalanx.models.predictors import PredictorsConfig
from phalanx.nn.mtp import shifted
from phalanx.observe.metrics import Pending
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness.checkpoints import error_on_rank, make_run
from tests.harness.parity import MODELS, SEQ, assemble, parts_of, sample_batch
from tests.models.test_models import all_logits, load_weights, wide_modules
from tests.models.test_moe_models import hf_model, saved, widen

DEEPSEEK, QWEN = "deepseek_v3-mtp", "qwen3_next-mtp"
CASES = {
    DEEPSEEK: replace(MODELS[DEEPSEEK], router_aux_loss_coef=0.0),
    QWEN: replace(MODELS[QWEN], router_aux_loss_coef=0.0, linear_conv_kernel_dim=4),
    "qwen3_5_text, tied": replace(
        MODELS["qwen3_5_text"], linear_conv_kernel_dim=4, tie_word_embeddings=True, num_nextn_predict_layers=1
    ),
}
MODEL = CASES[DEEPSEEK]
LAYERS, DEPTHS = MODEL.num_hidden_layers, MODEL.num_nextn_predict_layers
BATCHES = [sample_batch([1, 2], documents=False), sample_batch([3, 4], documents=False)]
# what Qwen's files call the tensors of its module (vLLM, qwen3_next_mtp.py and qwen3_5_mtp.py)
IN_QWENS_FILES = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}


def names_in_files(model: PredictorsConfig, k: int, name: str, tensor: torch.Tensor) -> dict[str, np.ndarray]:
    """A tensor of transformers' module number k under the names of published files: experts one by one."""
    value = tensor.detach().numpy().copy()
    if isinstance(model, GatedAttentionConfig):
        first = name.split(".")[0]
        name = name.replace(first, IN_QWENS_FILES.get(first, f"mtp.layers.{k}"), 1)
    else:
        name = f"model.layers.{LAYERS + k}." + name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
    at, _, end = name.rpartition(".")
    if end == "gate_up_proj":
        inner = model.moe_intermediate_size
        halves = {"gate": slice(0, inner), "up": slice(inner, None)}
        return {f"{at}.{e}.{half}_proj.weight": v[s] for e, v in enumerate(value) for half, s in halves.items()}
    if end == "down_proj":
        return {f"{at}.{e}.down_proj.weight": v for e, v in enumerate(value)}
    return {name: value}


@lru_cache
def truth(case: str = DEEPSEEK) -> dict:
    """Transformers' model and its MtpLayer in float64: main loss, sum of the other losses, gradients of both, logits.
    Of Qwen, transformers has the layer and its norms, and vLLM says how they are put together, which is the same."""
    with wide_modules(CASES[case]):
        return truth_of(CASES[case])


def truth_of(config: PredictorsConfig) -> dict:
    from transformers.modeling_layers import MtpLayer

    torch.manual_seed(0)
    count_depths = config.num_nextn_predict_layers
    alone = replace(config, num_nextn_predict_layers=0, mtp_loss_weight=0.3)
    model = hf_model(alone).double().eval()
    layer, norm = type(model.model.layers[-1]), type(model.model.norm)
    # a module of Qwen has a layer as the last one, with attention and with experts
    numbers = [LAYERS + k if config is MODEL else config.num_hidden_layers - 1 for k in range(count_depths)]
    depths = torch.nn.ModuleList(MtpLayer(model.config, layer, norm, n) for n in numbers).double().eval()
    model.depths = depths  # so that `widen` finds their norms and routers
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 and not config.offset_norms else 0.0)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.normal_(0.0, 0.3)
    if not isinstance(config, GatedAttentionConfig):
        widen(model, config)
    del model.depths
    tokens, labels = (torch.cat([getattr(b, n) for b in BATCHES]).view(-1, SEQ) for n in ("tokens", "labels"))
    count = (labels != IGNORE).sum()
    h = model.model(tokens).last_hidden_state
    logits, others = model.lm_head(h), torch.zeros((), dtype=torch.float64)
    places = torch.arange(SEQ)[None]
    for k, depth in enumerate(depths, 1):
        mtp_loss = torch.cat((tokens[:, k:], tokens[:, SEQ - k :]), 1)
        h = depth(model.model.embed_tokens(mtp_loss), h, model.model.rotary_emb(h, places), None, places, None)
        others = others + F.cross_entropy(
            model.lm_head(h[:, :-k]).flatten(0, 1), labels[:, k:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
    main = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / count
    (main + config.mtp_loss_weight / count_depths * others / count).backward()
    weights = saved(model)
    for k, depth in enumerate(depths):
        for name, t in depth.state_dict().items():
            weights |= names_in_files(config, k, name, t)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    grads = {n: v for n, v in saved(model).items() if not n.endswith("e_score_correction_bias")}
    for k, depth in enumerate(depths):
        for name, p in depth.named_parameters():
            grads |= names_in_files(config, k, name, p.grad)
    losses = {"main": main.item(), "others": (others / count / count_depths).item()}
    return {"weights": weights, "grads": grads, **losses, "logits": logits.flatten(0, 1).detach().numpy()}


def run_model(rank: int, world: int, run: Run, weights: dict[str, np.ndarray], batches: list[Batch]) -> dict:
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    load_weights(state, weights)
    state.model.train()
    mine = batches[mesh.dp.index :: mesh.dp.size]
    tokens = accumulate(state, mine)
    grads, told, depths = parts_of(state, "grad"), reduce_step_totals(state.model), run.model.predict_layers
    losses = {"main": (told.loss / tokens).item(), "others": (told.mtp_loss / tokens / depths).item()}
    return {**losses, "grads": grads, "logits": all_logits(state, mine), "dp": mesh.dp.index}


LAYOUTS = {
    "one rank": (1, {}),
    "tp2, ep2": (2, dict(tp=2, ep=2)),
    "pp2, ep2": (4, dict(pp=2, ep=2)),
    "pp3": (3, dict(pp=3, stages=(2, 2, 1))),
}


# what other layouts show of DeepSeek's, in the soak
SHOWN = [(DEEPSEEK, name) for name in LAYOUTS if name != "pp2, ep2"]
SHOWN += [(QWEN, "one rank"), (QWEN, "tp2, ep2"), ("qwen3_5_text, tied", "pp2")]
EVERY = [*SHOWN, (DEEPSEEK, "pp2, ep2"), (QWEN, "pp2, ep2"), (QWEN, "pp2")]


@pytest.mark.parametrize(
    "case, layout", [pytest.param(*each, marks=[] if each in SHOWN else pytest.mark.soak) for each in EVERY]
)
def test_equal_to_transformers(ranks, case, layout):
    """Truth: transformers' modules in float64, to 1e-10 of each tensor's scale; the losses of the technical report,
    equations 24 and 25."""
    right, model, (world, options) = truth(case), CASES[case], (LAYOUTS | {"pp2": (2, dict(pp=2))})[layout]
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    arguments = (Run(model=model, train=train, layout=LayoutConfig(**options)), right["weights"], BATCHES)
    results = (
        [run_model(0, 1, *arguments)] if world == 1 else ranks.run("tests.nn.test_mtp:run_model", world, *arguments)
    )
    dp = 1 + max(r["dp"] for r in results)
    for r in results:
        assert r["main"] == pytest.approx(right["main"], rel=1e-12) and r["others"] == pytest.approx(
            right["others"], rel=1e-12
        )
        for found, expected in zip(
            r["logits"], right["logits"].reshape(len(BATCHES), -1, model.vocab_size)[r["dp"] :: dp]
        ):
            assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()
    grads = assemble([r["grads"] for r in results])
    assert grads.keys() == right["grads"].keys()
    largest = max(np.abs(g).max() for g in right["grads"].values())
    for name, expected in right["grads"].items():
        off, bound = np.abs(grads[name] - expected).max(), 1e-10 * max(np.abs(expected).max(), 1e-6 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


@pytest.mark.parametrize("k", [1, 2, 5, SEQ, SEQ + 3])
@pytest.mark.parametrize("documents", [False, True])
def test_what_is_read_k_places_further(documents, k):
    """Truth: place by place."""
    batch = sample_batch([3, 1, 6], documents)
    tokens, labels = shifted(batch, k)
    lost = 0
    for i in range(batch.num_tokens):
        j = i + k
        there = j // SEQ == i // SEQ and (not documents or batch.documents[j] == batch.documents[i])
        assert tokens[i] == batch.tokens[j if there else i]
        assert labels[i] == (batch.labels[j] if there else IGNORE)
        lost += not there
    assert lost >= 3 * min(k, SEQ) and (not documents or k > SEQ - 2 or lost > 3 * k)


def test_folders_with_copies_of_embedding_and_head(ranks, tmp_path):
    """As published: each module has the embedding and the head once more. Whoever sets another number of modules is
    told what to set."""
    right = truth()["weights"]
    copies = {
        f"model.layers.{LAYERS + k}.{n}": right[whole].astype(np.float32).copy()
        for k in range(DEPTHS)
        for n, whole in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({**{n: t.astype(np.float32) for n, t in right.items()}, **copies}, folder / "model.safetensors")
    kept = {n: t.astype(np.float32).astype(np.float64) for n, t in right.items()}
    assert (
        ranks.run(
            "tests.harness.checkpoints:load_weights_on_rank", 2, make_run("deepseek_v3-mtp", "bf16", pp=2), folder, kept
        )
        == [[]] * 2
    )
    fewer = replace(make_run("deepseek_v3-mtp"), model=replace(MODEL, num_nextn_predict_layers=1))
    text = error_on_rank(0, 1, fewer, "load_weights", folder)
    assert (
        f"not in the model: model.layers.{LAYERS + 1}.eh_proj.weight" in text
        and "set model.num_nextn_predict_layers=2" in text
    )


def test_what_we_save_is_what_we_load(ranks, tmp_path):
    """transformers' own model reads the folder; the modules' tensors are all that it has no place for."""
    from transformers import AutoModelForCausalLM

    ranks.run("tests.harness.checkpoints:save_on_rank", 2, make_run("deepseek_v3-mtp", "fp32", pp=2), tmp_path, {})
    (folder,) = tmp_path.glob("**/weights")
    tensors = load_file(folder / "model.safetensors")
    truth = {n: t.astype(np.float64) for n, t in tensors.items()}
    assert (
        ranks.run(
            "tests.harness.checkpoints:load_weights_on_rank",
            2,
            make_run("deepseek_v3-mtp", "fp32", tp=2, ep=2),
            folder,
            truth,
        )
        == [[]] * 2
    )
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    mtp_loss = tuple(f"model.layers.{LAYERS + k}." for k in range(DEPTHS))
    assert (
        not info["missing_keys"]
        and info["unexpected_keys"]
        and all(n.startswith(mtp_loss) for n in info["unexpected_keys"])
    )


def test_the_loss_is_told():
    still = replace(MODEL, router_bias_update_rate=0.0)  # else a step moves it, whatever the learning rate
    run = Run(model=still, train=TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64"))
    state = build(make_plan(run, 1), Mesh(make_plan(run, 1).grid))
    load_weights(state, truth()["weights"])
    state.model.train()
    pending = Pending(1, 0.0, train_step(state, BATCHES, 0.0))
    assert pending.read()[0] == pytest.approx(truth()["main"]) and pending.mtp_loss() == pytest.approx(
        truth()["others"]
    )
    assert [v is not None for v in pending.routing()["entropy"]] == [False, True, True, True]
    summed, tokens = evaluate_step(state.model, BATCHES)
    assert (summed / tokens).item() == pytest.approx(truth()["main"])


def test_transformers_predicts_ahead_with_what_we_save(ranks, tmp_path):
    """With the published number of layers, 61, transformers has a place for the module too: the folder as it lies is
    loaded without a tensor left over or missing, and generates the same tokens with the module's help as without.
    (It looks for the module at layer 61 alone.)"""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    run = make_run("deepseek_v3-mtp", "fp32")
    sizes = dict(
        num_hidden_layers=61, first_k_dense_replace=60, intermediate_size=16, moe_intermediate_size=16
    )  # its grouped matmul wants 16
    ranks.run(
        "tests.harness.checkpoints:save_on_rank",
        1,
        replace(run, model=replace(run.model, num_nextn_predict_layers=1, **sizes)),
        tmp_path,
        {},
    )
    (folder,) = tmp_path.glob("**/weights")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    prompt = torch.tensor([[5, 9, 2, 77]])
    alone = model.generate(prompt, max_new_tokens=12, do_sample=False)
    torch.testing.assert_close(
        model.generate(prompt, max_new_tokens=12, do_sample=False, use_mtp=True), alone, rtol=0, atol=0
    )
    ours = load_file(folder / "model.safetensors")
    (depth,) = MtpModel.from_pretrained(model).layers
    np.testing.assert_array_equal(depth.eh_proj.weight.detach().numpy(), ours["model.layers.61.eh_proj.weight"])
    np.testing.assert_array_equal(
        depth.post_norm.weight.detach().numpy(), ours["model.layers.61.shared_head.norm.weight"]
    )
    np.testing.assert_array_equal(
        depth.mtp_block.mlp.experts.down_proj[1].detach().numpy(),
        ours["model.layers.61.mlp.experts.1.down_proj.weight"],
    )
