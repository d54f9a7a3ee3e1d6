"""The engine against the same model computed whole: every token and every log-probability, whatever the layout, the
order of arrival and the room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.base.free_memory import host_memory
from phalanx.config.run import Run
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions, StepMessage
from phalanx.inference.memory import room_for_pages
from phalanx.inference.request import Request, RequestError, SamplingOptions
from phalanx.nn.adapter import AdapterConfig, completed_lora
from phalanx.ops.attention import prompts as prompts_attention
from phalanx.ops.attention.segments import SEGMENTS, MaskedSegments
from phalanx.ops.op import ALL_KERNELS, Implementation
from tests.harness.generation import (
    Answer,
    answers,
    answers_by_graphs,
    answers_of,
    cached_logits,
    random_model,
    run_of,
    sequences_of,
    whole_logits,
)

FAMILIES = (
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "mistral",
    "olmo2",
    "gemma2",
    "olmo3",
    "gemma3_text",
    "gemma4_text-shared",
    "gemma4_text-experts",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "smollm3",
    "gpt_neox",
    "llama4_text",
    "minimax_m2",
    "glm4_moe",
    "glm4_moe-mtp",
    "kimi_k25",
    "mamba2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "kimi_linear",
    "olmo_hybrid",
    "nemotron_h-latent",
    "falcon_h1",
)
LAYOUTS = (
    pytest.param("llama", {"tp": 2}, marks=pytest.mark.soak),
    pytest.param("llama", {"pp": 2}, marks=pytest.mark.soak),
    ("llama", {"tp": 2, "pp": 2}),
    pytest.param("llama", {"tp": 4}, marks=pytest.mark.soak),
    ("olmo2", {"tp": 2}),
    ("gemma3_text", {"cp": 2}),
    ("gemma4_text-shared", {"tp": 2, "cp": 2}),
    pytest.param("gemma4_text-shared", {"pp": 2}, marks=pytest.mark.soak),
    ("gemma4_text-experts", {"tp": 2, "ep": 2}),
    ("gpt_oss", {"tp": 2, "pp": 2}),
    pytest.param("deepseek_v3", {"tp": 2}, marks=pytest.mark.soak),
    ("deepseek_v3-mtp", {"pp": 2}),
    pytest.param("mixtral", {"ep": 2}, marks=pytest.mark.soak),
    ("mixtral", {"tp": 2, "etp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    pytest.param("gpt2", {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
    pytest.param("llama", {"cp": 2}, marks=pytest.mark.soak),
    pytest.param("gpt_oss", {"cp": 2}, marks=pytest.mark.soak),
    ("deepseek_v3", {"cp": 2, "tp": 2}),
    ("gpt2", {"cp": 2, "pp": 2}),
    ("qwen3_moe", {"cp": 2, "ep": 2}),
    pytest.param("smollm3", {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
    ("llama4_text", {"cp": 2, "ep": 2}),
    pytest.param("gpt_neox", {"tp": 2, "cp": 2}, marks=pytest.mark.soak),
    ("glm4_moe-mtp", {"tp": 2}),
    ("mamba2", {"tp": 2, "cp": 2}),
    pytest.param("mamba2", {"pp": 2}, marks=pytest.mark.soak),
    ("nemotron_h", {"tp": 2, "cp": 2}),
    ("qwen3_next", {"tp": 2, "cp": 2}),
    ("kimi_linear", {"tp": 2, "cp": 2}),
    pytest.param("kimi_linear", {"pp": 2}, marks=pytest.mark.soak),
    ("nemotron_h-moe", {"tp": 2, "ep": 2}),
    pytest.param("falcon_h1", {"tp": 2, "cp": 2}, marks=pytest.mark.soak),
    ("falcon_h1-norm", {"pp": 2}),
)
FOUR = (
    *((model, {"cp": 4}) for model in ("llama", "gpt_oss", "deepseek_v3", "mixtral")),
    *(("llama", {"cp": 2, axis: 2}) for axis in ("tp", "pp")),
    ("gpt_oss", {"cp": 2, "pp": 2}),
    ("deepseek_v3", {"cp": 2, "pp": 2}),
    ("mixtral", {"cp": 4, "ep": 4}),
    ("qwen3_moe", {"cp": 2, "tp": 2, "ep": 4}),
    ("llama", {"pp": 4}),
    ("gpt_oss", {"pp": 4}),
    ("llama", {"pp": 2}),
    ("mixtral", {"pp": 2, "ep": 2}),
    ("gemma4_text-shared", {"cp": 2, "pp": 2}),
    ("gemma4_text-experts", {"pp": 4}),
)
LENGTHS = (5, 9, 3, 11, 2, 7)
SMALL = EngineOptions(sequences=4, tokens=8, page_size=4, memory_gib=0.001)
GREEDY = SamplingOptions(tokens=5, temperature=0, logprobs=3, prompt_logprobs=1)


def world_of(layout: dict[str, int]) -> int:
    return max(layout.get("ep", 1), layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1))


def check_against_whole(model: str | Run, prompts: list[list[int]], found: list[Answer]) -> None:
    """Greedy tokens are the likeliest, and log-probabilities those of the model computed whole, 1e-10."""
    whole = random_model(0, 1, run_of(model) if isinstance(model, str) else model)
    for prompt, (tokens, scores, of_prompt, reason) in zip(prompts, found, strict=True):
        logprobs = torch.log_softmax(whole_logits(whole, prompt + tokens), -1)
        places = logprobs[len(prompt) - 1 : -1]
        assert tokens == places.argmax(-1).tolist() and len(tokens) == 5 and reason == "length"
        for place, token, score in zip(places, tokens, scores, strict=True):
            best = place.topk(3)
            assert score is not None and [t for t, _ in score.likeliest] == best.indices.tolist()
            got = [score.logprob, *(p for _, p in score.likeliest)]
            np.testing.assert_allclose(got, [float(place[token]), *best.values.tolist()], rtol=0, atol=1e-10)
        assert of_prompt[0] is None and [s.token for s in of_prompt[1:] if s] == prompt[1:]
        wanted = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
        np.testing.assert_allclose([s.logprob for s in of_prompt[1:] if s], wanted, rtol=0, atol=1e-10)


class FromBatch(MaskedSegments):
    """Stands for the fused kernels of GPUs. lengths: of the prompts' tokens that it was given."""

    lengths: list[int] = []

    def forward(self, q, k, v, how):
        self.lengths.append(q.shape[2])
        return super().forward(q, k, v, how)


