"""Which matrices Muon orthogonalises by themselves, where global tensors hold several; adapters, frozen weights, and
the same bits at any data-parallel size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.homes import homes_of
from phalanx.layout.param import LogicalMatrix, ParamSpec
from phalanx.nn.adapter import find_adapter
from phalanx.ops.optimizer.shard import StateRange, zero_state
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import Muon, MuonConfig, factor_of, polynomials_of
from phalanx.optim.optimizer import StepScalars, StoredMatrix, WholeMatrix
from tests.harness import parity
from tests.optim.test_optimizers import CLIP, STEPS, by_formula, run_of

HERE = __name__


def matrices_of(model: str) -> dict[str, ParamSpec]:
    run = replace(parity.base_run(model), optim=MuonConfig(name="muon", fallback=AdamWConfig()))
    [found] = make_plan(run, 1).matrices[0].values()
    return {matrix.name: matrix for matrix in found}


def outputs_of(matrix: LogicalMatrix) -> list[int]:
    return [i for one in matrix.ranges for i in range(*one)]


def by_transformers(model: str) -> tuple[str, list[torch.Tensor]]:
    """A fused tensor of each family, and the numbers of its outputs as transformers takes them apart: `split`, `view`
    and `chunk` of what the linear gives."""
    c = parity.MODELS[model]
    if model == "gpt2":
        return "c_attn.weight", list(torch.arange(3 * c.hidden_size).split(c.hidden_size))
    if model == "phi3":
        width = c.hidden_size // c.num_attention_heads
        sizes = [width * n for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
        return "qkv_proj.weight", list(torch.arange(sum(sizes)).split(sizes))
    if model == "gpt_neox":
        heads = torch.arange(3 * c.hidden_size).view(c.num_attention_heads, 3, -1)
        return "query_key_value.weight", [part.flatten() for part in heads.unbind(1)]
    if model == "mamba2":
        inner, states = c.num_heads * c.head_dim, c.n_groups * c.state_size
        sizes = [inner, inner, states, states, c.num_heads]
        return "in_proj.weight", list(torch.arange(sum(sizes)).split(sizes))
    if model == "gpt_oss":
        both = torch.arange(2 * c.intermediate_size)
        return "experts.gate_up_proj", [both[::2], both[1::2]]
    if model == "llama4_text":
        return "experts.gate_up_proj", list(torch.arange(2 * c.intermediate_size).chunk(2))
    if model == "modernbert":
        return "Wi.weight", list(torch.arange(2 * c.intermediate_size).chunk(2))
    heads = torch.arange(c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)).view(c.num_attention_heads, -1)
    return "kv_b_proj.weight", [p.flatten() for p in heads.split([c.qk_nope_head_dim, c.v_head_dim], 1)]


@pytest.mark.parametrize(
    "model", ["gpt2", "phi3", "gpt_neox", "gpt_oss", "llama4_text", "modernbert", "deepseek_v3", "mamba2"]
)
def test_fused_tensors_hold_several_matrices(model):
    end, truth = by_transformers(model)
    found = [m for name, m in matrices_of(model).items() if name.partition("[")[0].endswith(end)]
    assert found
    for matrix in found:
        assert [outputs_of(each) for each in matrix.logical] == [part.tolist() for part in truth]
        assert all(each.shape == (len(outputs_of(each)), matrix.shape[-1 - each.dim]) for each in matrix.logical)


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen3"])
def test_others_hold_one(model):
    for matrix in matrices_of(model).values():
        [only] = matrix.logical
        assert only.dim == 0 and only.shape == matrix.shape and outputs_of(only) == list(range(matrix.shape[0]))
        heads = any(f"{x}_proj" in matrix.name for x in "qkv")
        width = parity.MODELS[model].head_width if hasattr(parity.MODELS[model], "head_width") else only.head
        assert bool(only.head) == heads and (not heads or only.head == width)


def one_step(logical, direction: torch.Tensor, **fields) -> torch.Tensor:
    """The update of a matrix of zeros in its first step, without decay and Nesterov, at a rate of 1."""
    muon = Muon(MuonConfig(name="muon", nesterov=False, momentum=0.0, **fields))
    zeros = torch.zeros_like(direction)
    p = WholeMatrix(zeros.clone(), direction, {"momentum": zeros.clone()}, 1.0, 0.0, torch.ones(()), logical=logical)
    muon.update(p)
    return -p.master


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_is_orthogonalised_by_itself(dim, adjust):
    """And scaled by its own shape, in linears' orientation: truth is the formula of each part alone, of all heads at
    once and of each head."""
    parts = ((0, 12, 1),), ((12, 24, 2), (24, 30, 1)), ((13, 24, 2),)
    direction = torch.randn(30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    logical = tuple(LogicalMatrix(dim, p, (sum(len(range(*r)) for r in p), 20), 6) for p in parts)
    given = direction.mT.contiguous() if dim else direction
    polynomials = polynomials_of("jordan", 5)
    for per_head in (False, True):
        found = one_step(logical, given, adjust=adjust, per_head=per_head)
        found = found.mT if dim else found
        for matrix in logical:
            rows = direction[outputs_of(matrix)]
            for head in rows.split(6) if per_head else [rows]:
                at = [i for i, row in enumerate(direction) if any(torch.equal(row, own) for own in head)]
                truth = by_formula(head, polynomials) * factor_of(head.shape, adjust)
                order = [next(i for i in at if torch.equal(direction[i], own)) for own in head]
                torch.testing.assert_close(found[order], truth, rtol=0, atol=1e-12)


def test_equal_matrices_at_once():
    """As one by one, to rounding; each has its own state."""
    muon = Muon(MuonConfig(name="muon"))
    draw = torch.Generator().manual_seed(0)

    def made() -> list[WholeMatrix]:
        draw.manual_seed(0)
        values = [[torch.randn(6, 9, dtype=torch.float64, generator=draw) for _ in range(3)] for _ in range(4)]
        return [WholeMatrix(a, b, {"momentum": c}, 0.1, 0.1, torch.ones(())) for a, b, c in values]

    together, apart = made(), made()
    muon.update_matrices(together, "plain")
    for one in apart:
        muon.update(one)
    for a, b in zip(together, apart):
        torch.testing.assert_close((a.master, a.momentum), (b.master, b.momentum), rtol=1e-12, atol=1e-13)


def test_homes_are_even_by_cost():
    """The costliest first: no home has more than the mean and one matrix."""
    run = replace(parity.base_run("deepseek_v3"), optim=MuonConfig(name="muon", fallback=AdamWConfig()))
    [matrices] = make_plan(run, 1).matrices[0].values()
    cost = Muon(run.optim).cost
    homes = homes_of(matrices, 4, cost)
    loads = [sum(cost(m) for m, home in zip(matrices, homes) if home == rank) for rank in range(4)]
    assert max(loads) <= sum(loads) / 4 + max(map(cost, matrices)) and max(loads) < 1.2 * min(loads)
    square, oblong = (ParamSpec(s, (), logical=(LogicalMatrix(0, ((0, s[0], 1),), s),)) for s in ((64, 64), (16, 256)))
    assert cost(square) > cost(oblong), "as many elements, but larger products"


# ---- layouts


def on_rank(rank: int, world: int, model: str, layout: dict, fields: dict) -> dict:
    run = run_of(model, layout, **fields.get("optim", {}))
    if "lora" in fields:
        run = replace(run, lora=find_adapter("lora").Config(method="lora", **fields["lora"]))
    run = replace(run, train=replace(run.train, **fields.get("train", {})))
    return parity.run_layout(rank, world, run, fields.get("steps", STEPS))


CASES = {
    "heads apart": ("gpt2", 2, {"tp": 2, "sharding": 0}, {"optim": {"per_head": True}}),
    # two steps, and the coefficients that lift small singular values by less: with matrices of rank 2, of which every
    # singular value becomes 1, each step makes rounding about 1,000 times as large
    "LoRA": (
        "llama",
        2,
        {"tp": 2, "sharding": 0},
        {"lora": {"rank": 2}, "optim": {"coefficients": "jordan"}, "steps": 2},
    ),
    "frozen": ("llama", 2, {"sharding": 3}, {"train": {"freeze": ["*mlp*"]}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_in_a_layout(ranks, case):
    model, world, layout, fields = CASES[case]
    [alone] = ranks.run(f"{HERE}:on_rank", 1, model, {"bucket_mb": 0, "sharding": 0}, fields)
    grads = [parity.assemble([g]) for g in alone["grads"]]
    truth = {**alone, "grads": grads, "weights": parity.assemble([alone["weights"]])}
    steps = fields.get("steps", STEPS)
    parity.compare(ranks.run(f"{HERE}:on_rank", world, model, layout, fields), truth, steps)


def bits_on_rank(rank: int, world: int, layout: dict) -> dict:
    run = parity.base_run("llama", precision="bf16")
    optim = MuonConfig(name="muon", lr=1e-2, clip_grad=CLIP, fallback=AdamWConfig(lr=1e-2))
    run = replace(run, optim=optim, layout=LayoutConfig(**layout), train=replace(run.train, deterministic=True))
    return parity.run_layout(rank, world, run, STEPS)


@pytest.mark.parametrize("sharding", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_deterministic_training_has_the_same_bits_at_any_dp(ranks, sharding):
    """With products of 16 bits."""
    [alone] = ranks.run(f"{HERE}:bits_on_rank", 1, {"sharding": 0})
    whole = parity.assemble([r["weights"] for r in ranks.run(f"{HERE}:bits_on_rank", 2, {"sharding": sharding})])
    for name, values in parity.assemble([alone["weights"]]).items():
        assert (values == whole[name]).all(), name


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(24, 20), (12, 31)])
def test_in_place_as_on_copies(shape, skip):
    """Two matrices with padding behind them, updated where they are stored. Truth: update_matrices on copies, which
    leave what is stored alone in a step that is skipped; gradients are cleared in any."""
    rows, columns = shape
    logical = (LogicalMatrix(0, ((0, 8, 1),), (8, columns)), LogicalMatrix(0, ((8, rows, 1),), (rows - 8, columns)))
    muon, numel, rates = Muon(MuonConfig(name="muon")), rows * columns, (0.1, 0.2)
    scalars = StepScalars(torch.ones(()), torch.full((), 0.25), torch.full((), skip))
    draw = torch.Generator().manual_seed(0)

    def stored() -> StateRange:
        values = (torch.zeros(numel + 7, dtype=torch.float64) for _ in range(4))
        master, grad, momentum, out = values
        for x in (master, grad, momentum):
            x[:numel] = torch.randn(numel, dtype=torch.float64, generator=draw)
        return StateRange(master, grad, {"momentum": momentum}, out)

    made = [stored() for _ in range(2)]
    views = [[x[:numel].view(shape).clone() for x in (s.master, s.grad * 0.25, s.state["momentum"])] for s in made]
    wanted = [WholeMatrix(m, g, {"momentum": b}, *rates, torch.ones(()), logical=logical) for m, g, b in views]
    if not skip:
        muon.update_matrices(wanted, "plain")
    assert muon.update_stored([StoredMatrix(s, shape, *rates, logical) for s in made], scalars, "plain")
    for mine, truth in zip(made, wanted):
        for found, values in ((mine.master, truth.master), (mine.state["momentum"], truth.momentum)):
            torch.testing.assert_close(found[:numel].view(shape), values, rtol=1e-12, atol=1e-13)
        assert torch.equal(mine.out[:numel], mine.master[:numel])
        assert not any(x[numel:].any() for x in (mine.master, mine.state["momentum"], mine.out))


def test_packed_state_is_updated_on_copies():
    """Nothing was done to it in place."""
    master, grad = torch.ones(64), torch.ones(64)
    momentum = zero_state(Muon.state, master, torch.uint8)
    matrix = StoredMatrix(StateRange(master, grad, momentum), (8, 8), 0.1, 0.1, ())
    scalars = StepScalars(torch.ones(()), torch.ones(()), torch.zeros(()))
    assert not Muon(MuonConfig(name="muon")).update_stored([matrix], scalars, "plain")
    assert torch.equal(master, torch.ones(64)) and torch.equal(grad, torch.ones(64))
