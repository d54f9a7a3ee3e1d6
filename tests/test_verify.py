"""phalanx verify: shrinking keeps the structure, good layouts pass, a dropped collective is found and the right tensor named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.layout.config import LayoutConfig
from phalanx.train.checks import Facts, check
from phalanx.train.config import Run
from phalanx.train.load import load_run
from phalanx.train.plan import grid_of, make_plan
from phalanx.train.verify import compare, fewer_ranks, follow, shrink, verify
from recipes import gpt3_175b, gpt_oss_120b, llama3_8b, llama3_70b, mixtral_8x7b, qwen3_235b_a22b
from tests.sample import covering, features, rest_in_soak

USERS = {
    "llama3_8b on 8": (llama3_8b.run(), 8),
    "llama3_70b on 128": (llama3_70b.run(), 128),
    "llama3_70b, 2 virtual stages, full recompute": (
        replace(llama3_70b.run(virtual_stages=2), train=replace(llama3_70b.run().train, recompute="full")), 64,
    ),
    "gpt3_175b on 128": (gpt3_175b.run(), 128),
    "tiny llama, uneven stages": (replace(load_run("recipes/tiny_llama.yaml"), layout=LayoutConfig(pp=2, tp=2, stages=(2, 4))), 4),
    "tiny llama, kernels and graphs of a GPU": (
        load_run("recipes/tiny_llama.yaml", ["train.kernels=triton", "train.cuda_graphs=on", "layout.tp=2"]), 2,
    ),
    "llama3_8b, cp8 on 32": (replace(llama3_8b.run(), layout=replace(llama3_8b.run().layout, cp=8)), 32),
    "llama3_70b, heads exchanged in pairs, a ring of 4": (
        replace(llama3_70b.run(), layout=replace(llama3_70b.run().layout, tp=4, pp=2, cp=8, cp_ulysses=2)), 128,
    ),
    "gpt3_175b, cp3, tp2, parts of whole multiples": (replace(gpt3_175b.run(), layout=LayoutConfig(tp=2, cp=3)), 6),
    "llama3_8b, level 3 in groups of 8 on 64": (replace(llama3_8b.run(), layout=LayoutConfig(sharding=3, shard_group=8)), 64),
    "llama3_8b, level 2, pp2 x 2 on 16": (replace(llama3_8b.run(), layout=LayoutConfig(sharding=2, pp=2, virtual_stages=2)), 16),
    "mixtral_8x7b on 64, ep across dp": (mixtral_8x7b.run(), 64),
    "tiny mixtral, ep4 across tp2 x dp2, load of the step before, capacity": (
        load_run("recipes/tiny_mixtral.yaml", ["layout.tp=2", "layout.ep=4", "model.router_aux_loss_scope=global_batch",
                                               "model.expert_capacity_factor=1.0"]), 4,
    ),
    "qwen3_235b_a22b on 256": (qwen3_235b_a22b.run(), 256),
    "tiny qwen3_moe, ep2 x etp2, by all-gather": (
        load_run("recipes/tiny_qwen3_moe.yaml", ["layout.tp=2", "layout.ep=2", "layout.etp=2", "layout.dispatch=allgather",
                                                 "model.decoder_sparse_step=2"]), 8,
    ),
    "tiny gpt_oss, pushed over ep4 x tp2": (load_run("recipes/tiny_gpt_oss.yaml", ["layout.tp=2", "layout.ep=4", "layout.dispatch=push"]), 4),
    "tiny deepseek_v3, groups, shared experts, a module that predicts ahead": (
        load_run("recipes/tiny_deepseek_v3.yaml", ["model.first_k_dense_replace=1", "model.n_routed_experts=16", "model.n_group=4",
                                                   "model.topk_group=2", "model.num_experts_per_tok=4", "model.moe_intermediate_size=32",
                                                   "model.num_nextn_predict_layers=1", "layout.ep=4", "layout.pp=2"]), 8,
    ),
    "gpt_oss_120b on 64": (gpt_oss_120b.run(), 64),
    "tiny gpt2, one rank": (load_run("recipes/tiny_gpt2.yaml"), 1),
}  # fmt: skip


def rank_compare(rank: int, world: int, run: Run, steps: int, drop: Site | None = None):
    return compare(run, rank, world, steps, drop)


def rank_sites(rank: int, world: int, run: Run) -> list[Site]:
    mesh = Mesh(make_plan(run, world).grid, rank)
    follow(run, mesh, 1, drop=Site("", "", 0, "", ""))
    return list(mesh.watch.calls)


@pytest.mark.parametrize("name", rest_in_soak(USERS, covering({name: features(run) for name, (run, _) in USERS.items()})))
def test_small_copies_are_valid_and_pass(ranks, name):
    small = shrink(*USERS[name])
    facts = Facts(world_size=small.world, local_ranks=small.world, files=False)
    checked = replace(small.run, layout=replace(small.run.layout, bucket_mb=1))  # 0, a bucket per block, is for us alone
    assert [str(p) for p in check(checked, facts) if "device" not in p.field] == []
    verdicts = ranks.run("tests.test_verify:rank_compare", small.world, small.run, 2)
    assert all(v.ok for v in verdicts), verdicts[0].text
    assert verdicts[0].text.startswith("OK: losses, norms, gradients of")


def test_shrinking_keeps_the_structure():
    run, world = USERS["llama3_70b on 128"]
    small = shrink(run, world)
    grid = grid_of(small.run, small.world)
    assert (grid.pp, grid.dp, grid.tp) == (2, 2, 2)
    assert "128 ranks (pp 4 x dp 8 x tp 4)" in small.text and "8 ranks (pp 2 x dp 2 x tp 2)" in small.text
    model = small.run.model
    assert model.num_attention_heads > model.num_key_value_heads >= 2 and model.rope_scaling == run.model.rope_scaling
    assert small.run.layout.sharding == 1 and small.run.train.precision == "fp64"
    assert max(make_plan(small.run, small.world).runs_per_stage) > 1  # the run itself has several buckets per stage
    few = replace(run, model=replace(run.model, num_key_value_heads=2))
    assert shrink(few, world).run.model.num_key_value_heads < shrink(few, world).run.layout.tp
    odd = replace(run, model=replace(run.model, vocab_size=128257, tie_word_embeddings=True))
    assert shrink(odd, world).run.model.vocab_size % 2 == 1 and shrink(odd, world).run.model.tie_word_embeddings
    assert fewer_ranks([4, 8, 1, 4]) == [2, 2, 1, 2] and fewer_ranks([1, 64, 1, 1]) == [1, 8, 1, 1] and fewer_ranks([3, 3, 1, 1]) == [2, 3, 1, 1]
    assert fewer_ranks([4, 8, 2, 8]) == [2, 1, 2, 2]
    assert fewer_ranks([4, 8, 1, 4], data=4) == [2, 4, 1, 2] and fewer_ranks([4, 8, 2, 8], data=4) == [2, 2, 2, 2]


def test_shrinking_keeps_groups_that_shard():
    def of(run, world, **layout):
        small = shrink(replace(run, layout=replace(run.layout, **layout)), world)
        return (small.world, small.run.layout.shard_group, small.run.layout.shard_across)

    groups = dict(sharding=3, shard_group=8, shard_across="optimizer")
    assert of(llama3_8b.run(), 64, **groups) == (8, 2, "optimizer")
    assert of(llama3_70b.run(), 256, **groups) == (16, 2, "optimizer")
    assert of(llama3_8b.run(), 8, sharding=3, shard_group=8) == (8, None, "nothing")  # one group is all ranks
    assert of(mixtral_8x7b.run(), 64, sharding=3, shard_group=8) == (8, 2, "nothing")


def test_shrinking_keeps_how_experts_are_spread():
    def view(run, world):
        small = shrink(run, world)
        grid = grid_of(small.run, small.world)
        return (grid.pp, grid.dp, grid.tp), (grid.edp, grid.ep, grid.etp), small.run.model

    mixtral = mixtral_8x7b.run()
    assert view(mixtral, 64)[:2] == ((2, 4, 1), (2, 2, 1))  # pp 4 x dp 16, edp 2 x ep 8
    dense, experts, model = view(replace(mixtral, layout=LayoutConfig(tp=8, ep=8)), 64)
    assert (dense, experts) == ((1, 2, 4), (2, 4, 1))  # ep 8 lies within tp 8
    assert (model.num_local_experts, model.num_experts_per_tok) == (4, 2)
    assert view(replace(mixtral, layout=LayoutConfig(tp=4, ep=8)), 64)[:2] == ((1, 2, 4), (1, 8, 1))  # across tp and dp, as it was
    assert view(replace(mixtral, layout=LayoutConfig(etp=2, ep=8)), 64)[1] == (2, 2, 2)
    dense, experts, model = view(qwen3_235b_a22b.run(), 64)
    assert experts[1] > 1 and model.num_experts == 2 * experts[1] and 1 < model.num_experts_per_tok < model.num_experts
    assert model.moe_intermediate_size != model.intermediate_size
    assert view(replace(mixtral, layout=LayoutConfig(ep=2), model=replace(mixtral.model, num_experts_per_tok=8)), 8)[2].num_experts_per_tok == 3
    odd = view(load_run("recipes/tiny_qwen3_moe.yaml", ["model.decoder_sparse_step=3", "model.num_hidden_layers=8"]), 2)[2]
    assert [odd.has_experts(i) for i in range(odd.num_hidden_layers)] == [False, False, True]
    text = shrink(mixtral, 64).text
    assert "tp 1; 8 experts, edp 2 x ep 8 x etp 1" in text and "edp 2 x ep 2 x etp 1" in text


def test_dropped_collectives_of_experts_are_found(ranks):
    """One site of each axis and operation, with state that is not trained."""
    small = shrink(*USERS["tiny mixtral, ep4 across tp2 x dp2, load of the step before, capacity"])
    sites = {s for found in ranks.run("tests.test_verify:rank_sites", small.world, small.run) for s in found}
    one_of_each = {(s.op, s.axis): s for s in sorted(sites) if s.axis in ("ep", "edp", "ep x etp")}
    assert one_of_each
    for site in one_of_each.values():
        verdict = ranks.run("tests.test_verify:rank_compare", small.world, small.run, 2, site)[0]
        assert not verdict.ok, f"dropping {site} went unnoticed"


def test_verify_has_the_small_run_started():
    started, said = [], []
    verify(*USERS["gpt3_175b on 128"], start=lambda *args: started.append(args), steps=3, say=said.append)
    ((run, world, steps),) = started
    assert world == 8 and steps == 3 and run.model.num_hidden_layers < 96 and "width 12288" in said[0]


def test_dropping_the_sum_of_norm_gradients_names_a_norm(ranks):
    small = shrink(replace(load_run("recipes/tiny_llama.yaml"), layout=LayoutConfig(tp=2)), 2)
    sites = ranks.run("tests.test_verify:rank_sites", 2, small.run)[0]
    (site,) = [s for s in sites if s.function == "sum_together" and s.axis == "tp"]
    verdict = ranks.run("tests.test_verify:rank_compare", 2, small.run, 1, site)[0]
    assert not verdict.ok
    lines = verdict.text.splitlines()
    assert lines[0].startswith("DIFFERS from one process: step 1, gradient of model.layers.0.input_layernorm.weight is off by")
    assert "on ranks 0, 1" in lines[0] and "rank 1 (pp 0, dp 0, cp 0, tp 1) holds [0:" in verdict.text
    assert "The last in model order: step 1, gradient of model.norm.weight" in verdict.text


def test_dropped_collectives_of_every_axis_are_found(ranks):
    """One site of each axis and operation (the central test drops every one)."""
    small = shrink(replace(load_run("recipes/tiny_gpt2.yaml"), layout=LayoutConfig(tp=2, pp=2)), 4)
    sites = {s for found in ranks.run("tests.test_verify:rank_sites", small.world, small.run) for s in found}
    one_of_each = {(s.op, s.axis): s for s in sorted(sites)}
    assert len(one_of_each) > 5
    for site in one_of_each.values():
        verdict = ranks.run("tests.test_verify:rank_compare", small.world, small.run, 2, site)[0]
        assert not verdict.ok, f"dropping {site} went unnoticed"


def test_a_gradient_that_no_rank_holds_is_reported(ranks):
    small = shrink(load_run("recipes/tiny_llama.yaml"), 2)
    verdict = ranks.run("tests.test_verify:rank_hole", 2, small.run)[0]
    assert "elements are NaN or on no rank" in verdict.text


def rank_hole(rank: int, world: int, run: Run):
    import phalanx.train.verify as module

    real = module.boxes_of
    module.boxes_of = lambda state, what: {k: [(b, v.fill_(float("nan")) if world == state.mesh.grid.world else v) for b, v in boxes]
                                           for k, boxes in real(state, what).items()}  # fmt: skip
    try:
        return compare(run, rank, world, 1)
    finally:
        module.boxes_of = real