@pytest.mark.parametrize("model", ("llama", "gpt2"))
def test_prompts_may_be_read_from_the_batch(model, monkeypatch):
    """As fused kernels do it, where sequences begin; beside sequences that go on, and in pieces."""
    fused = Implementation("from the batch", f"{__name__}:FromBatch", modes=ALL_KERNELS)
    monkeypatch.setattr(prompts_attention, "SEGMENTS", replace(SEGMENTS, implementations=(fused,)))
    FromBatch.lengths.clear()
    prompts = sequences_of(LENGTHS, 131)
    found = answers(0, 1, run_of(model), [(p, GREEDY) for p in prompts], replace(SMALL, tokens=16), arrive=2)
    check_against_whole(model, prompts, found)
    assert max(FromBatch.lengths) > 2


@pytest.mark.parametrize("model, cp", [("llama", 1), ("gpt_oss", 1), ("deepseek_v3", 1), ("gpt_oss", 2)])
def test_steps_come_from_the_numbers_that_graphs_are_replayed_from(ranks, model, cp):
    """With padding behind sequences, tokens and prompts' pieces, more than one group of layers, lost pages."""
    prompts = sequences_of(LENGTHS, 131)
    options = replace(GREEDY, prompt_logprobs=None)
    tight = replace(SMALL, sequences=3, tokens=13, page_size=4 // cp, memory_gib=0.0002 / cp)
    asked, target = [(p, options) for p in prompts], "tests.harness.generation:answers_by_graphs"
    (found, sizes), *_ = ranks.run(target, cp, run_of(model, cp=cp), asked, tight, 2)
    plain = answers(0, 1, run_of(model), [(p, replace(options, prompt_logprobs=0)) for p in prompts], SMALL, arrive=2)
    for (tokens, scores, _, _), (same, theirs, _, _) in zip(found, plain, strict=True):
        assert tokens == same
        np.testing.assert_allclose([s.logprob for s in scores], [s.logprob for s in theirs], rtol=0, atol=1e-10)
    assert sizes >= {(32, 13 + cp - 1, True), (2, 2, False)}


def test_drafts_come_from_the_numbers_that_graphs_are_replayed_from():
    """Some sequences of a step have drafts, some have none, some are prompts."""
    asked = [(p, replace(GREEDY, prompt_logprobs=None, tokens=9)) for p in ([1, 2, 1, 2], [7] * 6, [3], [5, 4, 3])]
    drafting = replace(SMALL, tokens=32, drafts=NgramSpec(3, 2, 1))
    found, sizes = answers_by_graphs(0, 1, run_of("llama"), asked, drafting, 2)
    plain = answers(0, 1, run_of("llama"), [(p, replace(o, prompt_logprobs=0)) for p, o in asked], SMALL, arrive=2)
    for (tokens, scores, _, _), (same, theirs, _, _) in zip(found, plain, strict=True):
        assert tokens == same
        np.testing.assert_allclose([s.logprob for s in scores], [s.logprob for s in theirs], rtol=0, atol=1e-10)
    assert {pieces for _, _, pieces in sizes} == {True, False}


@pytest.mark.parametrize("model", FAMILIES)
def test_each_family_goes_on_as_it_is_computed_whole(model):
    """More sequences than rows, prompts longer than a step and than windows, in pieces."""
    prompts = sequences_of(LENGTHS, 131)
    found = answers(0, 1, run_of(model), [(p, GREEDY) for p in prompts], SMALL, arrive=2)
    check_against_whole(model, prompts, found)


def test_fused_matrices_and_heads_rotated_in_part():
    """Without the scaling by which phi3 rotates long sequences otherwise: the whole ones here are of many lengths."""
    run = run_of("phi3")
    run = replace(run, model=replace(run.model, rope_scaling=None))
    prompts = sequences_of(LENGTHS, 131)
    check_against_whole(run, prompts, answers(0, 1, run, [(p, GREEDY) for p in prompts], SMALL, arrive=2))


@pytest.mark.parametrize("model, layout", LAYOUTS, ids=lambda value: str(value))
def test_a_layout_changes_nothing(ranks, model, layout):
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, GREEDY) for p in prompts]
    found = ranks.run("tests.harness.generation:answers", world_of(layout), run_of(model, **layout), asked, SMALL, 2)
    check_against_whole(model, prompts, found[0])


