"""An optimizer of whole matrices from outside the package, in one file that no file of ours names: orthogonalised
momentum, found by `module:NAME`, through the central test, checkpoints, the forecast and the config."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from phalanx.base.placement import Placement
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.tools import diff, reshard
from phalanx.comm.mesh import Mesh
from phalanx.config.read import explain, load_run, read
from phalanx.config.run import CheckpointConfig, Run
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.build import build, init_weights
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Coords
from phalanx.layout.homes import homes_of
from phalanx.observe.out_of_memory import held
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer
from phalanx.training.main import train
from tests.data_parallel.test_quantized_weights import codes_of, low_run
from tests.harness import checkpoints, parity
from tests.harness.pool import RanksFailed
from tests.harness.sample import covering, rest_in_soak
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
LINEARS, EVERY = "whole_matrix.orthogonal:OrthogonalMomentum", "whole_matrix.orthogonal:EveryMatrix"
STEPS, CLIP = 3, 0.05
HERE = "tests.outside.test_matrix_optimizer"


def orthogonal(name: str = LINEARS, **fields) -> OptimConfig:
    return find_optimizer(name).Config(name=name, **fields)


def run_of(model: str, layout: dict, precision: str = "fp64", name: str = LINEARS, **fields) -> Run:
    run = parity.base_run(model, precision=precision)
    return replace(run, optim=orthogonal(name, **fields), layout=LayoutConfig(**layout))


def one_rank(rank: int, world: int, model: str, layout: dict, name: str) -> dict:
    return parity.run_layout(rank, world, run_of(model, layout, name=name, clip_grad=CLIP), STEPS)


LAYOUTS = {
    "tp2": ("llama", 2, {"tp": 2, "sharding": 0}),
    "pp2": ("llama", 2, {"pp": 2, "sharding": 0}),
    "cp2": ("llama", 2, {"cp": 2, "sharding": 2}),
    "dp2 ZeRO-0": ("llama", 2, {"sharding": 0}),
    "dp2 ZeRO-1": ("llama", 2, {"sharding": 1}),
    "dp2 ZeRO-2": ("llama", 2, {"sharding": 2}),
    "dp2 ZeRO-3": ("llama", 2, {"sharding": 3}),
    "all": ("llama", 8, {"tp": 2, "pp": 2, "sharding": 3, "bucket_mb": 0}),
    "ep2": ("mixtral", 4, {"ep": 2, "tp": 2, "sharding": 3}),
    "etp2": ("mixtral", 4, {"ep": 2, "etp": 2, "sharding": 1}),
    "stacked": ("gpt_oss", 4, {"ep": 2, "tp": 2, "sharding": 2}),
    "conv1d": ("gpt2", 4, {"tp": 2, "sharding": 2}),
    "tied": ("llama-tied", 4, {"tp": 2, "pp": 2, "sharding": 1}),
    "replicas": ("llama", 4, {"tp": 4, "sharding": 0}),
    "groups": ("llama", 4, {"sharding": 3, "shard_group": 2}),
}
TAKES_EVERYTHING = ("tied", "stacked", "ep2")


SAMPLE = covering({case: {model, *layout.items()} for case, (model, _, layout) in LAYOUTS.items()})


@cache
def truth_of(ranks, model: str, name: str) -> dict:
    """One process, whose gradients and weights any layout must have."""
    [alone] = ranks.run(f"{HERE}:one_rank", 1, model, {"bucket_mb": 0, "sharding": 0}, name)
    grads = [parity.assemble([g]) for g in alone["grads"]]
    return {**alone, "grads": grads, "weights": parity.assemble([alone["weights"]])}


@pytest.mark.parametrize("case", rest_in_soak(LAYOUTS, SAMPLE))
def test_it_is_the_same_in_every_layout(ranks, case):
    model, world, layout = LAYOUTS[case]
    name = EVERY if case in TAKES_EVERYTHING else LINEARS
    truth = truth_of(ranks, model, name)
    assert min(truth["norms"]) > CLIP
    parity.compare(ranks.run(f"{HERE}:one_rank", world, model, layout, name), truth, STEPS)


# ---- checkpoints


def save_on_rank(rank: int, world: int, model: str, layout: dict, root: Path) -> bool:
    return checkpoints.save_on_rank(rank, world, run_of(model, layout, "bf16"), root, {})


def load_on_rank(rank: int, world: int, model: str, layout: dict, path: Path, name: str = LINEARS) -> list[str]:
    return checkpoints.load_on_rank(rank, world, run_of(model, layout, "bf16", name), path)


def error_on_rank(rank: int, world: int, layout: dict, path: Path) -> str:
    return checkpoints.error_on_rank(rank, world, run_of("llama", layout, "bf16", EVERY), "load_state", path)


def test_checkpoints_go_from_layout_to_layout(ranks, tmp_path):
    assert all(ranks.run(f"{HERE}:save_on_rank", 4, "llama", {"tp": 2, "sharding": 3}, tmp_path))
    path = tmp_path / "step-00000010"
    for world, layout in ((2, {"pp": 2, "sharding": 1}), (1, {"sharding": 0})):
        assert not any(ranks.run(f"{HERE}:load_on_rank", world, "llama", layout, path))
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    with Contents(path) as contents:
        assert contents.kinds == ("weights", "master", "momentum", "m", "v")
        assert [kind for kind in contents.state_kinds if q in contents.shapes(kind)] == ["master", "momentum"]
        assert [kind for kind in contents.state_kinds if norm in contents.shapes(kind)] == ["master", "m", "v"]
    anew = reshard(path, tmp_path / "anew", files=3)
    assert not list(diff(path, anew))
    assert not any(ranks.run(f"{HERE}:load_on_rank", 1, "llama", {"sharding": 0}, anew))
    [said] = ranks.run(f"{HERE}:error_on_rank", 1, {"sharding": 0}, path)
    assert "other parameters went to optim.fallback" in said
    assert "lm_head.weight: it has master, m, v, its optimizer needs master, momentum" in said and norm not in said


def test_checkpoints_of_experts(ranks, tmp_path):
    assert all(ranks.run(f"{HERE}:save_on_rank", 4, "gpt_oss", {"tp": 2, "ep": 2, "sharding": 1}, tmp_path))
    assert not any(ranks.run(f"{HERE}:load_on_rank", 1, "gpt_oss", {"sharding": 0}, tmp_path / "step-00000010"))


def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    """In bf16, whose masters are at home alone: by its own config."""
    run = make_run(tmp_path / "whole", steps=4)
    optim = orthogonal(lr=1e-2, fallback=AdamWConfig(lr=1e-3, beta2=0.9, moments="bf16"), decay_steps=4)
    run = replace(run, optim=optim, checkpoint=CheckpointConfig(interval=2))
    run = replace(run, train=replace(run.train, precision="bf16"))
    train(run, Placement())
    train(replace(run, dir=str(tmp_path / "halves"), train=replace(run.train, steps=2)), Placement())
    again = load_run(tmp_path / "halves/config.yaml", ["train.steps=4", f"optim.name={LINEARS}"])
    assert again.optim == run.optim and again.optim.fallback.beta2 == 0.9
    train(again, Placement())
    whole, halves = (Path(tmp_path / name / "checkpoints/step-00000004") for name in ("whole", "halves"))
    assert [line.partition(":")[0] for line in diff(whole, halves)] == ["config.dir"]


def test_initial_weights_are_those_of_any_optimizer(ranks):
    """The cast of the masters, which are made at home in their own dtype."""
    expected = ranks.run(f"{HERE}:initial_weights", 1, {"sharding": 0}, "adamw")[0]
    for result in ranks.run(f"{HERE}:initial_weights", 2, {"sharding": 1}, LINEARS):
        assert result == expected


def initial_weights(rank: int, world: int, layout: dict, name: str) -> list[tuple[str, float]]:
    run = run_of("llama", layout, "bf16")
    run = replace(run, optim=run.optim if name != "adamw" else AdamWConfig())
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    init_weights(state.model)
    state.buffers.gather()
    state.buffers.ready()
    found = []
    for block in state.model.modules:
        found += [(p.spec.name, p.double().square().sum().item()) for p in block.parameters()]
    before = [p.clone() for p in state.model.modules.parameters()]
    state.buffers.publish()
    state.buffers.ready()
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.modules.parameters()))
    return sorted(found)


# ---- memory


def bytes_on_rank(
    rank: int, world: int, layout: dict, moments: str
) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    """(pipeline rank, forecast, held) bytes by kind."""
    plan = make_plan(run_of("llama", layout, "bf16", moments=moments), world)
    state = build(plan, Mesh(plan.grid, rank))
    return state.mesh.at.pp, rank_uses(plan, 4)[0][state.mesh.at.pp].memory, held(state)


@pytest.mark.parametrize("moments", ["master", "fp8"])
def test_the_forecast_is_what_the_fullest_home_holds(ranks, moments):
    layout = {"tp": 2, "pp": 2, "sharding": 1, "bucket_mb": 0}
    found = ranks.run(f"{HERE}:bytes_on_rank", 8, layout, moments)
    for pp in range(2):
        of_stage = [(forecast, actual) for at, forecast, actual in found if at == pp]
        assert len(of_stage) == 4
        for kind in ("weights", "gradients", "masters", "moments"):
            assert of_stage[0][0][kind] == max(actual[kind] for _, actual in of_stage) > 0, kind


def test_homes_are_even():
    """Of a stage's 28 matrices on 4 ranks no home has half as much again as another; every matrix has one home."""
    plan = make_plan(run_of("llama", {"tp": 2}), 4)
    (matrices,) = plan.matrices[0].values()
    homes = homes_of(matrices, 4)
    loads = [sum(prod(m.shape) for m, home in zip(matrices, homes) if home == rank) for rank in range(4)]
    assert len(matrices) == len({m.name for m in matrices}) == 28 and max(loads) <= 1.5 * min(loads)


