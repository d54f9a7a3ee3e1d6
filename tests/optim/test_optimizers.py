"""Muon, Lion and SGD: against torch's and the formulas of the papers, in layouts, from the config."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from phalanx.base.errors import CheckpointError
from phalanx.base.placement import Placement
from phalanx.checkpoint.load import load_state
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run, read
from phalanx.config.run import CheckpointConfig
from phalanx.config.write import save_run
from phalanx.engine.build import build
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.ops.optimizer import orthogonal
from phalanx.ops.optimizer.orthogonal import orthogonalized
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.lion import LionConfig
from phalanx.optim.muon import POLYNOMIALS, MuonConfig, factor_of, polynomials_of
from phalanx.optim.optimizer import ParamRange, WholeMatrix, find_optimizer
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.sample import covering, rest_in_soak
from tests.training.test_loop import make_run

HERE = __name__
SHAPES = ((24, 24), (48, 16), (16, 48), (7, 5), (1, 9), (9, 1))
SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true"]
CHANGED = ["optim.lr=5e-4", "optim.weight_decay=0"]
LORA = "lora.method=lora lora.rank=2 lora.targets=['*q_proj*']"


def stepped(name: str, shape, steps: int, dtype=torch.float64, **fields):
    """A matrix after so many steps, its state, and the gradients of the steps."""
    made = find_optimizer(name)
    optimizer = made(made.Config(name=name, **fields))
    draw = torch.Generator().manual_seed(sum(shape))
    first = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    grads = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(steps)]
    kind = WholeMatrix if made.owns == "matrix" else ParamRange
    state = {key: torch.zeros(shape, dtype=dtype) for key in made.state}
    p = kind(first.clone(), grads[0], state, 0.02, 0.1, torch.ones(()))
    for number, grad in enumerate(grads, 1):
        p.grad, p.step = grad.clone(), torch.tensor(float(number))
        optimizer.update(p)
        assert torch.equal(p.grad, grad)
    return p, first, grads


def by_torch(make, first, grads):
    weight = torch.nn.Parameter(first.clone())
    optimizer = make([weight])
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_is_torchs(monkeypatch, shape, adjust, nesterov):
    """In the direct form, which is torch's for every shape. Without torch's cast to bf16 both are one formula in
    float64; with it, torch is off by its rounding, and ours by less."""
    monkeypatch.setattr(orthogonal, "TOGETHER", 1)
    options = dict(adjust=adjust, nesterov=nesterov)
    make = partial(torch.optim.Muon, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    p, first, grads = stepped("muon", shape, 4, torch.float32, **options)
    rounded = by_torch(make, first, grads)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    truth = by_torch(make, first.double(), [grad.double() for grad in grads])
    exact, wide, wide_grads = stepped("muon", shape, 4, torch.float64, **options)
    torch.testing.assert_close(exact.master, by_torch(make, wide, wide_grads), rtol=1e-10, atol=1e-10)
    assert 0 < (p.master - truth).norm() < 0.5 * (rounded - truth).norm()


@pytest.mark.parametrize("coefficients", POLYNOMIALS)
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (96, 64), (30, 120)], ids=str)
def test_products_in_fp16_round_less_than_in_bf16(monkeypatch, shape, coefficients):
    """Directly and in Gram form, as on GPUs, against the formula in float64, of singular values that span a factor of a
    thousand."""
    draw, polynomials = np.random.default_rng(sum(shape)), polynomials_of(coefficients, 6)
    matrices = []
    for _ in range(8):
        u, _, v = np.linalg.svd(draw.standard_normal(shape), full_matrices=False)
        matrices.append(torch.from_numpy(u * np.geomspace(1, 1e-3, min(shape)) @ v))
    truth, errors = torch.stack([by_formula(matrix, polynomials) for matrix in matrices]), []
    for together, dtype in ((orthogonal.TOGETHER, torch.float16), (1, torch.float16), (1, torch.bfloat16)):
        monkeypatch.setattr(orthogonal, "TOGETHER", together)
        monkeypatch.setattr(orthogonal, "products_in", lambda x, narrow, dtype=dtype: dtype)
        found = orthogonalized(torch.stack(matrices), polynomials, narrow=True)
        assert found.dtype == dtype
        errors.append((found - truth).norm() / truth.norm())
    assert errors[0] < 0.5 * errors[2] and errors[1] < 0.25 * errors[2]


def by_formula(matrix, polynomials):
    """Of its singular values, by a decomposition."""
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return torch.from_numpy(u * s @ v)


@pytest.mark.parametrize("coefficients", POLYNOMIALS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_is_the_formula(shape, coefficients):
    given = POLYNOMIALS[coefficients]
    polynomials = [*given, *[given[-1]] * 9][:7]
    p, first, grads = stepped("muon", shape, 3, coefficients=coefficients, iterations=7)
    weight, momentum = first, torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad
        update = by_formula(0.05 * grad + 0.95 * momentum, polynomials)
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * 0.2 * max(shape) ** 0.5 * update
    torch.testing.assert_close(p.master, weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(p.momentum, momentum, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("coefficients", "iterations", "least", "most"), [("jordan", 5, 0.65, 1.25), ("polar_express", 8, 0.99, 1.02)]
)
def test_singular_values_are_near_one(coefficients, iterations, least, most):
    """Those from a hundredth of the norm on; and the update is as large as AdamW's, 0.2 an element."""
    draw = np.random.default_rng(0)
    u, v = (np.linalg.qr(draw.standard_normal((64, 64)))[0] for _ in range(2))
    s = np.geomspace(1, 0.05, 64)
    x = torch.from_numpy(u * s @ v)
    [found] = orthogonalized(x[None], polynomials_of(coefficients, iterations), narrow=False)
    values = torch.linalg.svdvals(found)
    assert least < values.min() and values.max() < most
    assert abs(float((found * factor_of(found.shape, "match_rms_adamw")).square().mean().sqrt()) - 0.2) < 0.04


