"""The real engine under random traces: requests, cancellations, deadlines and priorities in any order, in little room.
Every request ends, pages are conserved, and texts are those of the same requests alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from phalanx.inference.drafter import Drafts, NgramSpec
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel
from phalanx.inference.predictor import MtpSpec
from phalanx.inference.request import Finished, NewToken, PromptScored, SamplingOptions
from tests.harness.generation import random_model, run_of

pytestmark = pytest.mark.soak

TRACES, PART = 200, 20
FAMILIES = ("llama", "gpt_oss", "mistral", "deepseek_v3", "gpt2")
DRAFTING = {"llama": NgramSpec(3, 2, 1), "deepseek_v3-mtp": MtpSpec(3)}
LONGEST, PAGE, VOCAB = 16, 4, 131


@dataclass(frozen=True)
class Asked:
    """A request of a trace. at: it comes before this step; gone: it is cancelled before this one."""

    at: int
    prompt: tuple[int, ...]
    options: SamplingOptions
    priority: int
    gone: int | None
    late: bool


def trace(number: int) -> tuple[EngineOptions, list[Asked]]:
    dice = random.Random(number)
    rows = dice.randint(1, 5)
    options = EngineOptions(
        sequences=rows,
        tokens=dice.randint(rows, 24),
        page_size=PAGE,
        memory_gib=dice.choice([7e-5, 1e-4, 1e-3]),
        late=dice.randint(0, 1),
    )
    shared = tuple(dice.randrange(VOCAB) for _ in range(8))  # a prefix that some have
    asked = []
    for _ in range(dice.randint(3, 14)):
        start = shared[: dice.choice([0, 0, 4, 8])]
        prompt = (*start, *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 5))))
        how = SamplingOptions(
            tokens=dice.randint(1, LONGEST - len(prompt)),
            temperature=dice.choice([0.0, 0.7, 1.3]),
            top_k=dice.choice([0, 5]),
            top_p=dice.choice([1.0, 0.8]),
            repetition_penalty=dice.choice([1.0, 1.3]),
            end_tokens=tuple(dice.randrange(VOCAB) for _ in range(dice.choice([0, 3]))),
            seed=dice.randrange(2**40),
            logprobs=dice.choice([None, 1, 3]),
            prompt_logprobs=dice.choice([None, None, 1]),
        )
        gone = dice.choice([None, None, None, dice.randint(0, 30)])
        asked.append(Asked(dice.randint(0, 20), prompt, how, dice.randint(-1, 1), gone, dice.random() < 0.1))
    return options, asked


def fits(engine: Engine, each: Asked) -> bool:
    return len(each.prompt) + (each.options.tokens or 0) <= engine.positions


def run(engine: Engine, asked: list[Asked]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Why each ended, and its tokens; the books are checked on the way."""
    numbers: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    scored: set[int] = set()
    step = 0
    while not engine.idle or step <= 40:
        for place, each in enumerate(asked):
            if each.at == step:
                number = engine.submit(each.prompt, each.options, each.priority, 0.0 if each.late else None)
                numbers[number] = place
                tokens[place] = []
            if each.gone == step and place in numbers.values():
                engine.cancel(next(number for number, at in numbers.items() if at == place))
        for event in engine.step():
            place = numbers[event.request]
            assert place not in ended, "an event after the end"
            if isinstance(event, NewToken):
                tokens[place].append(event.token)
                wanted = asked[place].options.logprobs
                assert (None if event.score is None else len(event.score.likeliest)) == wanted
            elif isinstance(event, PromptScored):
                scored.add(place)
            elif isinstance(event, Finished):
                ended[place] = event.reason
        for pool in engine.scheduler.pages.pools:
            assert 0 <= pool.available <= pool.num_pages - 1
        step += 1
        assert step < 2000, "somebody starves"
    assert ended.keys() == set(range(len(asked)))
    for place, reason in ended.items():
        if reason in ("stop", "length"):
            assert (place in scored) == (asked[place].options.prompt_logprobs is not None)
    load = engine.load()
    assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
    return {place: (reason, tuple(tokens[place])) for place, reason in ended.items()}


def check(model: InferenceModel, number: int, drafts: Drafts | None = None) -> None:
    options, asked = trace(number)
    options = options if drafts is None else replace(options, drafts=drafts, late=None)
    engine = Engine(model, options)
    asked = [each for each in asked if fits(engine, each)]
    found = run(engine, asked)
    roomy = Engine(model, EngineOptions(sequences=1, tokens=64, page_size=PAGE))
    for place, each in enumerate(asked):
        reason, made = found[place]
        (alone,) = run(roomy, [Asked(0, each.prompt, each.options, 0, None, False)]).values()
        if reason == "deadline":
            assert each.late
        assert alone == (reason, made) if reason in ("stop", "length") else made == alone[1][: len(made)]


@pytest.mark.parametrize("part", range(TRACES // PART))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_traces_on_the_real_engine(family, part):
    model = random_model(0, 1, run_of(family))
    for number in range(part * PART, (part + 1) * PART):
        try:
            check(model, number)
        except AssertionError as error:
            raise AssertionError(f"trace {number}: {error}") from error


@pytest.mark.parametrize("part", range(TRACES // PART))
@pytest.mark.parametrize("family", DRAFTING)
def test_random_traces_with_drafts(family, part):
    model = random_model(0, 1, run_of(family))
    for number in range(part * PART, (part + 1) * PART):
        try:
            check(model, number, DRAFTING[family])
        except AssertionError as error:
            raise AssertionError(f"trace {number}: {error}") from error
