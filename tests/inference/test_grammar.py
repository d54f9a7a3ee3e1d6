"""Grammars: every text keeps to its schema, tokens are drawn from the model's distribution under the mask, in every
layout and company."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance", reason="grammars need the extra serve")
pytest.importorskip("jsonschema", reason="requirements-dev.txt has it")

import jsonschema
import tokenizers

from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions, StepMessage
from phalanx.inference.grammar import GrammarCompiler
from phalanx.inference.pages import GroupSpec
from phalanx.inference.request import Finished, Grammar, Request, RequestError, SamplingOptions
from phalanx.inference.sampler import Draws, OptionTable, sample, token_weights
from phalanx.inference.sampler import adjust as adjusted_logits
from phalanx.inference.scheduler import SAMPLED, Scheduler, SchedulerSpec
from phalanx.text.tokenizers import JsonTokenizer, byte_tokenizer, train_bpe
from tests.harness.generation import answers_of, random_model, run_of, sequences_of

END = 256  # of the tokenizer of bytes
VOCAB = 264  # the model's, rounded up
ROOM = EngineOptions(sequences=4, tokens=32, page_size=4, memory_gib=0.002)
PLAIN = SamplingOptions(tokens=120, seed=3, end_tokens=(END,))
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "of": {"enum": ["a", "bc"]}},
    "required": ["ok", "of"],
    "additionalProperties": False,
}


def byte_run(**layout):
    run = run_of("llama", **layout)
    return replace(run, model=replace(run.model, vocab_size=VOCAB, max_position_embeddings=256))


def schema_of(rng: random.Random, depth: int = 2) -> dict:
    """A schema whose texts are short."""
    kinds = ["enum", "boolean", "null", "integer", "string", "pattern"] + ["object", "array"] * (depth > 0)
    kind = rng.choice(kinds) if depth < 2 else "object"
    if kind == "enum":
        return {"enum": rng.sample([1, "two", None, True, [3], "4 {"], rng.randint(1, 4))}
    if kind == "integer":
        low = rng.randint(-9, 9)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 30)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 4)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[ab]{1,3}$", "^x-[0-9]{2}$"])}
    if kind == "array":
        return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": 1, "maxItems": 2}
    if kind == "object":
        names = rng.sample(["a", "b c", "d", "e"], rng.randint(1, 3))
        properties = {name: schema_of(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": kind}


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != END).decode()


def asked_of(count: int) -> list[tuple[list[int], SamplingOptions]]:
    """Of two kinds in turn: with a grammar, and without."""
    grammars = [
        Grammar("json_schema", json.dumps(SMALL_SCHEMA)),
        Grammar("regex", "(ab|cd){2,4}[0-9]"),
        Grammar("lark", 'start: "<" word ">"\nword: /[xyz]{2,5}/'),
    ]
    prompts = sequences_of([3 + i % 5 for i in range(count)], VOCAB)
    options = [replace(PLAIN, sample=i, temperature=[1.0, 0.0, 0.7][i % 3], tokens=40) for i in range(count)]
    return [
        (p, replace(o, grammar=grammars[i % 3]) if i % 2 == 0 else replace(o, tokens=8))
        for i, (p, o) in enumerate(zip(prompts, options))
    ]


@pytest.fixture(scope="module")
def alone():
    """Answers one by one, each known before the next token is made."""
    model = random_model(0, 1, byte_run())
    engine = Engine(model, replace(ROOM, late=0), tokenizer=byte_tokenizer())
    return [answers_of(engine, [each])[0] for each in asked_of(8)]


def test_every_text_keeps_to_its_schema():
    rng = random.Random(11)
    schemas = [schema_of(rng) for _ in range(50)]
    model = random_model(0, 1, byte_run())
    engine = Engine(model, replace(ROOM, sequences=50, tokens=256, memory_gib=0.05), tokenizer=byte_tokenizer())
    asked = [
        ([i], replace(PLAIN, tokens=240, seed=i, grammar=Grammar("json_schema", json.dumps(schema))))
        for i, schema in enumerate(schemas)
    ]
    texts = []
    for (tokens, _, _, reason), schema in zip(answers_of(engine, asked), schemas, strict=True):
        assert reason == "stop" and tokens[-1] == END
        texts.append(text_of(tokens))
        jsonschema.validate(json.loads(texts[-1]), schema)
    assert len(set(texts)) > 40


@pytest.mark.parametrize("options", [{}, {"drafts": NgramSpec(3, 2, 1)}, {"memory_gib": 0.0003}], ids=str)
def test_company_changes_nothing(alone, options):
    """Beside requests that are a step ahead, beside drafts, and with pages lost."""
    engine = Engine(random_model(0, 1, byte_run()), replace(ROOM, **options), tokenizer=byte_tokenizer())
    found = answers_of(engine, asked_of(8), arrive=3)
    assert [(tokens, why) for tokens, _, _, why in found] == [(tokens, why) for tokens, _, _, why in alone]
    texts = [text_of(tokens) for tokens, *_ in found[::2]]
    assert set(json.loads(texts[0])) == {"ok", "of"} and json.loads(texts[3])
    assert re.fullmatch("<[xyz]{2,5}>", texts[1]) and re.fullmatch("(ab|cd){2,4}[0-9]", texts[2])
    assert not engine._constraints


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}], ids=str)
def test_a_layout_changes_nothing(ranks, alone, layout):
    found = ranks.run("tests.harness.generation:constrained_answers", 2, byte_run(**layout), asked_of(8), ROOM, 3)
    assert [(tokens, why) for tokens, _, _, why in found[0]] == [(tokens, why) for tokens, _, _, why in alone]


def test_tokens_are_drawn_from_the_probabilities_of_those_allowed():
    """To the last bit but rounding; rows without a grammar as ever; at temperature 0 the likeliest of those allowed."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 37, dtype=torch.float64, generator=generator) * 2
    allowed = torch.rand(2, 37, generator=generator) < 0.3
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    table = OptionTable(4)
    for row in range(4):
        table.begin(row, SamplingOptions(temperature=0.0 if row == 3 else 0.8), 1)
    made: Draws = replace(table.draws(np.arange(4), np.arange(4)), allowed=(torch.tensor([1, 3]), bits))
    weights = token_weights(adjusted_logits(logits, made), made).double()
    chances = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(chances[0], torch.softmax(logits[0] / 0.8, -1), rtol=0, atol=1e-12)
    kept = torch.where(allowed[0], torch.softmax(logits[1] / 0.8, -1), 0.0)
    torch.testing.assert_close(chances[1], kept / kept.sum(), rtol=0, atol=1e-12)
    tokens = sample(logits, made).tokens
    assert allowed[0, tokens[1]] and int(tokens[3]) == int(torch.where(allowed[1], logits[3], -torch.inf).argmax())