@pytest.mark.soak
@pytest.mark.parametrize("model, layout", FOUR, ids=lambda value: str(value))
def test_four_ranks(ranks, model, layout):
    """Of context parallelism, of pipelines, and with other axes; also as replicas, which may share experts."""
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, GREEDY) for p in prompts]
    found = ranks.run("tests.harness.generation:answers", 4, run_of(model, **layout), asked, SMALL, 2)
    check_against_whole(model, prompts, found[0])


@pytest.mark.parametrize("model", ["deepseek_v3", "llama"])
def test_adapters_go_on_too(ranks, model):
    """On matrices that latents are multiplied with as well: then each head's keys and values are remembered."""
    lora = completed_lora(AdapterConfig(targets=["*.kv_b_proj.*", "*.o_proj.*", "*.v_proj.*"]))
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, GREEDY) for p in prompts]
    split = replace(run_of(model, tp=2), lora=lora)
    found = ranks.run("tests.harness.generation:answers", 2, split, asked, SMALL, 2)
    check_against_whole(replace(run_of(model), lora=lora), prompts, found[0])


def test_scores_are_for_those_who_asked():
    """As many as each asked for, whatever others of the batch did; a prompt of one token has none, and says so."""
    engine = Engine(random_model(0, 1, run_of("llama")), SMALL)
    quiet = SamplingOptions(tokens=2, temperature=0)
    asked = [([5], replace(quiet, logprobs=1, prompt_logprobs=1)), ([7, 8], quiet), ([9], replace(quiet, logprobs=4))]
    (_, one, prompt, _), (_, none, nothing, _), (_, four, _, _) = answers_of(engine, asked)
    assert [len(s.likeliest) for s in one] == [1, 1] and [len(s.likeliest) for s in four] == [4, 4]
    assert none == [None, None] and prompt == (None,) and nothing == ()


