"""Images in /v1/chat/completions: data: URLs, as OpenAI's client sends them, on a LLaVA with random weights."""

from __future__ import annotations

from base64 import b64encode
from zlib import crc32

import httpx
import openai
import pytest

from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_alone
from phalanx.server.serve_rank import RunEngine, ServeOptions, served_model
from phalanx.text.tokenizers import load_tokenizer
from tests.inference.test_pictured_text import llava as llava
from tests.inference.test_streams import png
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def server(llava):
    folder, _ = llava
    engine = Engine(
        load_alone(folder), EngineOptions(sequences=4, tokens=64, page_size=4), tokenizer=load_tokenizer(folder)
    )
    model = served_model(ServeOptions(weights=str(folder), name="llava"), engine)
    with serving(RunEngine(engine, "llava"), model) as server:
        yield server


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def message(*urls: str, text: str = "ab", role: str = "user") -> dict:
    images = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return {"role": role, "content": [*images, {"type": "text", "text": text}]}


def ask(server, *messages: dict, **more) -> openai.types.chat.ChatCompletion:
    how = {"model": "llava", "max_tokens": 6, "temperature": 0, **more}
    return server.client().chat.completions.create(messages=list(messages), **how)


def test_an_answer_hangs_on_the_image(server):
    """The same tokens, other images: no page of one answers for the other, whichever came first. The same image again
    is found in memory."""
    one, two = (url(png(n, 9, 12)) for n in (1, 2))
    first, second, again = (ask(server, message(each), logprobs=True) for each in (one, two, one))
    told = [[score.logprob for score in done.choices[0].logprobs.content] for done in (first, second, again)]
    assert told[0] != told[1] and told[0] == pytest.approx(told[2], abs=1e-4)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    cached = [done.usage.prompt_tokens_details.cached_tokens for done in (first, second, again)]
    placeholders = 4
    assert cached[1] < cached[2] and cached[2] > placeholders
    streamed = ask(server, message(one), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == first.choices[0].message.content
    both = ask(server, message(one), {"role": "assistant", "content": "c"}, message(two))
    assert both.usage.prompt_tokens > 2 * placeholders


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([message("https://example.com/a.png")], "must be a data: URL, .* this server fetches nothing"),
        ([message("file:///etc/passwd")], "must be a data: URL"),
        ([message("data:text/html;base64,AAAA")], "must be an image in base64, and is 'text/html;base64'"),
        ([message("data:image/png,AAAA")], "must be an image in base64"),
        ([message("data:image/png;base64,*")], "is no base64"),
        ([message(url(b"not an image"))], "no image of a format that is read"),
        ([message(url(png(1, 9, 12)[:60]))], "damaged or cut short"),
        ([message(url(png(1, 9, 12)), role="system")], "is a user's, not of role system"),
        ([message(*[url(png(1, 2, 2))] * 33)], "33 images; a request may have 32"),
        ([{"role": "user", "content": [{"type": "audio", "audio": "a"}]}], "content"),
    ],
)
def test_what_is_no_image_is_refused(server, messages, said):
    with pytest.raises(openai.BadRequestError, match=said):
        ask(server, *messages)


def test_too_many_pixels_are_refused_before_they_are_decoded(server):
    """A small file that would become gigabytes."""
    small = png(1, 2, 2)
    header = b"IHDR" + (40000).to_bytes(4, "big") * 2 + small[24:29]
    bomb = small[:12] + header + crc32(header).to_bytes(4, "big") + small[33:]
    with pytest.raises(openai.BadRequestError, match="pixels"):
        ask(server, message(url(bomb)))


def test_a_model_without_a_tower_says_so(start):
    server = start()
    with pytest.raises(openai.BadRequestError, match="stub reads texts alone"):
        server.client().chat.completions.create(model="stub", messages=[message(url(png(1, 2, 2)))])


def test_tokens_of_a_chat_count_its_images(server):
    client = server.client()
    assert client.models.retrieve("llava").images is True
    base = str(client.base_url).removesuffix("/v1/")
    plain, pictured = (
        httpx.post(f"{base}/tokenize", json={"messages": [each]}).json()["count"]
        for each in (message(), message(url(png(1, 9, 12))))
    )
    assert pictured == plain + 4
