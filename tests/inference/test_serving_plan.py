"""`phalanx plan --serve`: its bytes are those that an engine allocates, and its sequences those that an engine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.base.devices import find_device
from phalanx.base.errors import ConfigError
from phalanx.cli.plan_serving import AskedServing, plan_serving
from phalanx.config.run import Run
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD
from phalanx.inference.drafter import drafts_named
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import without_training
from phalanx.inference.memory import MemoryLimits, row_bytes, sequence_bytes
from phalanx.inference.predictor import MtpSpec
from phalanx.inference.serving_plan import ServingPlan, check_fits, check_held, limits_of, room_on
from phalanx.layout.grid import Coords
from phalanx.nn.module import Module
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.ops.attention.paged import FP8
from tests.harness.generation import random_model, run_of

OPTIONS = EngineOptions(sequences=3, tokens=8, page_size=4, length=14)
LIMITS = MemoryLimits(3, 8, 14, 4)
CASES = (
    ("llama", {}, "model"),  # grouped queries
    ("gpt_oss", {}, "model"),  # windows beside layers that keep everything
    ("mistral", {}, "model"),  # windows alone
    ("deepseek_v3", {}, "model"),  # latents
    ("llama", {}, "fp8"),
    ("deepseek_v3", {}, "fp8"),
    pytest.param("llama", {"tp": 2}, "model", marks=pytest.mark.soak),
    ("gpt_oss", {"tp": 2, "pp": 2}, "fp8"),
    pytest.param("deepseek_v3-mtp", {"pp": 2}, "model", marks=pytest.mark.soak),
    ("deepseek_v3-mtp", {"tp": 2, "pp": 2}, "mtp:3"),  # pages of modules that draft, and what they keep
    ("deepseek_v3-mtp", {}, "mtp:1"),
    ("qwen3_moe", {"tp": 2, "ep": 2}, "model"),
    ("gpt_oss", {"cp": 2}, "fp8"),
    ("t5", {"tp": 2, "pp": 2}, "model"),  # pages of what an encoder has read
    ("t5", {}, "fp8"),
    pytest.param("llava", {"pp": 2}, "model", marks=pytest.mark.soak),  # a tower remembers nothing
)


def serving_of(
    run: Run, world: int, pages: str = "model", limits: MemoryLimits = LIMITS, drafts: MtpSpec | None = None
) -> ServingPlan:
    plan = make_plan(without_training(run, world), world)
    return ServingPlan.of(plan, limits, FP8 if pages == "fp8" else None, drafts)


@pytest.mark.parametrize("model, layout, pages", CASES, ids=lambda value: str(value))
def test_the_forecast_is_what_an_engine_allocates(ranks, model, layout, pages):
    """Byte for byte, on every rank: weights, pages, and what is kept of each sequence."""
    run, cp = run_of(model, **layout), layout.get("cp", 1)
    world, limits = layout.get("tp", 1) * cp * layout.get("pp", 1), replace(LIMITS, page_size=4 * cp, cp=cp)
    drafts = drafts_named(pages) if pages.startswith("mtp") else None
    options = replace(OPTIONS, pages="model" if drafts else pages, drafts=drafts)
    found = ranks.run("tests.harness.generation:allocated", world, run, options)
    serving = serving_of(run, world, pages, limits, drafts)
    for number, (weights, in_pages, kept) in enumerate(found):
        rank = serving.ranks[serving.plan.grid.coords(number).pp]
        assert weights == rank.weights
        assert in_pages == rank.pages([limits.most_pages(group.window) for group in rank.groups])
        assert kept == row_bytes(LIMITS, rank.vocabulary, rank.drafts)


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "mistral"])
def test_as_many_sequences_fit_as_run_in_the_room(model):
    """An engine in the room that the forecast leaves on a device has pages for all sequences that it names, and with
    one sequence more it would not."""
    serving = serving_of(run_of(model), 1)
    (rank,) = serving.ranks
    memory = OVERHEAD + rank.weights + 60 * sequence_bytes(rank.groups, LIMITS) + 40_000
    count = serving.fit(memory)
    assert 3 < count < 60
    for sequences in (count, count + 1):
        limits = serving.with_sequences(sequences)
        room = room_on(rank, memory, limits)
        engine = Engine(
            random_model(0, 1, run_of(model)), replace(OPTIONS, sequences=sequences, memory_gib=room / 2**30)
        )
        wanted = [limits.most_pages(group.window) for group in engine.groups]
        assert ([group.num_pages for group in engine.groups] == wanted) == (sequences == count)


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "mistral"])
def test_a_length_that_does_not_fit_names_the_longest_that_does(model):
    serving = serving_of(run_of(model), 1, limits=replace(LIMITS, length=4000, most_tokens=16))
    (rank,) = serving.ranks
    small = MemoryLimits(1, 16, 1000, 4)
    needs = sum(small.most_pages(group.window) * group.page_bytes for group in rank.groups)
    room = needs + row_bytes(small, rank.vocabulary)
    where = OVERHEAD + rank.weights + (room + 2) / 0.9, "X1", "--tokens"
    if model == "mistral":  # a window alone holds any length
        check_fits(serving, *where)
        return
    with pytest.raises(ConfigError) as caught:
        check_fits(serving, *where)
    (problem,) = caught.value.problems
    assert (problem.field, problem.value, problem.valid) == ("--tokens", 4000, (1000,))
    assert "MiB" in str(problem) and "X1" in str(problem)
    check_fits(replace(serving, limits=replace(serving.limits, length=1000)), *where)


def test_an_engine_refuses_a_length_that_its_memory_does_not_hold():
    model = random_model(0, 1, run_of("llama"))
    page = 4 * 2 * 2 * 6 * 8 * 4  # tokens, keys and values, heads, features, bytes, layers
    options = replace(OPTIONS, memory_gib=page * 3.5 / 2**30)
    with pytest.raises(ConfigError, match=r"^config error: length=14: needs .* Valid near it: 8\."):
        Engine(model, options)
    assert Engine(model, replace(options, length=8)).positions == 8
    assert Engine(model, replace(options, length=None)).positions == 8  # as many as there is room for
    with pytest.raises(ConfigError, match="room"):
        Engine(model, replace(options, length=None, memory_gib=page / 2**30))
    run = model.plan.run

    def held(**changes) -> None:
        """As phalanx serve asks, before there is a rank."""
        asked = replace(options, **changes)
        check_held(serving_of(run, 1, limits=limits_of(run, asked)), asked)

    with pytest.raises(ConfigError, match=r"--length=14: needs .*, because --memory-gib=.* Valid near it: 8\."):
        held()
    held(length=8)
    held(length=None)
    held(memory_gib=None)
    with pytest.raises(ConfigError, match="--length=131072: needs 96.0 MiB"):
        held(length=None, memory_gib=page / 2**30)


def test_what_is_free_on_a_gpu_is_compared_before_ranks_start():
    """Where --memory-gib does not say how much is to be used."""
    run, asked = run_of("llama"), replace(OPTIONS, memory_gib=None, length=14)
    serving = serving_of(run, 1, limits=limits_of(run, asked))
    (rank,) = serving.ranks
    one = serving.with_sequences(1)
    rest = OVERHEAD + rank.weights + row_bytes(one, rank.vocabulary) / 0.9
    enough = int(rest + sum(one.pages_for(g.kept) * g.page_bytes for g in rank.groups) / 0.9) + 2
    page = sum(g.page_bytes for g in rank.groups)
    check_held(serving, asked, enough)
    with pytest.raises(ConfigError, match=r"--length=14: needs .* a GPU here, of which .* are free.* near it: 12\."):
        check_held(serving, asked, int(enough - page / 0.9))
    check_held(serving, asked, None)
    check_held(serving, replace(asked, length=None), int(enough - page / 0.9))  # as many as there is room for
    with pytest.raises(ConfigError, match="--length=14: needs"):
        check_held(serving, replace(asked, length=None), int(rest))


@pytest.mark.parametrize("model, layout", [("gpt_oss", {"pp": 2}), ("nemotron_h", {}), ("t5", {"tp": 2})], ids=str)
def test_what_is_refused_before_ranks_start_is_what_their_engine_refuses(ranks, model, layout):
    """Windows, states and sources, at memories of which some hold no sequence; --length 14 or as it comes."""
    run, world = run_of(model, **layout), max(layout.values(), default=1)
    tried = [replace(OPTIONS, length=n, memory_gib=kib / 2**20) for n in (None, 14) for kib in (1, 4, 9, 30, 200)]
    found = ranks.run("tests.harness.generation:refusals", world, run, tried)[0]
    for options, theirs in zip(tried, found, strict=True):
        try:
            check_held(serving_of(run, world, limits=limits_of(run, options)), options)
            ours = None
        except ConfigError as error:
            ours = [(p.field.removeprefix("--"), p.value, p.rule, p.valid) for p in error.problems]
        assert ours == theirs, options
    assert len({found is None for found in found}) == 2


def test_the_rate_is_that_of_the_bytes_that_a_step_reads(ranks):
    """One stage: weights but for the embedding once, and each sequence whole, by what an engine has allocated."""
    run = run_of("llama")
    serving = serving_of(run, 1)
    ((weights, _, _),) = ranks.run("tests.harness.generation:allocated", 1, run, OPTIONS)
    model = random_model(0, 1, run)
    embedding = model.blocks[0]
    unread = sum(p.numel() for p in embedding.parameters()) * 8
    padding = weights - sum(p.numel() for block in model.blocks for p in block.parameters()) * 8
    whole = weights - padding - unread + 3 * 14 * model.plan.run.model.num_hidden_layers * 2 * 2 * 6 * 8
    assert serving.tokens_per_s(3, 1e9) == pytest.approx(3 * 1e9 / whole, rel=1e-12)


def test_each_stage_computes_another_group():
    """With two stages of equal bytes five sequences need two steps of three at most; one sequence leaves one stage
    without work."""
    serving = serving_of(run_of("llama", pp=2), 2)
    slowest = max(serving.ranks, key=lambda rank: rank.dense)
    for count, group in ((1, 1), (2, 1), (5, 3), (6, 3)):
        whole = 2 * (slowest.dense + group * slowest.read(LIMITS))
        assert serving.tokens_per_s(count, 1e9) == pytest.approx(count * 1e9 / whole, rel=1e-12)


def test_experts_are_read_as_tokens_choose_them():
    """Of E experts with K chosen, one token reads K / E; many read all."""
    serving = serving_of(run_of("mixtral"), 1)
    (rank,) = serving.ranks
    assert serving.step_bytes(rank, 1) == pytest.approx(rank.dense + rank.experts / 4 + rank.read(LIMITS))
    assert serving.step_bytes(rank, 200) == pytest.approx(rank.dense + rank.experts + 200 * rank.read(LIMITS))
    blocks = make_plan(without_training(run_of("mixtral"), 1), 1).blocks_of(Coords())
    numel = sum(p.numel() for segment in blocks.values() for block in segment for p in block.parameters())
    assert rank.dense + rank.experts < 8 * numel


def test_drafts_read_their_modules_and_the_head_once_a_round():
    """Two drafts of two depths: both depths, then the second for the first draft, each time with the head."""
    run = run_of("deepseek_v3-mtp")
    (plain,), (drafting,) = serving_of(run, 1).ranks, serving_of(run, 1, drafts=MtpSpec(2)).ranks
    blocks = make_plan(without_training(run, 1), 1).blocks_of(Coords())
    (mtp,) = (b for segment in blocks.values() for b in segment if isinstance(b, MultiTokenPrediction))

    def nbytes(module: Module) -> int:
        return 8 * sum(p.numel() for p in module.parameters())

    first, second = mtp.depths
    more = drafting.dense + drafting.experts - plain.dense - plain.experts
    assert more == nbytes(first) + 2 * nbytes(second) + 2 * nbytes(mtp.head)
    assert drafting.weights == plain.weights and drafting.token_bytes[0] == 2 * plain.token_bytes[0]


def test_what_the_command_says():
    text = plan_serving("recipes/llama3_8b.py", ("layout.tp=2",), None, find_device("H100"), AskedServing(8192))
    assert "8,192 tokens: 512.0 MiB of keys and values" in text and "H100" in text and "at 3.35 TB/s" in text
    eight = plan_serving("recipes/llama3_8b.py", ("layout.tp=2",), None, find_device("H100"), AskedServing(8192, "fp8"))
    assert "8,192 tokens: 264.0 MiB of keys and values" in eight and "in float8_e4m3fn" in eight  # scales too
    everywhere = plan_serving("recipes/llama3_8b.py", (), None, None, AskedServing(8192))
    assert all(name in everywhere for name in ("L4", "H200", "B200"))
    with pytest.raises(ConfigError, match=r"--tokens=200000: .*131072"):
        plan_serving("recipes/llama3_8b.py", (), None, None, AskedServing(200_000))
    with pytest.raises(ConfigError, match=r"train.steps.*does nothing"):
        plan_serving("recipes/llama3_8b.py", ("train.steps=5",), None, None, AskedServing())
    with pytest.raises(
        ConfigError, match="--speculate='ngram:4': must not be made for a model whose layers keep a state"
    ):
        plan_serving("recipes/mamba2_2_7b.yaml", (), None, None, AskedServing(speculate="ngram:4"))
    halved = plan_serving(
        "recipes/llama3_8b.py", ("layout.cp=2", "layout.tp=2"), None, find_device("H100"), AskedServing(8192)
    )
    assert "8,192 tokens: 256.0 MiB of keys and values" in halved