@pytest.mark.parametrize("late", [0, 1])
def test_sequences_that_lose_their_pages_come_back(late):
    """Room for two and a half sequences: some are preempted, and computed anew."""
    prompts = sequences_of(LENGTHS, 131)
    model = random_model(0, 1, run_of("llama"))
    page = 4 * 2 * 2 * 6 * 8 * 4  # tokens, keys and values, heads, features, bytes, layers
    engine = Engine(model, replace(SMALL, memory_gib=(page * 9 + 1) / 2**30, late=late))
    assert engine.groups[0].num_pages == 9
    preempted = []
    schedule = engine.scheduler.schedule

    def watched(now, drafts=None):
        step = schedule(now, drafts)
        preempted.extend(step.preempted)
        return step

    engine.scheduler.schedule = watched
    found = answers_of(engine, [(p, replace(GREEDY, prompt_logprobs=1)) for p in prompts])
    assert preempted
    check_against_whole("llama", prompts, found)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=str)
def test_scores_of_what_follows_a_context(ranks, layout):
    """Continuations of shared contexts: their log-probabilities alone, and 1e-10 those of the model computed whole. A
    prompt that is only scored may have one token more than there are positions."""
    run, most = run_of("llama", **layout), 16
    contexts = sequences_of((11, 11, 5, most - 1), 131)
    contexts[1] = list(contexts[0])
    pairs = [(context, tail) for context in contexts for tail in ([7], [9, 8])]
    asked = [
        (context + tail, SamplingOptions(tokens=0, prompt_logprobs=1, scored_from=len(context)))
        for context, tail in pairs
    ]
    found = ranks.run("tests.harness.generation:answers", world_of(layout), run, asked, replace(SMALL, length=most), 2)[
        0
    ]
    whole = random_model(0, 1, run_of("llama"))
    for (context, tail), (tokens, _, scores, reason) in zip(pairs, found, strict=True):
        logprobs = torch.log_softmax(whole_logits(whole, (context + tail)[:-1]), -1)[len(context) - 1 :]
        assert not tokens and reason == "length" and scores[: len(context)] == (None,) * len(context)
        wanted = [float(place[token]) for place, token in zip(logprobs, tail, strict=True)]
        np.testing.assert_allclose([s.logprob for s in scores[len(context) :] if s], wanted, rtol=0, atol=1e-10)
        best = [score.likeliest[0][0] for score in scores[len(context) :] if score]
        assert best == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize("pages", ["model", "fp8"])
