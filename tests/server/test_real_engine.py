"""The server on the real engine: a tiny model in float64 with random weights; `phalanx serve` as people start it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import httpx
import numpy as np
import openai
import peft
import pytest
import torch
from pydantic import BaseModel, Field

from phalanx.comm.mesh import Mesh
from phalanx.forecast.decide import make_plan
from phalanx.inference.adapters import with_adapters
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_model, run_of_folder, without_training
from phalanx.inference.memory import remembering
from phalanx.inference.request import SamplingOptions
from phalanx.server.serve_rank import RunEngine, ServeOptions, load_engine
from phalanx.server.served import ServedModel
from phalanx.text.chat_template import load_chat_template
from tests.harness.generation import answers_of, random_model, run_of, sequences_of, whole_logits
from tests.harness.parity import MODELS
from tests.models.test_twenty_steps import random_model as hf_random_model
from tests.server.conftest import serving

ROOT = Path(__file__).parents[2]
VOCAB = 131


@pytest.fixture(scope="module")
def real():
    """A server with few pages: sequences wait, and are preempted."""
    engine = Engine(random_model(0, 1, run_of("llama")), EngineOptions(sequences=4, tokens=16, page_size=4, length=24))
    with serving(RunEngine(engine, "tiny"), ServedModel("tiny", engine.positions, vocab_size=VOCAB)) as server:
        yield server


def pages_in_use(engine: RunEngine) -> int:
    return engine.load().pages_used


def test_tokens_and_scores_are_those_of_the_model(real):
    """Greedy tokens and every log-probability, the prompt's too, against the model computed whole."""
    prompts = sequences_of((3, 9, 14, 5), VOCAB)
    done = real.client().completions.create(
        model="tiny", prompt=prompts, max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    whole = random_model(0, 1, run_of("llama"))
    for prompt, choice in zip(prompts, done.choices, strict=True):
        logprobs = torch.log_softmax(whole_logits(whole, prompt + choice.token_ids), -1)
        assert choice.token_ids == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
        ids = prompt + choice.token_ids
        wanted = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], wanted, rtol=0, atol=1e-9)
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert done.usage.prompt_tokens == sum(map(len, prompts)) and done.usage.completion_tokens == 20


def test_a_seed_gives_the_same_tokens_alone_and_among_others(real):
    prompts = sequences_of(range(2, 18), VOCAB)

    async def everybody():
        async with real.async_client() as client:
            asked = [
                client.completions.create(model="tiny", prompt=prompt, max_tokens=6, seed=n)
                for n, prompt in enumerate(prompts)
            ]
            return [done.choices[0].token_ids for done in await asyncio.gather(*asked)]

    together = asyncio.run(everybody())
    for n in (0, 7, 15):
        alone = real.client().completions.create(model="tiny", prompt=prompts[n], max_tokens=6, seed=n)
        assert alone.choices[0].token_ids == together[n]


def test_no_page_stays_with_clients_that_go(real):
    client = real.client()
    for n in range(12):
        with client.completions.create(model="tiny", prompt=[n, 1], max_tokens=20, n=3, stream=True) as stream:
            next(iter(stream))
    assert client.completions.create(model="tiny", prompt=[3], max_tokens=20).usage.completion_tokens == 20
    asyncio.run_coroutine_threadsafe(real.server.service.engine.quiet(), real.server._loop).result(30)
    assert client.completions.create(model="tiny", prompt=[4], max_tokens=1)
    assert pages_in_use(real.engine) == 0 and real.engine.idle


def test_drafts_change_no_answer_and_are_counted():
    """Tokens, usage and the end at a stop token; /metrics says how many drafts there were."""
    prompts = [[1, 2, 1, 2, 1], [7] * 5]

    def asked(**options):
        room = EngineOptions(sequences=4, tokens=16, page_size=4, length=24, **options)
        engine = Engine(random_model(0, 1, run_of("llama")), room)
        with serving(RunEngine(engine, "tiny"), ServedModel("tiny", engine.positions, vocab_size=VOCAB)) as server:
            done = server.client().completions.create(
                model="tiny", prompt=prompts, max_tokens=12, temperature=0, logit_bias={"7": 9, "1": 8, "2": 8}
            )
            text = httpx.get(f"{server.url}/metrics").text
        figures = re.findall(r"^phalanx_(?:drafted|accepted_draft)_tokens_total (\S+)", text, re.M)
        return [choice.token_ids for choice in done.choices], done.usage, [float(f) for f in figures]

    tokens, usage, figures = asked()
    found, theirs, [drafted, accepted] = asked(drafts=NgramSpec(3, 2, 1))
    assert found == tokens and theirs == usage and figures == [0, 0] and 0 < accepted <= drafted


