"""Attention as data: which backend computes which kind, what is refused and how it is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.inference.memory import kept_by
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.models.registry import load_family
from phalanx.nn.attention import Attention, AttentionSpec
from phalanx.nn.env import Env, OpChoices, WeightRules
from phalanx.nn.objective import TaskConfig
from phalanx.nn.query_temperature import QueryTemperature
from phalanx.ops.attention.attention import ATTENTION, attention, offers
from phalanx.ops.attention.kind import CAUSAL, AttentionKind, Learned, RelativeBias, UnsupportedAttention
from tests.harness.parity import SEQ, VOCAB, compare, truth_of
from tests.harness.weights import with_memory
from tests.ops.test_ops import UNIFORM, normal
from tests.outside.kinds import KindsConfig

KINDS = "tests.outside.kinds:FAMILY"
BIAS = RelativeBias(8, 9)


def chosen(kind: AttentionKind, kernels: str = "auto", dtype: torch.dtype = torch.float32) -> str:
    q = torch.empty(1, 2, 8, 64, dtype=dtype)
    chosen = ATTENTION.fast(kernels, q, 64, 64, False, kind.window is not None, asked=kind.features)  # type: ignore[arg-type]
    return (chosen or ATTENTION.reference).__name__


def test_a_kind_is_computed_by_the_first_backend_that_has_it():
    for kind in (CAUSAL, AttentionKind(window=3), AttentionKind(sinks=True, scale=0.1)):
        assert chosen(kind) == chosen(kind, "plain") == "ByTorch"
    for kind in (AttentionKind(soft_cap=5.0), AttentionKind(direction="prefix"), AttentionKind(bias=BIAS)):
        assert chosen(kind, dtype=torch.bfloat16) == "ByTorch" and chosen(kind, "invariant") == (
            "FromPages" if kind.soft_cap else "Formula"
        )
    assert chosen(AttentionKind("both", chunk=4), "optional", torch.bfloat16) == "ByFlashAttn"
    assert chosen(CAUSAL, "optional", torch.bfloat16) == "ByFlashAttn"  # insisted on; the config was checked before


def test_features_are_what_differs_from_plain_causal_attention():
    assert CAUSAL.features == set()
    assert AttentionKind(window=3, soft_cap=1.0, sinks=True).features == {"window", "soft_cap", "sinks"}
    assert AttentionKind("both").features == {"direction"} and AttentionKind("prefix").features == {"prefix"}


def test_a_kind_that_nobody_has_is_refused_by_name():
    q, kind = torch.empty(2, 2, 5, 3), AttentionKind(direction="both", bias=BIAS)
    with pytest.raises(UnsupportedAttention) as error:
        attention(q, q, q, UNIFORM, kind, Learned(bias=torch.zeros(8, 2)), "invariant")
    assert str(error.value) == (
        "no backend computes attention with bias, direction: invariant has no bias, no direction: "
        "set train.batch_invariant=false"
    )
    with pytest.raises(ValueError, match="sinks=False"):
        attention(q, q, q, UNIFORM, CAUSAL, Learned(torch.zeros(2)))
    with pytest.raises(ValueError, match="no row for each of 8 buckets"):
        attention(q, q, q, UNIFORM, AttentionKind(bias=BIAS), Learned(bias=torch.zeros(7, 2)))
    with pytest.raises(UnsupportedAttention, match="set task.name to an objective that makes them"):
        attention(q, q, q, UNIFORM, AttentionKind("prefix"))


def layer(
    kind: AttentionKind,
    sinks: str | None = None,
    dropout: float = 0.0,
    grid: Grid | None = None,
    ops: OpChoices | None = None,
) -> Attention:
    env = Env(grid=grid or Grid(), ops=ops or OpChoices())
    spec = AttentionSpec(
        names=("q", "k", "v", "o"),
        width=8,
        heads=4,
        kv_heads=4,
        head_dim=4,
        std=0.1,
        kind=kind,
        sinks=sinks,
        dropout=dropout,
    )
    return Attention(env, spec)


def test_a_layer_is_refused_when_it_is_built():
    everything = AttentionKind("both", window=3, chunk=4, soft_cap=5.0)
    for grid in (Grid(), Grid(cp=2, ulysses=2), Grid(cp=2)):
        assert layer(everything, "sinks", 0.1, grid).kind == replace(everything, sinks=True)
    kind = AttentionKind("prefix", soft_cap=5.0)
    with pytest.raises(UnsupportedAttention, match="flash-attn has no prefix: set train.kernels=auto"):
        layer(kind, ops=OpChoices(kernels="optional"))
    assert layer(kind, ops=OpChoices(kernels="optional", plain_ops=("attention",))).kind == kind
    with pytest.raises(UnsupportedAttention, match="invariant has no direction"):
        layer(AttentionKind("both"), ops=OpChoices(batch_invariant=True))


@pytest.mark.parametrize(
    "kind",
    [
        AttentionKind(soft_cap=0.7),
        AttentionKind(chunk=3),
        AttentionKind(sinks=True),
        AttentionKind(bias=BIAS),
        AttentionKind("both"),
        AttentionKind("prefix"),
    ],
    ids=str,
)
def test_each_feature_changes_the_result(kind):
    """A backend that left it out would be seen."""
    q, k, v = (normal(2, 2, 5, 3, seed=i) for i in range(3))
    sinks = torch.zeros(2, dtype=torch.float64) if kind.sinks else None
    bias = normal(8, 2) if kind.bias else None
    batch = replace(UNIFORM, prefix=torch.tensor([1, 1, 0, 0, 0] * 2), _made={})
    assert not torch.allclose(attention(q, k, v, batch, kind, Learned(sinks, bias)), attention(q, k, v, UNIFORM))


def test_keys_are_counted_for_flops():
    """Truth: counted one by one; the diagonal of causal attention is half a key."""
    for kind in (CAUSAL, AttentionKind(window=5), AttentionKind(chunk=8), AttentionKind(chunk=8, window=3)):
        chunk, window = kind.chunk or 32, kind.window or 32
        counted = sum(min(i % chunk + 0.5, window) if window < chunk else i % chunk + 0.5 for i in range(32)) / 32
        assert kind.keys_per_query(32) == pytest.approx(counted, rel=0.02)
        assert AttentionKind("both", kind.window, kind.chunk).keys_per_query(32) == 2 * kind.keys_per_query(32)
        assert AttentionKind("prefix", kind.window, kind.chunk).keys_per_query(32) == kind.keys_per_query(32)


def test_backends_are_told_apart_by_name():
    assert list(offers("auto")) == ["flash-attn", "torch-flash", "torch", "formula"]


# ---- a family of another package whose layers attend in different ways ----------------------------


def run_of(**layout: object) -> Run:
    load_family(KINDS)
    task = TaskConfig(name="tests.outside.kinds:Prefixed")
    train = TrainConfig(steps=10, global_batch=8, micro_batch=1, seq_length=SEQ, precision="fp64")
    sizes = dict(hidden_size=32, intermediate_size=42, num_hidden_layers=4, num_attention_heads=4, head_dim=8)
    model = KindsConfig(
        attends="prefix chunk window both", family=KINDS, vocab_size=VOCAB, num_key_value_heads=2, **sizes
    )
    return Run(model=model, train=train, layout=LayoutConfig(**layout), data=DataConfig(mock=True), task=task)


LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2, sharding 3": {"sharding": 3},
    "cp2 by heads": {"cp": 2, "cp_ulysses": 2},
    "cp2 by ring": {"cp": 2, "cp_attention": "ring"},
    "cp2 by all-gather": {"cp": 2, "cp_attention": "allgather"},
    "dynamic cp2": {"cp": 2, "cp_degree": "dynamic"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(ranks, name):
    """With prefixes, inside documents."""
    run = run_of(**LAYOUTS[name])
    truth = truth_of(ranks, run, 2, "prefix")
    compare(ranks.run("tests.harness.parity:run_layout", 2, run, 2, "prefix"), truth, 2)


def test_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path):
    assert all(ranks.run("tests.harness.checkpoints:save_on_rank", 2, run_of(tp=2), tmp_path, {}))
    (path,) = tmp_path.glob("step-*")
    assert ranks.run("tests.harness.checkpoints:load_on_rank", 2, run_of(sharding=3), path) == [[], []]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=str)
def test_memory_is_forecast(layout):
    """Of every kind. A bias is made again in backward: a layer keeps no square of it."""
    run = run_of(**layout)
    long = replace(run, train=replace(run.train, seq_length=1024, precision="bf16"))
    uses, _ = rank_uses(make_plan(long, 2), 2)
    square = 2 * 1024 * 1024 * 2  # bytes of the bias of this rank's heads, or queries
    assert all(0 < use.memory["activations"] < square for use in uses)


def test_what_cannot_be_remembered_is_refused_for_generation():
    with pytest.raises(ConfigError) as error:
        kept_by(make_plan(run_of(), 1))
    said = "does not generate text: attention to what is remembered has no prefix (tokens read later ones)"
    assert f"model.family='{KINDS}': {said}" in str(error.value)
    assert layer(AttentionKind(soft_cap=3.0, chunk=4)).whole_only is None
    assert layer(AttentionKind("both")).whole_only == (
        "attention to what is remembered has no direction (tokens read later ones)"
    )


def test_queries_have_a_temperature_by_position():
    """Truth: Llama 4's formula, one position at a time; positions restart at documents."""
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 11])
    batch = replace(UNIFORM, positions=positions, _made={})
    q = normal(2, 3, 5, 4)
    found = QueryTemperature(3, 0.4).applied(q, batch)
    for t, position in enumerate(positions.tolist()):
        factor = math.log(math.floor((position + 1) / 3) + 1) * 0.4 + 1
        torch.testing.assert_close(found[t // 5, :, t % 5], q[t // 5, :, t % 5] * factor, rtol=1e-14, atol=0)
    low = QueryTemperature(3, 0.4).applied(q.bfloat16(), batch)
    assert low.dtype == torch.bfloat16 and torch.equal(low, (q.bfloat16().float() * (found / q).float()).bfloat16())
    with pytest.raises(ValueError, match="must be positive"):
        QueryTemperature(0, 0.1)


def test_a_layer_applies_its_temperature():
    """Truth: where all positions are the same, so is a scale of the scores that is as many times larger."""
    factor = 1 + 0.4 * math.log(3)
    env = Env(weights=WeightRules(dtype=torch.float64))
    batch = replace(UNIFORM, positions=torch.full((10,), 7), _made={})
    names = dict(names=("q", "k", "v", "o"), width=8, heads=4, kv_heads=4, head_dim=4, std=0.1)
    found = []
    for changes in ({"temperature": QueryTemperature(3, 0.4)}, {"kind": AttentionKind(scale=factor / 2)}):
        made = with_memory(Attention(env, AttentionSpec(**names, **changes)))
        for i, p in enumerate(made.parameters()):
            p.data.copy_(normal(*p.shape, seed=i))
        found.append(made(normal(10, 8, seed=5), batch))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