def test_a_matrix_of_zeros_stays():
    for columns in (4, 6):
        assert not orthogonalized(torch.zeros(1, 4, columns), polynomials_of("jordan", 5), narrow=True).any()


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs(nesterov):
    """Which has no decoupled decay: ours is done beside it."""
    p, first, grads = stepped("sgd", (40,), 5, nesterov=nesterov)
    weight, velocity = first.clone(), torch.zeros(40, dtype=torch.float64)
    for grad in grads:
        one = torch.nn.Parameter(weight * (1 - 0.02 * 0.1))
        optimizer = torch.optim.SGD([one], 0.02, momentum=0.9, nesterov=nesterov)
        optimizer.state[one]["momentum_buffer"] = velocity
        one.grad = grad
        optimizer.step()
        weight, velocity = one.detach(), optimizer.state[one]["momentum_buffer"]
    torch.testing.assert_close(p.master, weight, rtol=0, atol=1e-15)


def test_lion_is_its_paper():
    """Algorithm 2: sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g."""
    p, first, grads = stepped("lion", (40,), 6, beta1=0.8, beta2=0.95)
    weight, momentum = first.numpy().copy(), np.zeros(40)
    for grad in (g.numpy() for g in grads):
        update = np.sign(0.8 * momentum + 0.2 * grad)
        momentum = 0.95 * momentum + 0.05 * grad
        weight -= 0.02 * (update + 0.1 * weight)
    np.testing.assert_allclose(p.master.numpy(), weight, rtol=0, atol=1e-15)


# ---- layouts