def test_a_request_whose_time_is_up_gets_504(real):
    """And its pages are free."""
    client = real.client()
    with pytest.raises(openai.APIStatusError, match="time was up") as late:
        client.completions.create(model="tiny", prompt=[1, 2], max_tokens=9, extra_body={"timeout": 1e-6})
    assert late.value.status_code == 504 and late.value.code == "deadline_exceeded"
    assert client.completions.create(model="tiny", prompt=[4], max_tokens=1)
    assert pages_in_use(real.engine) == 0


def test_the_load_is_that_of_all_replicas(ranks):
    """Two replicas of two sequences each, seven requests: four run, three wait, and in the end nobody holds a page."""
    run = "tests.harness.generation:loads"
    (amid, after), _ = ranks.run(run, 2, run_of("llama"), sequences_of((5, 6, 3, 4, 5, 2, 7), VOCAB))
    assert (amid.running, amid.waiting) == (4, 3) and amid.pages_used >= 4
    assert (after.running, after.waiting, after.pages_used) == (0, 0, 0)
    assert amid.pages == after.pages == 2 * (1 + 2 * 24 // 4)


def test_what_the_engine_refuses_is_said(real):
    for prompt, tokens, rule in (([1] * 24, 1, "24 positions"), ([1] * 20, 9, "24 positions"), ([500], 1, "0 to 130")):
        with pytest.raises(openai.BadRequestError, match=rule):
            real.client().completions.create(model="tiny", prompt=prompt, max_tokens=tokens)


class Weather(BaseModel):
    """What an answer is to be."""

    place: Literal["Paris", "Rome"]
    sunny: bool
    degrees: Annotated[int, Field(ge=-20, le=40)]


@pytest.fixture(scope="module")
def talking(model_folder, tokenizer):
    """A server of a random model that chats, whose answers mean nothing without a grammar."""
    run = run_of("llama")
    run = replace(run, model=replace(run.model, vocab_size=320, max_position_embeddings=640))
    room = EngineOptions(sequences=4, tokens=64, page_size=8, memory_gib=0.01)
    engine = Engine(random_model(0, 1, run), room, tokenizer=tokenizer)
    template = load_chat_template(model_folder)
    ends = end_tokens(model_folder, tokenizer, template)
    model = ServedModel("tiny", engine.positions, tokenizer, template, ends, 320, engine.grammars)
    with serving(RunEngine(engine, "tiny"), model) as server:
        yield server


def test_answers_keep_to_a_schema(talking):
    """As OpenAI's client parses them into a pydantic model; whole, several, and in a stream."""
    client, message = talking.client(), [{"role": "user", "content": "the weather"}]
    done = client.chat.completions.parse(model="tiny", messages=message, response_format=Weather, n=3, seed=4)
    assert all(isinstance(choice.message.parsed, Weather) for choice in done.choices)
    assert {choice.finish_reason for choice in done.choices} == {"stop"}
    with client.chat.completions.stream(model="tiny", messages=message, response_format=Weather, seed=4) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed


def test_an_answer_is_a_json_object(talking):
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_object"},
    }
    bias = {str(token): 60 for token in talking.server.service.model.tokenizer.encode("}")}
    done = talking.client().chat.completions.create(**asked, logit_bias=bias, seed=1, max_tokens=200)
    assert isinstance(json.loads(done.choices[0].message.content), dict)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": at}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    }
    for name, at in (("weather", ["Paris", "Rome"]), ("time", [1, 2]))
]


