"""The server on the real engine: a tiny model in float64 with random weights; `phalanx serve` as people start it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from phalanx.inference.engine import Engine, EngineOptions
from phalanx.server.serve_rank import RunEngine
from phalanx.server.served import ServedModel
from tests.harness.generation import random_model, run_of, sequences_of, whole_logits
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


def test_what_the_engine_refuses_is_said(real):
    for prompt, tokens, rule in (([1] * 24, 1, "24 positions"), ([1] * 20, 9, "24 positions"), ([500], 1, "0 to 130")):
        with pytest.raises(openai.BadRequestError, match=rule):
            real.client().completions.create(model="tiny", prompt=prompt, max_tokens=tokens)


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
]


@pytest.mark.parametrize("words, rule", BAD, ids=["keys", "host", "layout"])
def test_bad_options_end_it_before_weights_are_read(warm, folder, words, rule):
    done = warm.phalanx("serve", str(folder), *words, cwd=folder)
    assert done.returncode == 2 and rule in done.stderr and "Traceback" not in done.stderr
