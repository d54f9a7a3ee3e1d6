"""/v1/embeddings, asked by OpenAI's client: transformers' pooled hidden states; forms, limits and errors."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import openai
import pytest

from phalanx.checkpoint.embedder_files import EmbedderFacts
from phalanx.cli.serve import serve
from phalanx.inference.embedder import embedder_alone, embedder_folder
from phalanx.inference.embedding_engine import EmbeddingEngine
from phalanx.server.serve_rank import ServeOptions, served_model
from phalanx.text.marked import TextMarks
from tests.harness.embedder import LENGTH, text_of, their_vectors, write_folder
from tests.server.conftest import serving

COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("served") / "modernbert"
    return write_folder(at, "modernbert", EmbedderFacts("mean", True, LENGTH))


@pytest.fixture(scope="module")
def served(folder):
    engine = EmbeddingEngine(embedder_alone(embedder_folder(str(folder)), precision="fp64"), "tiny")
    with serving(engine, served_model(ServeOptions(weights=str(folder), name="tiny"), engine)) as server:
        yield server


def test_vectors_are_those_of_transformers(served, folder):
    """As numbers, and as base64, which the client asks for by itself; texts, and the ids of a text."""
    expected = their_vectors(folder, "mean", COUNT).float().numpy()
    texts, client = [text_of(i) for i in range(COUNT)], served.client()
    for more in ({}, {"encoding_format": "float"}):
        made = client.embeddings.create(model="tiny", input=texts, **more)
        assert [row.index for row in made.data] == list(range(COUNT)) and made.model == "tiny"
        np.testing.assert_allclose([row.embedding for row in made.data], expected, rtol=0, atol=1e-6)
    ids = [TextMarks.of(str(folder)).encode(text) for text in texts[:3]]
    assert made.usage.prompt_tokens == made.usage.total_tokens > sum(map(len, ids))
    for given, rows in ((ids, slice(0, 3)), (ids[1], slice(1, 2)), (texts[2], slice(2, 3))):
        made = client.embeddings.create(model="tiny", input=given)
        np.testing.assert_allclose([row.embedding for row in made.data], expected[rows], rtol=0, atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_of_length_one(served, folder):
    expected = their_vectors(folder, "mean", COUNT).numpy()[:2, :5]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    made = served.client().embeddings.create(model="tiny", input=[text_of(0), text_of(1)], dimensions=5)
    np.testing.assert_allclose([row.embedding for row in made.data], expected, rtol=0, atol=1e-6)


def test_many_clients_at_once_get_their_own(served, folder):
    expected = their_vectors(folder, "mean", COUNT).numpy()

    async def everybody():
        async with served.async_client() as client:
            asked = [client.embeddings.create(model="tiny", input=text_of(i)) for i in range(COUNT)]
            return [made.data[0].embedding for made in await asyncio.gather(*asked)]

    np.testing.assert_allclose(asyncio.run(everybody()), expected, rtol=0, atol=1e-6)
    assert served.engine.idle and served.engine.load().waiting == 0


def test_what_is_refused(served):
    client = served.client()
    for given, words in (
        ({"input": ""}, "input: must not be empty"),
        ({"input": ["a", ""]}, r"input\[1\]: must not be empty"),
        ({"input": " ".join(["sea"] * 30)}, "input: has 32 tokens, and at most 15 are read"),
        ({"input": [[1], [2, 500]]}, r"input\[1\]: must hold token ids from 0 to 130, not 500"),
        ({"input": ["a"] * 257}, r"257 sequences are asked for \(texts of input\); at most 256 fit"),
        ({"input": "a", "dimensions": 33}, "dimensions: must be at most 32"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": {"a": 1}}, "input: must be a text, token ids"),
        ({"input": "a", "extra_body": {"truncate": True}}, "truncate: is not a parameter"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.embeddings.create(model="tiny", **given)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="tiny makes embeddings and no text: POST /v1/embeddings"):
        client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="makes embeddings and no text"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    [model] = client.models.list().data
    assert model.embeds and not model.chat and model.max_model_len == LENGTH
    text = httpx.get(f"{served.url}/metrics").text
    assert 'phalanx_requests_total{path="/v1/embeddings",status="400"}' in text


def test_the_verb_starts_ranks_that_embed(folder, monkeypatch):
    """What it checks before, it finds no fault with."""
    started = []
    monkeypatch.setattr("phalanx.cli.ranks.run_ranks", lambda *given: started.append(given))
    serve.main([str(folder), "--port", "0"], standalone_mode=False)
    [(job, ready, values, _)] = started
    assert job == "phalanx.cli.jobs:serve" and ready.run.model.headless and values["options"]["name"] == folder.name


def test_a_model_that_generates_makes_no_embeddings(start):
    server = start()
    with pytest.raises(openai.BadRequestError, match="stub generates text and makes no embeddings"):
        server.client().embeddings.create(model="stub", input="a")


def engine_on_rank(rank: int, world: int, path: str) -> list[list[float]]:
    from dataclasses import replace

    from phalanx.comm.mesh import Mesh
    from phalanx.forecast.decide import make_plan
    from phalanx.inference.embedder import load_embedder
    from phalanx.inference.load import without_training
    from phalanx.inference.request import Embedded, RequestError, SamplingOptions
    from phalanx.layout.config import LayoutConfig

    folder = embedder_folder(path)
    run = replace(folder.run(gpu=False), layout=LayoutConfig(tp=2))
    run = replace(run, train=replace(run.train, precision="fp64"))
    mesh = Mesh(make_plan(without_training(run, world), world).grid, rank)
    engine = EmbeddingEngine(load_embedder(folder, run, mesh), "tiny")
    if rank:
        engine.follow()
        return []
    marks = TextMarks.of(path)
    with pytest.raises(RequestError, match="must be texts of 1 to 15 tokens"):
        engine.submit([1] * 17, SamplingOptions())
    numbers = [engine.submit(marks.encode(text_of(i)), SamplingOptions()) for i in range(COUNT)]
    engine.cancel(numbers[3])
    found = {}
    while not engine.idle:
        found |= {event.request: event.vector.tolist() for event in engine.step() if isinstance(event, Embedded)}
    engine.step()  # an idle one keeps the others awake
    engine.close()
    return [found.get(number, []) for number in numbers]


def test_on_two_ranks(ranks, folder):
    found, _ = ranks.run("tests.server.test_embeddings:engine_on_rank", 2, str(folder))
    expected = their_vectors(folder, "mean", COUNT).numpy()
    assert found.pop(3) == []
    np.testing.assert_allclose(found, np.delete(expected, 3, 0), rtol=0, atol=1e-6)