def test_ranks_of_context_parallelism_share_every_page(ranks, pages):
    """Pages of 4 tokens, 2 on each of two ranks, in half of the memory: the same decisions as on one rank, preemptions
    and known prefixes among them, and the same answers."""
    shared = sequences_of([8], 131)[0]
    asked = [(shared + p, GREEDY) for p in sequences_of(LENGTHS, 131)]
    token = 2 * 2 * 6 * 8 * 4 if pages == "model" else 2 * 2 * (6 + 4) * 4  # keys and values, heads, features, layers
    (size, wanted, steps, preempted), *halves = (
        each
        for cp in (1, 2)
        for each in ranks.run(
            "tests.harness.generation:little_room",
            cp,
            run_of("llama", cp=cp),
            asked,
            replace(SMALL, pages=pages, page_size=4 // cp, memory_gib=(4 * token * 11 + 1) / cp / 2**30),
        )
    )
    assert size == 4 * token * 11 and [half[0] for half in halves] == [size // 2] * 2
    _, found, *same = halves[0]
    assert same == [steps, preempted] and preempted and steps[1] < steps[0]
    for a, b in zip(found, wanted, strict=True):
        for (tokens, scores, _, _), (wanted_tokens, wanted_scores, _, _) in zip(a, b, strict=True):
            assert tokens == wanted_tokens
            got, right = ([s.logprob for s in each] for each in (scores, wanted_scores))
            np.testing.assert_allclose(got, right, rtol=0, atol=1e-10)
    if pages == "model":
        check_against_whole("llama", [p for p, _ in asked], found[0])


def test_prefixes_that_are_there_are_not_computed_again():
    model = random_model(0, 1, run_of("llama"))
    engine = Engine(model, SMALL)
    shared = sequences_of([12], 131)[0]
    prompts = [shared + [7], shared + [8, 9], shared]
    plain = replace(GREEDY, prompt_logprobs=None)
    found = answers_of(engine, [(p, plain) for p in prompts], arrive=1)
    again = answers_of(engine, [(p, plain) for p in prompts], arrive=1)
    assert [a[0] for a in found] == [a[0] for a in again]
    alone = [answers_of(Engine(model, SMALL), [(p, plain)])[0][0] for p in prompts]
    assert [a[0] for a in again] == alone


def idle_slots(stages: list[list[tuple[str, int]]]) -> list[int]:
    """Of each stage, if each step takes each of them a slot: slots between its first step and its last in which it
    computes none. A step waits for the stage before, and a stage where it waits for tokens, for the last one."""
    done: dict[tuple[int, int], int] = {}  # after so many slots, of a step and a stage
    last, ready, at, idle = ([0] * len(stages) for _ in range(4))
    while any(at[s] < len(events) for s, events in enumerate(stages)):
        moved = False
        for s, events in enumerate(stages):
            while at[s] < len(events):
                what, number = events[at[s]]
                before = (number, s - 1) if what == "compute" else (number, len(stages) - 1)
                if before[1] >= 0 and before not in done:
                    break
                ready[s] = max(ready[s], last[s], done.get(before, 0))
                if what == "compute":
                    idle[s] += ready[s] - last[s] if number else 0
                    last[s] = done[number, s] = ready[s] + 1
                at[s], moved = at[s] + 1, True
        assert moved, "stages wait for each other"
    return idle


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_stages_of_a_pipeline_are_not_idle(ranks, pp):
    """Sequences in groups, of which each stage computes another: but for the first step, with all prompts, no stage
    waits."""
    asked = [(p, SamplingOptions(tokens=12, temperature=0)) for p in sequences_of((5,) * 2 * pp, 131)]
    options = replace(SMALL, sequences=2 * pp, tokens=10 * pp)
    stages = ranks.run("tests.harness.generation:stage_events", pp, run_of("llama", pp=pp), asked, options)
    computed = [[number for what, number in events if what == "compute"] for events in stages]
    assert computed == [list(range(len(computed[0])))] * pp and len(computed[0]) > 11 * pp
    assert idle_slots(stages) == [pp - 1] * pp


SAMPLED = SamplingOptions(tokens=6, temperature=1.0, top_p=0.95, seed=3)


SEEDED = [
    ("llama", {"tp": 2, "pp": 2}),
    ("llama", {"cp": 2}),
    ("mixtral", {"ep": 2}),
    *(pytest.param("llama", {axis: 2}, marks=pytest.mark.soak) for axis in ("tp", "pp")),
]


@pytest.mark.parametrize("model, layout", SEEDED, ids=str)
def test_a_seed_gives_one_text_in_every_layout(ranks, model, layout):
    """With penalties for some, and rows that others had before."""
    prompts = sequences_of(LENGTHS, 131)
    asked = [
        (p, replace(SAMPLED, sample=i, repetition_penalty=1 + i % 2, presence_penalty=i % 2))
        for i, p in enumerate(prompts)
    ]
    alone = answers(0, 1, run_of(model), asked, SMALL)
    found = ranks.run("tests.harness.generation:answers", world_of(layout), run_of(model, **layout), asked, SMALL, 2)
    assert [a[0] for a in found[0]] == [a[0] for a in alone]


def test_a_seed_gives_one_text_in_every_company():
    """Alone, beside others, in another order, in other rows, with penalties next to it."""
    model = random_model(0, 1, run_of("llama"))
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, replace(SAMPLED, sample=i)) for i, p in enumerate(prompts)]
    alone = [answers_of(Engine(model, SMALL), [each])[0][0] for each in asked]
    together = answers_of(Engine(model, SMALL), asked)
    assert [a[0] for a in together] == alone
    others = [(p, replace(SAMPLED, repetition_penalty=1.5, seed=9)) for p in prompts[:3]]
    beside = answers_of(Engine(model, SMALL), [*others, *reversed(asked)], arrive=3)
    assert [a[0] for a in beside[3:]] == alone[::-1]
    assert len({tuple(a) for a in alone}) == len(alone)