def test_who_has_a_grammar_waits_until_its_last_token_is_known():
    """And nobody else."""
    spec = SchedulerSpec(most_sequences=2, most_tokens=8, longest=32, page_size=4, groups=(GroupSpec(None, 32),))
    scheduler = Scheduler(spec)
    for number, grammar in enumerate((Grammar("json_object"), None)):
        options = SamplingOptions(tokens=6, grammar=grammar)
        scheduler.add(Request(number=number, prompt=(1, 2), options=options))
    behind, late = None, [0, 0]
    while not scheduler.idle:
        step = scheduler.schedule()
        for token, owner in zip(step.tokens.tolist(), np.repeat(step.requests, step.counts).tolist()):
            late[owner] += token == SAMPLED
        if behind is not None:
            scheduler.observe(behind, [5] * len(behind))
        behind = step if len(step) else None
    assert late == [0, 5]


def test_what_is_no_grammar_is_refused():
    engine = Engine(random_model(0, 1, byte_run()), ROOM, tokenizer=byte_tokenizer())
    for grammar, rule in (
        (Grammar("json_schema", '{"type": "nothing"}'), "Invalid type: nothing"),
        (Grammar("json_schema", "{"), "is no json_schema"),
        (Grammar("regex", "a(("), "unclosed group"),
        (Grammar("lark", "start: x"), 'unknown name: "x"'),
        (Grammar("regex", "a" * 70000), "at most 65536"),
    ):
        with pytest.raises(RequestError, match=re.escape(rule)) as caught:
            engine.submit([1], replace(PLAIN, grammar=grammar))
        assert caught.value.field == "grammar"
    any_object = replace(PLAIN, grammar=Grammar("json_object"))
    with pytest.raises(RequestError, match="needs end tokens"):
        engine.submit([1], replace(any_object, end_tokens=()))
    with pytest.raises(RequestError, match="least_tokens"):
        engine.submit([1], replace(any_object, least_tokens=2))
    with pytest.raises(RequestError, match="tokenizer"):
        Engine(random_model(0, 1, byte_run()), ROOM).submit([1], any_object)
    with pytest.raises(RequestError, match="json_schema, json_object, regex, lark"):
        Grammar("xml")  # type: ignore[arg-type]
    assert engine.idle