@pytest.mark.parametrize("choice", ["required", "time"])
def test_a_call_is_made_if_it_is_demanded(talking, choice):
    """Of any tool, or of the one that is named; by a model that knows nothing of tools."""
    named = {"type": "function", "function": {"name": choice}}
    done = talking.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        tools=TOOLS,
        tool_choice=choice if choice == "required" else named,
        n=4,
        seed=2,
    )
    for each in done.choices:
        [call] = each.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert each.finish_reason == "tool_calls" and each.message.content is None
        assert arguments["at"] in {"weather": ["Paris", "Rome"], "time": [1, 2]}[call.function.name]
        assert choice in ("required", call.function.name)


REFUSED = [
    ({"type": "json_schema"}, {}, "response_format.json_schema.schema", "is missing"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}, {}, "response_format", "type: b"),
    ({"type": "json_object"}, {"tools": "one"}, "response_format", "no room for calls of tools"),
    ({"type": "json_object"}, {"extra_body": {"min_tokens": 3}}, "response_format", "leave out ignore_eos"),
    (
        {"type": "json_object"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        "response_format",
        "reasoning",
    ),
]


@pytest.mark.parametrize("form, more, param, rule", REFUSED, ids=[rule for *_, rule in REFUSED])
def test_schemas_that_cannot_be_kept_are_said(talking, form, more, param, rule):
    if "tools" in more:
        more = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
    message = [{"role": "user", "content": "a"}]
    with pytest.raises(openai.BadRequestError) as refused:
        talking.client().chat.completions.create(model="tiny", messages=message, response_format=form, **more)
    assert refused.value.param == param and rule in refused.value.message