MODELS_OF = {
    "llama": ({"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}),
    "llama-tied": ({"tp": 2, "pp": 2}, {"pp": 2}),
    "gpt2": ({"tp": 2}, {"pp": 2, "tp": 2}),
    "mixtral": ({"ep": 2, "tp": 2}, {"ep": 2, "etp": 2}),
    "gpt_oss": ({"ep": 2, "tp": 2}, {"pp": 2, "ep": 2}),
    "deepseek_v3": ({"ep": 2, "tp": 2}, {"pp": 2}),
}
LAYOUTS = {
    "tp2": ("llama", 2, {"tp": 2, "sharding": 0}),
    "pp2 dp2 ZeRO-3": ("llama", 4, {"pp": 2, "sharding": 3}),
    "cp2 ZeRO-2": ("llama", 2, {"cp": 2, "sharding": 2}),
    "ep2 tp2 ZeRO-1": ("mixtral", 4, {"ep": 2, "tp": 2, "sharding": 1}),
    "etp2": ("mixtral", 4, {"ep": 2, "etp": 2, "sharding": 2}),
    "stacked": ("gpt_oss", 4, {"ep": 2, "tp": 2, "sharding": 3}),
    "conv1d": ("gpt2", 2, {"tp": 2, "sharding": 0}),
    "tied": ("llama-tied", 4, {"tp": 2, "pp": 2, "sharding": 1}),
    "latents": ("deepseek_v3", 4, {"ep": 2, "tp": 2, "sharding": 2}),
    "groups": ("llama", 4, {"sharding": 2, "shard_group": 2}),
    "groups, state over all": ("llama", 4, {"sharding": 3, "shard_group": 2, "shard_across": "optimizer"}),
    "one bucket each": ("llama", 8, {"tp": 2, "pp": 2, "sharding": 3, "bucket_mb": 0}),
    "tp4 with 2 kv heads": ("llama", 4, {"tp": 4, "sharding": 0}),
} | {
    f"{model} {sizes} ZeRO-{level}": (model, 4, {**sizes, "sharding": level})
    for model, layouts in MODELS_OF.items()
    for sizes in layouts
    for level in ((0, 1, 2, 3) if sizes == layouts[1] else (0, 3))
    if level in (0, 3) or model in ("llama", "mixtral")
}
SAMPLE = covering({case: {model, *layout.items()} for case, (model, _, layout) in LAYOUTS.items()})
FURTHER = [
    name
    for name, model in parity.MODELS.items()
    if name not in MODELS_OF and not (model.both_ways or model.reads_beside or model.needs_room)
]
LAYOUTS |= {  # every other family that makes text, in the soak
    name: (name, 4, {"tp": 2, "ep" if parity.MODELS[name].routed_experts else "pp": 2, "sharding": number % 4})
    for number, name in enumerate(FURTHER)
}
STEPS, CLIP = 3, 0.05


def run_of(model: str, layout: dict, **fields):
    """AdamW's first update is nearly the sign of a gradient, so of its rounding where it is tiny: in some models that
    is more than 1e-9 two steps later, unless eps is larger."""
    run = parity.base_run(model, precision="fp64")
    fallback = AdamWConfig(lr=1e-2, eps=1e-4 if model in FURTHER else 1e-8)
    own = {"coefficients": "polar_express", "fallback": fallback, **fields}
    optim = MuonConfig(name="muon", lr=1e-2, clip_grad=CLIP, **own)
    return replace(run, optim=optim, layout=LayoutConfig(**layout))


def one_rank(rank: int, world: int, model: str, layout: dict) -> dict:
    return parity.run_layout(rank, world, run_of(model, layout), STEPS)


@cache
def truth_of(ranks, model: str) -> dict:
    [alone] = ranks.run(f"{HERE}:one_rank", 1, model, {"bucket_mb": 0, "sharding": 0})
    grads = [parity.assemble([g]) for g in alone["grads"]]
    return {**alone, "grads": grads, "weights": parity.assemble([alone["weights"]])}


@pytest.mark.parametrize("case", rest_in_soak(LAYOUTS, SAMPLE))
def test_muon_is_the_same_in_every_layout(ranks, case):
    model, world, layout = LAYOUTS[case]
    parity.compare(ranks.run(f"{HERE}:one_rank", world, model, layout), truth_of(ranks, model), STEPS)


# ---- the config


def refused(*overrides: str) -> dict[str, str]:
    loaded = read(None, [*SMALL, *overrides])
    problems = loaded.problems or check(loaded.run, Facts(1))
    return {p.field: p.rule for p in problems}


def test_one_rate_for_all():
    """Until the fallback has its own."""
    run = load_run(None, [*SMALL, "optim.name=muon", "optim.lr=1e-3", "optim.weight_decay=0.05"])
    assert run.optim.fallback == AdamWConfig(lr=1e-3, weight_decay=0.05)
    run = load_run(None, [*SMALL, "optim.name=muon", "optim.lr=1e-3", "optim.fallback.beta2=0.9"])
    assert run.optim.fallback == AdamWConfig(lr=1e-3, beta2=0.9)
    run = load_run(None, [*SMALL, "optim.name=muon", "optim.lr=1e-3", "optim.fallback.lr=5e-4"])
    assert run.optim.fallback == AdamWConfig(lr=5e-4)


@pytest.mark.parametrize(
    ("overrides", "field", "rule"),
    [
        ("optim.name=muon optim.adjust=original", "optim.fallback.lr", "must be given with optim.adjust=original"),
        ("optim.name=muon optim.momentum=1", "optim.momentum", "must be a number in [0, 1)"),
        ("optim.name=muon optim.iterations=0", "optim.iterations", "[1, 100)"),
        ("optim.name=muon optim.beta1=0.9", "optim.beta1", "is a key of optim only with name adamw, lion"),
        ("optim.name=adamw optim.nesterov=true", "optim.nesterov", "only with name muon, sgd"),
        ("optim.name=lion optim.beta2=1", "optim.beta2", "must be a number in [0, 1)"),
        ("optim.name=sgd optim.momentum=-1", "optim.momentum", "must be a number in [0, 1)"),
        ("optim.name=muon optim.masters=split", "optim.masters", "of whole matrices"),
        ("optim.name=muon optim.lr_scale.*embed*=0.1", "optim.lr_scale.*embed*", "must fit tensors that this"),
        ("optim.name=muon optim.fallback.lr_scale.*q_proj*=2", "optim.fallback.lr_scale.*q_proj*", "must fit"),
        ("optim.name=muon optim.per_head=true train.freeze=['*attn*']", "optim.per_head", "has no effect without"),
        (f"{LORA} optim.name=muon optim.per_head=true", "optim.per_head", "has no effect without matrices that have"),
        ("optim.name=lion optim.beta2=0.999 optim.moments=bf16", "optim.beta2", "must be <= 0.99 with bf16 moments"),
        ("optim.name=sgd optim.momentum=0.995 optim.moments=bf16", "optim.momentum", "<= 0.99 with bf16 moments"),
        ("optim.name=muon optim.momentum=0.995 optim.moments=bf16", "optim.momentum", "<= 0.99 with bf16 moments"),
    ],
)
def test_refused(overrides, field, rule):
    found = refused(*overrides.split())
    assert list(found) == [field] and rule in found[field]


@pytest.mark.parametrize(
    "overrides",
    [
        "optim.name=muon optim.lr_scale.*layers.0*=0.1 optim.fallback.lr_scale.*layers.0*=0.1",  # matrices and norms
        "optim.name=muon optim.per_head=true",
        "optim.lr_scale.*embed*=0.1",
        "optim.name=muon optim.moments=bf16 optim.momentum=0.99",
        f"{LORA} optim.name=muon optim.lr_scale.*lora_B*=4",
    ],
)
def test_not_refused(overrides):
    assert not refused(*overrides.split())


@pytest.mark.parametrize("field", ["optim.moments", "optim.fallback.moments"])
def test_fp8_moments_of_both_need_a_gpu_that_has_fp8(field):
    run = load_run(None, [*SMALL, "optim.name=muon", f"{field}=fp8"])
    [found] = check(run, Facts(1, capability=(8, 0), device_name="A100"))
    assert found.field == field and not check(run, Facts(1, capability=(9, 0), device_name="H100"))


def test_its_own_rate_of_the_fallback_is_enough():
    assert not refused("optim.name=muon", "optim.adjust=original", "optim.lr=0.02", "optim.fallback.lr=3e-4")


def test_the_fallback_of_a_saved_run_follows_it_too(tmp_path):
    """What it had taken over changes with it; what was its own stays."""
    base = load_run(None, [*SMALL, "optim.name=muon", "optim.fallback.weight_decay=0.01"])
    save_run(base, tmp_path / "config.yaml")
    assert load_run(tmp_path / "config.yaml") == base
    for run in (load_run(tmp_path / "config.yaml", CHANGED), load_run(None, CHANGED, base)):
        assert (run.optim.fallback.lr, run.optim.fallback.weight_decay) == (5e-4, 0.01)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_rate_of_no_tensor_is_said(tmp_path, capfd, name):
    """Of Muon's matrices, and of what its fallback updates."""
    run = make_run(tmp_path, steps=1)
    optim = replace(AdamWConfig(), lr_scale={"*norm*": 2.0, "*nrom*": 2.0})
    if name == "muon":
        optim = MuonConfig(name="muon", lr_scale={"*proj*": 2.0, "*porj*": 2.0}, fallback=optim)
    train(replace(run, optim=optim), Placement())
    said = capfd.readouterr().err
    wrong = (
        ["optim.lr_scale.*nrom*"] if name == "adamw" else ["optim.fallback.lr_scale.*nrom*", "optim.lr_scale.*porj*"]
    )
    assert [line.split()[1] for line in said.splitlines() if "does nothing" in line] == wrong, said


# ---- a checkpoint of another optimizer


def loaded(path, run):
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    load_state(path, state, run.model)
    return state.optimizer


def test_a_state_of_another_optimizer_begins_anew_if_asked(tmp_path):
    """Masters are those of the checkpoint. The next checkpoint has the new optimizer's state, which is resumed."""
    run = make_run(tmp_path, steps=2)
    run = replace(run, optim=AdamWConfig(lr=3e-3), checkpoint=CheckpointConfig(interval=2))
    train(run, Placement())
    muon = MuonConfig(name="muon", lr=3e-3, fallback=AdamWConfig(lr=3e-3))
    longer = replace(run, train=replace(run.train, steps=4), optim=muon)
    with pytest.raises(
        CheckpointError, match="is of adamw, whose state is m, v; muon with adamw needs momentum, .*optim.restart=true"
    ):
        train(longer, Placement())
    longer = replace(longer, optim=replace(muon, restart=True))
    steps = [tmp_path / "checkpoints" / f"step-0000000{step}" for step in (2, 4)]
    kept, begun = loaded(steps[0], run), loaded(steps[0], longer)
    assert begun.step == 0 and not any(s.values(kind).any() for s in begun.shards for kind in s.kinds[1:])
    of_both = [sum(float(s.values("master").double().square().sum()) for s in o.shards) for o in (kept, begun)]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-12)
    train(longer, Placement())
    resumed = loaded(steps[1], longer)
    assert resumed.step == 2 and all(s.values(kind).any() for s in resumed.shards for kind in s.kinds)


def test_a_state_of_the_same_name_begins_anew_too(tmp_path):
    """Lion's momentum is not Muon's; the one of the same optimizers is resumed."""
    lion = LionConfig(name="lion", lr=1e-3)
    run = replace(make_run(tmp_path, steps=2), optim=lion, checkpoint=CheckpointConfig(interval=2))
    train(run, Placement())
    path, muon = tmp_path / "checkpoints" / "step-00000002", MuonConfig(name="muon", fallback=lion)
    for optim, step in ((muon, 2), (replace(muon, restart=True), 0), (replace(lion, restart=True), 2)):
        found = loaded(path, replace(run, optim=optim))
        assert found.step == step and all(s.values("momentum").any() == bool(step) for s in found.shards)