def test_a_vocabulary_that_cannot_go_on_ends_that_request_alone():
    """Of a model with fewer tokens than its tokenizer: it has no brace."""
    run = byte_run()
    run = replace(run, model=replace(run.model, vocab_size=100))
    engine = Engine(random_model(0, 1, run), ROOM, tokenizer=byte_tokenizer())
    bad = engine.submit([1], SamplingOptions(tokens=4, end_tokens=(2,), grammar=Grammar("json_object")))
    good = engine.submit([1], SamplingOptions(tokens=4, end_tokens=(2,), grammar=Grammar("regex", "[0-9]{9}")))
    ends = {}
    while not engine.idle:
        ends |= {e.request: (e.reason, e.error) for e in engine.step() if isinstance(e, Finished)}
    assert ends == {
        bad: ("error", "the grammar: no token of the vocabulary can come next"),
        good: ("length", None),
    }


def bpe_tokenizer(folder) -> JsonTokenizer:
    texts = ['{"ok": true, "of": "bc"}', '{"ok": false, "of": "a"}', "the ok of true false {} [] : , a bc"] * 20
    return train_bpe(texts, 300, folder)


def metaspace_tokenizer(folder) -> JsonTokenizer:
    """As of Llama 2: a space is part of the token after it, and is added to every text."""
    pieces = ["<unk>", "▁", *'{}":,okftruealsbc', "▁true", "▁false", '▁"bc', '{"', "ok", '":', '▁"', '"}', "of"]
    core = tokenizers.Tokenizer(tokenizers.models.Unigram([(each, -1.0) for each in dict.fromkeys(pieces)], 0, False))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    return JsonTokenizer(core, None)


@pytest.mark.parametrize("make", [bpe_tokenizer, metaspace_tokenizer])
def test_tokens_of_several_characters(make, tmp_path):
    """Any token that is allowed, drawn at random: the text is what the schema says, whichever way the tokenizer cuts
    it."""
    tokenizer = make(tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 1)
    end = tokenizer.vocab_size
    rng, lengths = random.Random(5), set()
    for _ in range(40):
        constraint = compiler.begin(Grammar("json_schema", json.dumps(SMALL_SCHEMA)), (end,))
        tokens: list[int] = []
        while not tokens or tokens[-1] != end:
            mask = np.unpackbits(constraint.mask(), count=end + 1, bitorder="little")
            assert constraint.problem is None
            tokens.append(rng.choice(np.flatnonzero(mask).tolist()))
            constraint.add(tokens[-1])
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), SMALL_SCHEMA)
        lengths.add(len(tokens))
    assert len(lengths) > 2 and min(lengths) < 20


def test_messages_carry_grammars():
    options = SamplingOptions(end_tokens=(1,), grammar=Grammar("regex", "[é]+"))
    message = StepMessage(1.5, [(0, Request(number=4, prompt=(5, 6), options=options))])
    assert StepMessage.of(message.text()) == message