# ---- the verb ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(warm, tmp_path_factory):
    """A Hugging Face folder of a byte model, with a chat template."""
    place = tmp_path_factory.mktemp("served")
    words = [f"dir={place / 'run'}", "train.seq_length=32", "train.steps=1", "data.tokenizer=bytes"]
    words += ["optim.warmup_steps=0", "train.eval_interval=null", "model.max_position_embeddings=96"]
    done = warm.phalanx("train", "recipes/tiny_llama.yaml", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [weights] = (place / "run").glob("checkpoints/*/weights")
    weights.rename(place / "tiny")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (place / "tiny" / "chat_template.jinja").write_text(template)
    return place / "tiny"


class Program:
    """`phalanx serve` on a free port."""

    def __init__(self, program, *words):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [*program, "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if found := re.search(r"served at (http://\S+)", line):
                self.client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=60)
                return
        raise AssertionError(f"it did not begin to serve: {self.said}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.said += self.process.stdout.read()
        self.process.wait(60)

    def ranks(self):
        """Process numbers of its ranks."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = path.read_bytes().split(b"\0")
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid:
                found |= {int(word[5:]): int(path.parent.name) for word in words if word.startswith(b"RANK=")}
        return found


def test_the_verb_serves_texts_and_chats_until_it_is_stopped(warm, folder):
    with Program([str(warm.folder / "phalanx")], str(folder), "--model-name", "mine") as program:
        assert [model.id for model in program.client.models.list()] == ["mine"]
        done = program.client.completions.create(model="mine", prompt="Arma", max_tokens=5, temperature=0)
        assert 0 < done.usage.completion_tokens <= 5
        message = [{"role": "user", "content": "Arma"}]
        chat = program.client.chat.completions.create(model="mine", messages=message, max_tokens=5)
        assert chat.usage.prompt_tokens == len("user: Arma\nassistant:")
    assert program.process.returncode == 0 and "stopping" in program.said and "Traceback" not in program.said
    assert "to save" not in program.said


@pytest.mark.soak
def test_a_killed_rank_ends_requests_with_their_error_and_the_server_with_6(folder):
    with Program([sys.executable, "-m", "phalanx"], str(folder), "layout.tp=2", "--ranks", "2") as program:
        asked = {"model": "tiny", "prompt": "Arma", "max_tokens": 80, "n": 8, "extra_body": {"ignore_eos": True}}
        with program.client.completions.create(stream=True, **asked) as stream:
            next(iter(stream))
            os.kill(program.ranks()[1], signal.SIGKILL)
            with pytest.raises(
                openai.APIError, match=r"the engine failed, and the server ends: peer lost \(its log says more\)"
            ):
                list(stream)
        program.process.wait(60)
    assert program.process.returncode == 6 and "rank 1 of 2 was killed by SIGKILL" in program.said


BAD = [
    (["--api-keys", "nothing"], "--api-keys='nothing': must be a file"),
    (["--host", "203.0.113.7"], "--host='203.0.113.7': must be an address of this machine"),
    (["layout.tp=3"], "layout.tp=3"),
    (["--length", "97"], "--length=97: must not be more than the model has positions"),
    (["--speculate", "mtp"], "--speculate='mtp': needs a model with multi-token prediction modules"),
    (["--memory-gib", "1e-6"], "--length=96: needs 0.1 MiB on a rank"),
    (["--prefix-states", "2"], "--prefix-states=2: has no effect without layers that keep a state"),
    (["--pages", "fp8", "train.batch_invariant=true"], "--pages='fp8': must be that of the model with"),
]


@pytest.mark.parametrize(
    "words, rule", BAD, ids=["keys", "host", "layout", "length", "drafts", "memory", "states", "pages"]
)
def test_bad_options_end_it_before_weights_are_read(warm, folder, words, rule):
    done = warm.phalanx("serve", str(folder), *words, cwd=folder)
    assert done.returncode == 2 and rule in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("pages, dtype", [("model", torch.float32), ("fp8", torch.float8_e4m3fn)])
def test_pages_are_stored_as_is_asked(folder, pages, dtype):
    """Of every layer, in the engine that the verb makes."""
    run = run_of_folder(folder, gpu=False)
    plan = make_plan(without_training(run, 1), 1)
    asked = ServeOptions(weights=str(folder), name="tiny", sequences=2, pages=pages)
    engine = load_engine(run, Mesh(plan.grid, 0), asked)
    kept = [layer.memory.pages.tensors[0].dtype for layer in remembering(engine.model.blocks)]
    assert kept == [dtype] * 4


def test_a_client_asks_for_an_adapter_by_its_name(tmp_path):
    """Each of three models of one server against the answers of an engine that has that adapter alone, or none."""
    torch.manual_seed(0)
    base = hf_random_model(MODELS["llama"])
    base.save_pretrained(tmp_path / "base")
    folders = {}
    for n, name in enumerate(("sql", "chat")):
        model = peft.get_peft_model(
            hf_random_model(MODELS["llama"]), peft.LoraConfig(r=2 + n, target_modules=["q_proj"])
        )
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora_" in key:
                    p.normal_(0.0, 1.0)
        model.save_pretrained(tmp_path / name)
        folders[name] = str(tmp_path / name)
    prompt = [5, 11, 2, 7, 93, 17]

    def engine_with(adapters, every=None):
        run, served = with_adapters(run_of("llama"), adapters, every)
        plan = make_plan(without_training(run, 1), 1)
        return Engine(load_model(tmp_path / "base", plan, Mesh(plan.grid, 0), served), EngineOptions(sequences=4))

    def alone(name):
        engine = engine_with({name: folders[name]} if name else {}, name)
        ((tokens, *_),) = answers_of(engine, [(prompt, SamplingOptions(tokens=6, temperature=0))])
        return tokens

    engine = engine_with(folders)
    model = ServedModel("tiny", engine.positions, vocab_size=VOCAB, adapters=engine.adapters)
    with serving(RunEngine(engine, "tiny"), model) as server:
        client = server.client()
        listed = client.models.list().data
        assert [(each.id, getattr(each, "parent", None)) for each in listed] == [
            ("tiny", None),
            ("sql", "tiny"),
            ("chat", "tiny"),
        ]
        assert client.models.retrieve("sql").id == "sql"
        found = {}
        for name in ("tiny", *folders):
            done = client.completions.create(model=name, prompt=prompt, max_tokens=6, temperature=0)
            assert done.model == name
            found[name] = done.choices[0].token_ids
        with pytest.raises(openai.NotFoundError, match="Did you mean chat"):
            client.completions.create(model="chatt", prompt=prompt)
    assert found == {"tiny": alone(None), "sql": alone("sql"), "chat": alone("chat")}
    assert len({tuple(tokens) for tokens in found.values()}) == 3