def test_replicas_share_the_requests(ranks):
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, GREEDY) for p in prompts]
    found = ranks.run("tests.harness.generation:answers", 4, run_of("llama", tp=2), asked, SMALL, 2)
    check_against_whole("llama", prompts, found[0])


def test_what_cannot_be_served_is_refused_with_its_numbers():
    engine = Engine(random_model(0, 1, run_of("llama")), replace(SMALL, length=16))
    for prompt, rule in ([], "empty"), ([5] * 16, "16"), ([131], "vocabulary"), ([-1], "vocabulary"):
        with pytest.raises(RequestError, match=rule):
            engine.submit(prompt, GREEDY)
    with pytest.raises(RequestError, match="16"):
        engine.submit([5] * 4, replace(GREEDY, tokens=13))
    assert engine.idle


def test_ranks_on_one_host_share_its_memory():
    """Nobody asked for memory: together ranks take no more than one alone, and leave most of it."""
    free = host_memory()
    assert free is not None
    alone, one_of_four = (room_for_pages(torch.device("cpu"), ranks) for ranks in (1, 4))
    assert 4 * one_of_four <= 1.1 * alone and alone < free / 3


def test_cancelled_requests_end_and_others_go_on():
    engine = Engine(random_model(0, 1, run_of("llama")), SMALL)
    first, second = (engine.submit(p, replace(GREEDY, prompt_logprobs=None)) for p in sequences_of((5, 6), 131))
    engine.step()
    engine.cancel(first)
    ends = {}
    while not engine.idle:
        ends |= {e.request: e.reason for e in engine.step() if hasattr(e, "reason")}
    assert ends == {first: "cancelled", second: "length"}
    assert engine.scheduler.idle


def test_logits_that_are_not_finite_end_that_request_alone():
    model = random_model(0, 1, run_of("llama"))
    engine = Engine(model, SMALL)
    embedding = next(p for p in model.blocks[0].parameters())
    with torch.no_grad():
        embedding[77] = torch.nan
    bad = engine.submit([77], replace(GREEDY, prompt_logprobs=None))
    good = engine.submit([5, 6], replace(GREEDY, prompt_logprobs=None))
    ends = {}
    while not engine.idle:
        ends |= {e.request: (e.reason, e.error) for e in engine.step() if hasattr(e, "reason")}
    assert ends == {bad: ("error", "the model's logits are not finite"), good: ("length", None)}


def test_messages_come_back_as_they_were():
    options = SamplingOptions(bias=((3, 0.5),), end_tokens=(1, 2), logprobs=2)
    message = StepMessage(1.5, [(1, Request(number=4, prompt=(5, 6), options=options, deadline=3.0))], [7], True)
    assert StepMessage.of(message.text()) == message


def test_pieces_of_any_size_give_the_same_logits():
    """Pieces of 1, of 5, of all at once; pages of what was never written hold NaN."""
    for model in ("gpt_oss", "deepseek_v3"):
        run, lengths = run_of(model), (13, 9, 16)
        whole = random_model(0, 1, run)
        wanted = [whole_logits(whole, row) for row in sequences_of(lengths, run.model.vocab_size)]
        for steps in [(5, 1, 16), (1, 1, 0), (7, 7, 0)], [(13, 9, 16)], [(1, 0, 0), (0, 9, 8), (12, 0, 8)]:
            found = cached_logits(0, 1, run, lengths, steps)
            assert found is not None
            for a, b in zip(found, wanted):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
