"""phalanx verify: shrinking keeps the structure, good layouts pass, a dropped collective is found and the right
tensor named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.data.loader import micro_batch_samples, train_loader
from phalanx.forecast.check import check
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.planning.plan import grid_of
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE
from phalanx.verifying.compare import compare, follow, verify, with_fewer_labels
from phalanx.verifying.shrink import MAX_RANKS, shrink, small_copies
from phalanx.verifying.structures import cuts_inside
from recipes import gpt3_175b, gpt_oss_120b, llama3_8b, llama3_70b, mixtral_8x7b, qwen3_235b_a22b
from tests.harness.pool import RanksFailed
from tests.harness.sample import covering, features, rest_in_soak
from tests.harness.verify_patches import PLANTED, planted

USERS = {
    "llama3_8b on 8": (llama3_8b.run(), 8),
    "llama3_70b on 128": (llama3_70b.run(), 128),
    "llama3_70b, 2 virtual stages, full recompute": (
        replace(llama3_70b.run(virtual_stages=2), train=replace(llama3_70b.run().train, recompute="full")),
        64,
    ),
    "gpt3_175b on 128": (gpt3_175b.run(), 128),
    "tiny llama, uneven stages": (
        replace(load_run("recipes/tiny_llama.yaml"), layout=LayoutConfig(pp=2, tp=2, stages=(2, 4))),
        4,
    ),
    "tiny llama, kernels and graphs of a GPU": (
        load_run("recipes/tiny_llama.yaml", ["train.kernels=triton", "train.cuda_graphs=on", "layout.tp=2"]),
        2,
    ),
    "llama3_8b, cp8 on 32": (replace(llama3_8b.run(), layout=replace(llama3_8b.run().layout, cp=8)), 32),
    "llama3_70b, heads exchanged in pairs, a ring of 4": (
        replace(llama3_70b.run(), layout=replace(llama3_70b.run().layout, tp=4, pp=2, cp=8, cp_ulysses=2)),
        128,
    ),
    "gpt3_175b, cp3, tp2, parts of whole multiples": (replace(gpt3_175b.run(), layout=LayoutConfig(tp=2, cp=3)), 6),
    "llama3_8b, level 3 in groups of 8 on 64": (
        replace(llama3_8b.run(), layout=LayoutConfig(sharding=3, shard_group=8)),
        64,
    ),
    "llama3_8b, level 2, pp2 x 2 on 16": (
        replace(llama3_8b.run(), layout=LayoutConfig(sharding=2, pp=2, virtual_stages=2)),
        16,
    ),
    "mixtral_8x7b on 64, ep across dp": (mixtral_8x7b.run(), 64),
    "tiny mixtral, ep4 across tp2 x dp2, load of the step before, capacity": (
        load_run(
            "recipes/tiny_mixtral.yaml",
            [
                "layout.tp=2",
                "layout.ep=4",
                "model.router_aux_loss_scope=global_batch",
                "model.expert_capacity_factor=1.0",
            ],
        ),
        4,
    ),
    "qwen3_235b_a22b on 256": (qwen3_235b_a22b.run(), 256),
    "tiny qwen3_moe, ep2 x etp2, by all-gather": (
        load_run(
            "recipes/tiny_qwen3_moe.yaml",
            ["layout.tp=2", "layout.ep=2", "layout.etp=2", "layout.dispatch=allgather", "model.decoder_sparse_step=2"],
        ),
        8,
    ),
    "tiny gpt_oss, pushed over ep4 x tp2": (
        load_run("recipes/tiny_gpt_oss.yaml", ["layout.tp=2", "layout.ep=4", "layout.dispatch=push"]),
        4,
    ),
    "tiny deepseek_v3, groups, shared experts, a module that predicts ahead": (
        load_run(
            "recipes/tiny_deepseek_v3.yaml",
            [
                "model.first_k_dense_replace=1",
                "model.n_routed_experts=16",
                "model.n_group=4",
                "model.topk_group=2",
                "model.num_experts_per_tok=4",
                "model.moe_intermediate_size=32",
                "model.num_nextn_predict_layers=1",
                "layout.ep=4",
                "layout.pp=2",
            ],
        ),
        8,
    ),
    "gpt_oss_120b on 64": (gpt_oss_120b.run(), 64),
    "tiny gpt2, one rank": (load_run("recipes/tiny_gpt2.yaml"), 1),
}


def rank_compare(rank: int, world: int, run: Run, steps: int, drop: Site | None = None):
    return compare(run, rank, world, steps, drop)


def rank_sites(rank: int, world: int, run: Run) -> list[Site]:
    mesh = Mesh(make_plan(run, world).grid, rank)
    follow(run, mesh, 1, drop=Site("", "", 0, "", ""))
    return list(mesh.watch.calls)


def options(run: Run) -> set:
    """Its family, and which options it sets: their values are made small."""
    return {found if isinstance(found, str) else found[0] for found in features(run)}


@pytest.mark.parametrize(
    "name", rest_in_soak(USERS, covering({name: options(run) for name, (run, _) in USERS.items()}))
)
def test_small_copies_are_valid_and_pass(ranks, name):
    is_valid_and_passes(ranks, shrink(*USERS[name]))


@pytest.mark.soak
@pytest.mark.parametrize("name", USERS)
def test_further_small_copies_are_valid_and_pass(ranks, name):
    for small in small_copies(*USERS[name]).copies[1:]:
        is_valid_and_passes(ranks, small)


def is_valid_and_passes(ranks, small):
    facts = Facts(world_size=small.world, local_ranks=small.world, files=False)
    checked = replace(
        small.run, layout=replace(small.run.layout, bucket_mb=1)
    )  # 0, a bucket per block, is for us alone
    assert [str(p) for p in check(checked, facts) if "device" not in p.field] == []
    verdicts = ranks.run("tests.verifying.test_verify:rank_compare", small.world, small.run, 2)
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
    assert max(make_plan(small.run, small.world).segments_per_stage) > 1  # the run itself has several buckets per stage
    few = replace(run, model=replace(run.model, num_key_value_heads=2))
    assert shrink(few, world).run.model.num_key_value_heads < shrink(few, world).run.layout.tp
    odd = replace(run, model=replace(run.model, vocab_size=128257, tie_word_embeddings=True))
    assert shrink(odd, world).run.model.vocab_size % 2 == 1 and shrink(odd, world).run.model.tie_word_embeddings


def test_axes_of_small_copies():
    def axes(*sizes):
        dense = load_run(
            "recipes/tiny_llama.yaml",
            ["model.num_hidden_layers=16", "model.num_attention_heads=16", "model.num_key_value_heads=8"],
        )
        pp, dp, cp, tp = sizes
        run = replace(
            dense,
            layout=LayoutConfig(pp=pp, cp=cp, tp=tp),
            train=replace(dense.train, micro_batch=2, global_batch=8 * dp),
        )
        found = small_copies(run, pp * dp * cp * tp)
        assert all(copy.world <= MAX_RANKS for copy in found.copies)
        grids = [grid_of(copy.run, copy.world) for copy in found.copies]
        return [(g.pp, g.dp, g.cp, g.tp) for g in grids], [s.name for s in found.lost]

    assert (
        axes(4, 8, 1, 4)[0][0] == (2, 2, 1, 2)
        and axes(1, 64, 1, 1)[0] == [(1, 8, 1, 1)]
        and axes(2, 2, 1, 2)[0] == [(2, 2, 1, 2)]
    )
    three = axes(4, 8, 1, 4)[0]
    assert any(pp > 2 for pp, *_ in three) and any(tp > 2 for *_, tp in three)  # what halving loses, others have
    four, lost = axes(4, 8, 2, 8)
    assert four[0] == (2, 1, 2, 2) and any(dp > 1 for _, dp, _, _ in four) and "data-parallel ranks" not in lost


@pytest.mark.trust(
    8,
    "phalanx verify said nothing of what its small copy lacked",
    "it ends with the structures that were kept and given up",
)
def test_small_copies_say_what_they_lack():
    run, world = USERS["llama3_70b on 128"]
    found = small_copies(run, world)
    text = " ".join(found.report.split())
    assert (
        "structures kept: pipeline stages; tensor-parallel ranks;" in text
        and "a tensor-parallel cut inside a sequence;" in text
    )
    assert "given up (for want of ranks: 8 at most): three or more data-parallel ranks; GPU kernels" in text
    with_fp8 = load_run("recipes/tiny_llama.yaml", ["train.fp8.recipe=tensorwise", "train.precision=bf16"])
    assert "train.fp8 (small sizes have no whole blocks of scales" in " ".join(small_copies(with_fp8, 1).report.split())
    on_cpu = small_copies(load_run("recipes/tiny_gpt2.yaml", ["train.device=cpu"]), 1)
    assert on_cpu.report.endswith("structures given up: none")


BATCHES = [(tp, micro_batch) for tp in (2, 4, 8, 16) for micro_batch in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize("tp, micro_batch", BATCHES)
@pytest.mark.parametrize("cp", [1, 2])
def test_a_cut_inside_a_sequence_stays_inside_one(tp, micro_batch, cp):
    run = load_run("recipes/tiny_gpt2.yaml", ["model.num_attention_heads=16"])
    train = replace(run.train, micro_batch=micro_batch, global_batch=micro_batch * 8)
    run = replace(run, layout=LayoutConfig(tp=tp, cp=cp, pp=2), train=train)
    inside = cuts_inside(micro_batch, train.seq_length, cp, tp)
    for copy in small_copies(run, tp * cp * 2 * 4).copies:
        small = grid_of(copy.run, copy.world)
        if small.tp > 1:
            assert cuts_inside(copy.run.train.micro_batch, copy.run.train.seq_length, small.cp, small.tp) == inside
        assert (copy.run.train.micro_batch > 1) == (micro_batch > 1)


def test_labels_differ_between_ranks_and_micro_batches():
    """Means over ranks or micro-batches instead of tokens show in every copy, however many samples a rank has."""
    for name, (run, world) in USERS.items():
        small = shrink(run, world)
        train, dp = small.run.train, grid_of(small.run, small.world).dp
        loader = train_loader(
            small.run.data, seq_length=train.seq_length, seed=1, vocab_size=small.run.model.vocab_size, samples=99
        )
        lists = [micro_batch_samples(0, train.global_batch, train.micro_batch, dp, rank) for rank in range(dp)]
        parts = [[[sample / train.global_batch for sample in samples] for samples in of] for of in lists]
        counts = [
            [int((with_fewer_labels(loader.batch(s), p).labels != IGNORE).sum()) for s, p in zip(*of)]
            for of in zip(lists, parts)
        ]
        assert len({sum(of) for of in counts}) == dp, name
        assert (
            all(len(set(of)) > 1 for of in counts if len(of) > 1) or train.global_batch // (train.micro_batch * dp) == 1
        ), name


def test_shrinking_keeps_groups_that_shard():
    def of(run, world, **layout):
        small = shrink(replace(run, layout=replace(run.layout, **layout)), world)
        return (small.world, small.run.layout.shard_group, small.run.layout.shard_across)

    groups = dict(sharding=3, shard_group=8, shard_across="optimizer")
    assert of(llama3_8b.run(), 64, **groups) == (8, 2, "optimizer")
    many = replace(llama3_70b.run(), layout=replace(llama3_70b.run().layout, **groups))
    copies = small_copies(many, 256)
    assert (
        any(copy.run.layout.shard_group == 2 for copy in copies.copies)
        and max(copy.world for copy in copies.copies) == 8
    )
    assert not any("shard" in s.name for s in copies.lost)
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
    assert view(replace(mixtral, layout=LayoutConfig(tp=4, ep=8)), 64)[:2] == (
        (1, 4, 2),
        (2, 4, 1),
    )  # across tp and dp, as it was
    assert view(replace(mixtral, layout=LayoutConfig(etp=2, ep=8)), 64)[1] == (2, 2, 2)
    dense, experts, model = view(qwen3_235b_a22b.run(), 64)
    assert experts[1] > 1 and model.num_experts == 2 * experts[1] and 1 < model.num_experts_per_tok < model.num_experts
    assert model.moe_intermediate_size != model.intermediate_size
    assert (
        view(replace(mixtral, layout=LayoutConfig(ep=2), model=replace(mixtral.model, num_experts_per_tok=8)), 8)[
            2
        ].num_experts_per_tok
        == 3
    )
    odd = view(
        load_run("recipes/tiny_qwen3_moe.yaml", ["model.decoder_sparse_step=3", "model.num_hidden_layers=8"]), 2
    )[2]
    assert [odd.has_experts(i) for i in range(odd.num_hidden_layers)] == [False, False, True]
    text = shrink(mixtral, 64).text
    assert "tp 1; 8 experts, edp 2 x ep 8 x etp 1" in text and "edp 2 x ep 2 x etp 1" in text


def test_dropped_collectives_of_experts_are_found(ranks):
    """One site of each axis and operation, with state that is not trained."""
    small = shrink(*USERS["tiny mixtral, ep4 across tp2 x dp2, load of the step before, capacity"])
    sites = {s for found in ranks.run("tests.verifying.test_verify:rank_sites", small.world, small.run) for s in found}
    one_of_each = {(s.op, s.axis): s for s in sorted(sites) if s.axis in ("ep", "edp", "ep x etp")}
    assert one_of_each
    for site in one_of_each.values():
        verdict = ranks.run("tests.verifying.test_verify:rank_compare", small.world, small.run, 2, site)[0]
        assert not verdict.ok, f"dropping {site} went unnoticed"


def test_verify_has_the_small_run_started():
    started, said = [], []
    verify(*USERS["gpt3_175b on 128"], start=lambda *args: started.append(args), steps=3, say=said.append)
    run, world, steps = started[0]
    assert world == 8 and steps == 3 and run.model.num_hidden_layers < 96 and "width 12288" in said[0]
    assert len(started) == len(small_copies(*USERS["gpt3_175b on 128"]).copies) == len(said) - 1
    assert said[1].startswith("verified   8 ranks") and said[-1].startswith("structures kept: pipeline stages;")


def test_dropping_the_sum_of_norm_gradients_names_a_norm(ranks):
    small = shrink(replace(load_run("recipes/tiny_llama.yaml"), layout=LayoutConfig(tp=2)), 2)
    sites = ranks.run("tests.verifying.test_verify:rank_sites", 2, small.run)[0]
    (site,) = [s for s in sites if s.function == "sum_together" and s.axis == "tp"]
    verdict = ranks.run("tests.verifying.test_verify:rank_compare", 2, small.run, 1, site)[0]
    assert not verdict.ok
    lines = verdict.text.splitlines()
    assert lines[0].startswith(
        "DIFFERS from one process: step 1, gradient of model.layers.0.input_layernorm.weight is off by"
    )
    assert "on ranks 0, 1" in lines[0] and "rank 1 (pp 0, dp 0, cp 0, tp 1) holds [0:" in verdict.text
    assert "The last in model order: step 1, gradient of model.norm.weight" in verdict.text


def test_dropped_collectives_of_every_axis_are_found(ranks):
    """One site of each axis and operation (the central test drops every one)."""
    small = shrink(replace(load_run("recipes/tiny_gpt2.yaml"), layout=LayoutConfig(tp=2, pp=2)), 4)
    sites = {s for found in ranks.run("tests.verifying.test_verify:rank_sites", small.world, small.run) for s in found}
    one_of_each = {(s.op, s.axis): s for s in sorted(sites)}
    assert len(one_of_each) > 5
    for site in one_of_each.values():
        verdict = ranks.run("tests.verifying.test_verify:rank_compare", small.world, small.run, 2, site)[0]
        assert not verdict.ok, f"dropping {site} went unnoticed"


def test_a_gradient_that_no_rank_holds_is_reported(ranks):
    small = shrink(load_run("recipes/tiny_llama.yaml"), 2)
    verdict = ranks.run("tests.verifying.test_verify:rank_hole", 2, small.run)[0]
    assert "elements are NaN or on no rank" in verdict.text


def rank_hole(rank: int, world: int, run: Run):
    import phalanx.verifying.compare as module

    real = module.boxes_of
    module.boxes_of = lambda state, what: {
        k: [(b, v.fill_(float("nan")) if world == state.mesh.grid.world else v) for b, v in boxes]
        for k, boxes in real(state, what).items()
    }
    try:
        return compare(run, rank, world, 1)
    finally:
        module.boxes_of = real


def rank_compare_planted(rank: int, world: int, run: Run, name: str):
    with planted(name):
        return compare(run, rank, world, 2)


def finds(ranks, name: str, run: Run, world: int) -> bool:
    """Whether the comparison of this run on its ranks differs with the error, or cannot even be made."""
    try:
        return not ranks.run("tests.verifying.test_verify:rank_compare_planted", world, run, name)[0].ok
    except RanksFailed:
        return True


def copies_find(ranks, name: str, run: Run, world: int) -> bool:
    return any(finds(ranks, name, copy.run, copy.world) for copy in small_copies(run, world).copies)


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(ranks, name):
    """Each changes what its own run computes; the small copies of that run and of a larger one show it."""
    error = PLANTED[name]
    assert ranks.run("tests.verifying.test_verify:rank_compare", error.world, error.own[0], 2)[0].ok, (
        "the run differs without the error"
    )
    assert finds(ranks, name, *error.own), "the error changes nothing"
    assert copies_find(ranks, name, *error.own), "not found in small copies of the run"
    assert copies_find(ranks, name, *error.larger), "not found in small copies of a larger run"


SAMPLE = (
    "learned positions of rank 0 on every tp rank",
    "dropout by places of rank 0 on every tp rank",
    "key-value heads of another group of tp ranks",
    "middle pipeline ranks send twice as much",
    "keys of the cp rank on the other side",
    "mean over data-parallel ranks instead of tokens",
)


@pytest.mark.trust(
    8,
    "phalanx verify of tp=4 where positions and dropout went by a rank's own places",
    "the error is found: cuts stay inside sequences",
)
@pytest.mark.parametrize("name", rest_in_soak(SAMPLE, SAMPLE[::2]))
def test_some_planted_errors_are_found(ranks, name):
    """In the small copies of a larger run: these need a structure that halving every axis would lose."""
    assert copies_find(ranks, name, *PLANTED[name].larger)


def test_a_copy_with_images_has_images(ranks):
    """The tower's weights have gradients in the copy that is compared."""
    run = load_run("recipes/tiny_llava.yaml", ["layout.tp=2", "layout.pp=2"])
    copy = shrink(run, 4)
    loader = train_loader(
        copy.run.data,
        seq_length=copy.run.train.seq_length,
        seed=1,
        vocab_size=copy.run.model.vocab_size,
        samples=8,
        reading=reading_of(copy.run),
    )
    images = [len(loader.batch([number]).beside["patches"].units.sizes) for number in range(8)]
    assert sum(images) >= 4 and min(images) == 0
    is_valid_and_passes(ranks, copy)