# ---- the update


def test_a_skipped_step_changes_nothing():
    """Of matrices at home too: no bit of masters, state and weights. The step before and after do change them."""
    plan = make_plan(run_of("llama", {}, "bf16"), 1)
    state = build(plan, Mesh(plan.grid, 0))
    init_weights(state.model)
    for skip in (0.0, 1.0, 0.0):
        for flat in state.buffers.flat:
            flat.grad.normal_() if not skip else flat.grad.fill_(torch.nan)
        shards = state.optimizer.shards
        kept = [(s, kind, s.values(kind).clone()) for s in shards for kind in s.kinds]
        weights = [p.clone() for p in state.model.modules.parameters()]
        state.optimizer.update(0.1, torch.tensor(skip), torch.tensor(0.5))
        same = [torch.equal(s.values(kind), before) for s, kind, before in kept]
        same += [torch.equal(p, before) for p, before in zip(state.model.modules.parameters(), weights)]
        assert all(same) if skip else not any(same)
        assert not any(flat.grad.any() for flat in state.buffers.flat)
    assert state.optimizer.step == 2


def test_rates_and_decay_of_both_optimizers():
    """Truth: the formula, of one matrix and of a norm, with an lr_scale each."""
    optim = orthogonal(lr=0.1, lr_scale={"*q_proj*": 0.5}, weight_decay=0.2)
    own = AdamWConfig(lr=0.02, lr_scale={"*norm*": 3.0}, eps=1e-12)
    run = replace(run_of("llama", {}), optim=replace(optim, fallback=own))
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    init_weights(state.model)
    found = {p.spec.name: p for p in state.model.modules.parameters()}
    norm, qkv = found["model.norm.weight"], found["model.layers.1.self_attn.q_proj.weight"]
    q = qkv.spec.pieces[0].of(qkv.detach())
    before, generator = q.clone(), torch.Generator().manual_seed(0)
    for flat in state.buffers.flat:
        flat.grad.copy_(torch.randn(flat.grad.shape, dtype=torch.float64, generator=generator))
    x = 0.05 * qkv.spec.pieces[0].of(qkv.grad)
    x = x / (x.norm() + 1e-12)
    for _ in range(8):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    state.optimizer.update(0.05, torch.tensor(0.0))  # half of optim.lr
    torch.testing.assert_close(q, before * (1 - 0.025 * 0.2) - 0.025 * x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close((norm.detach() - 1.0).abs(), torch.full_like(norm, 0.01 * 3.0), rtol=1e-9, atol=0)


# ---- roles and the config


@pytest.mark.parametrize("model", parity.MODELS)
def test_every_parameter_has_its_role(model):
    """Truth: names and shapes of Hugging Face's tensors."""
    plan = make_plan(parity.base_run(model), 1)
    specs = [p.spec for blocks in plan.blocks_of(Coords()).values() for b in blocks for p in b.parameters()]
    for name, shape, role in ((p.name, p.shape, spec.role) for spec in specs for p in spec.pieces):
        if name.endswith(("bias", "sinks", "A_log")):
            expected = {"router"} if "e_score_correction" in name else {"bias"}
        elif "lm_head" in name or "embed_out" in name:
            expected = {"head"}
        elif "relative_attention_bias" in name:
            expected = {"bias"}
        elif len(shape) == 1:
            expected = {"norm"} if name.endswith(("weight", "layer_scalar", "router.scale")) else {"bias", "router"}
        elif name == "shared.weight" or any(word in name for word in ("embed", "wte", "wpe")):
            expected = {"embedding"}
        elif any(
            word in name
            for word in (
                "mlp.gate.weight",
                "block_sparse_moe.gate.weight",
                "mlp.router.weight",
                "router.proj.weight",
                "feed_forward.router.weight",
                "mixer.gate.weight",
                "shared_expert_gate.weight",
            )
        ):
            expected = {"router"}
        elif name.endswith("_bias"):
            expected = {"bias"}
        elif "conv" in name:
            expected = {"conv"}
        else:
            expected = {"expert"} if "experts." in name and "shared" not in name else {"linear"}
        assert role in expected, (name, shape, role)


def test_a_tied_head_is_an_embedding():
    plan = make_plan(run_of("llama-tied", {"pp": 2}), 2)
    roles = {
        (p.spec.name, p.spec.role)
        for pp in range(2)
        for blocks in plan.blocks_of(Coords(pp=pp)).values()
        for b in blocks
        for p in b.parameters()
        if "embed" in p.spec.name
    }
    assert roles == {("model.embed_tokens.weight", "embedding")}


SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true", f"optim.name={LINEARS}"]


def refused(*overrides: str) -> dict[str, tuple[str, tuple]]:
    loaded = read(None, [*SMALL, *overrides])
    problems = loaded.problems or check(loaded.run, Facts(1))
    return {p.field: (p.rule, p.valid) for p in problems}


def test_the_fallback_in_the_config():
    run = load_run(None, [*SMALL, "optim.fallback.lr=1e-3", "optim.fallback.beta1=0.5"])
    assert run.optim == orthogonal(fallback=AdamWConfig(lr=1e-3, beta1=0.5))
    assert load_run(None, SMALL).optim.fallback == AdamWConfig()
    assert load_run(None, [*SMALL, "optim.name=adamw"]).optim.fallback is None
    assert explain("optim.fallback.lr").startswith("optim.lr: float")
    assert "The optimizer of parameters that the one of optim.name does not take" in explain("optim.fallback")
    assert not refused()


@pytest.mark.parametrize(
    "overrides, field, rule, valid",
    [
        ("optim.fallback.name=adamv", "optim.fallback.name", 'must be one of "adamw"', "adamw"),
        (f"optim.fallback.name={LINEARS}", "optim.fallback.name", "takes the roles which optim.name leaves", None),
        (
            "optim.fallback.betta1=0.5",
            "optim.fallback.betta1",
            "is not a key of optim.fallback",
            "optim.fallback.beta1",
        ),
        ("optim.fallback.beta1=fast", "optim.fallback.beta1", "must be float, got string", 0.9),
        ("optim.fallback.beta1=1.5", "optim.fallback.beta1", "must be a number in [0, 1)", 0.9),
        ("optim.fallback.clip_grad=2.0", "optim.fallback.clip_grad", "has no effect without an optimizer that", 1.0),
        ("optim.name=adamw optim.fallback.lr=1", "optim.fallback", "has no effect without an optimizer that", None),
        ("optim.lr=0 optim.fallback.lr=3e-4", "optim.lr", "must be > 0 where optim.fallback.lr is", 3e-4),
    ],
)
def test_a_wrong_fallback_is_refused(overrides, field, rule, valid):
    found = refused(*overrides.split())
    assert list(found) == [field]
    assert "AdamWConfig" not in str(found), "values are shown as they are typed"
    assert rule in found[field][0] and (valid is None or valid in found[field][1])


def test_code_named_by_a_checkpoint_is_not_imported():
    base = {"optim": {"name": "adamw", "fallback": {"name": "evil.module:NAME"}}}
    found = read(None, SMALL, base, base_from="a checkpoint").problems
    assert [p.field for p in found] == ["optim.fallback.name"] and "imported only if you name it" in found[0].rule


def test_wrong_classes_are_refused():
    assert (
        "takes a role that there is not: 'matrices'"
        in refused("optim.name=whole_matrix.orthogonal:NoSuchRole")["optim.name"][0]
    )


# ---- FP8 weights


def codes_on_rank(rank: int, world: int, sharding: int) -> dict[str, torch.Tensor]:
    run = low_run("tensorwise", "low-wide", train=dict(precision="bf16", deterministic=True, global_batch=4))
    layout = LayoutConfig(bucket_mb=0, sharding=sharding)
    return codes_of(rank, world, replace(run, optim=orthogonal(lr=1e-2), layout=layout))


def test_weights_kept_in_fp8_follow_their_homes(ranks):
    """dp2 after two steps: where masters come from homes to be cast on the ranks that keep quantized values, the same
    bits as at level 0, where every rank casts the weights themselves."""
    exact = ranks.run(f"{HERE}:codes_on_rank", 2, 0)
    for level in (1, 3):
        for found in ranks.run(f"{HERE}:codes_on_rank", 2, level):
            assert found.keys() == exact[0].keys()
            assert all(torch.equal(found[name], exact[0][name]) for name in exact[0])


def test_deterministic_training_gives_the_same_bits(ranks):
    """train.deterministic: weights after three steps do not depend on dp and the ZeRO stage."""
    [alone] = ranks.run(f"{HERE}:deterministic_on_rank", 1, {"sharding": 0})
    for level in (0, 3):
        results = ranks.run(f"{HERE}:deterministic_on_rank", 2, {"sharding": level, "bucket_mb": 0})
        whole = parity.assemble([result["weights"] for result in results])
        for name, values in parity.assemble([alone["weights"]]).items():
            assert (values == whole[name]).all(), name


def deterministic_on_rank(rank: int, world: int, layout: dict) -> dict:
    run = run_of("llama", layout, clip_grad=CLIP)
    run = replace(run, train=replace(run.train, deterministic=True))
    return parity.run_layout(rank, world, run, STEPS)


def test_a_loop_with_an_optimizer_of_its_own_is_refused(tmp_path):
    """Masters at home are beside the weights: who updates the weights alone would be overruled."""
    plan = make_plan(run_of("llama", {"sharding": 0}), 1)
    assert build(plan, Mesh(plan.grid, 0)).buffers.separate_masters
    plain = make_plan(parity.base_run("llama"), 1)
    assert not build(
        replace(plain, run=replace(plain.run, layout=LayoutConfig(sharding=0))), Mesh(plain.grid, 0)
    ).buffers.separate_masters


def test_the_exchange_with_homes_matters(ranks):
    """Without what goes over the stage, the comparison with one process fails: each way alone, and both."""
    layout = {"tp": 2, "sharding": 0}
    truth = truth_of(ranks, "llama", LINEARS)
    for way in ("bring_gradients", "send_weights"):
        with pytest.raises((AssertionError, RanksFailed)):
            parity.compare(ranks.run(f"{HERE}:one_way", 2, layout, way), truth, STEPS)


def one_way(rank: int, world: int, layout: dict, dropped: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        real = getattr(MatrixHome, dropped)

        def without(home: MatrixHome, bucket: int) -> None:
            """Gradients stay zero; weights stay where they were."""
            if dropped == "bring_gradients":
                real(home, bucket)
                home._open.gradient.zero_()

        patch.setattr(MatrixHome, dropped, without)
        return one_rank(rank, world, "llama", layout, LINEARS)
