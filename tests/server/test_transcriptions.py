"""/v1/audio/transcriptions as OpenAI's client sends files, on a Whisper with random weights: the text is what
transformers' generate makes of the same recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
import tokenizers
import torch

pytest.importorskip("soundfile", reason="recordings need the extra sound")

from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import load_alone
from phalanx.inference.recordings import SoundReader
from phalanx.server.errors import ApiError
from phalanx.server.forms import form_parts
from phalanx.server.serve_rank import RunEngine, ServeOptions, served_model
from phalanx.text.tokenizers import load_tokenizer
from tests.harness.chat_model import chat_folder
from tests.inference.test_streams import frames_of, speaking, wav
from tests.models import test_whisper
from tests.server.conftest import serving

MADE = 9


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> tuple[Path, torch.nn.Module, SoundReader]:
    """A folder of transformers with a tokenizer and no chat template, the model, and how it hears."""
    folder = chat_folder(tmp_path_factory.mktemp("whisper"))
    (folder / "chat_template.jinja").unlink()
    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    model = replace(test_whisper.CASES[test_whisper.FIRST], vocab_size=size, max_position_embeddings=4 + MADE)
    hf = speaking(model)
    hf.generation_config.suppress_tokens, hf.generation_config.begin_suppress_tokens = [50, 51], [52]
    hf.save_pretrained(folder)
    reader = SoundReader.of(model)
    assert reader is not None
    return folder, hf, reader


@pytest.fixture(scope="module")
def server(whisper):
    folder, _, _ = whisper
    engine = Engine(
        load_alone(folder), EngineOptions(sequences=4, tokens=64, page_size=4), tokenizer=load_tokenizer(folder)
    )
    model = served_model(ServeOptions(weights=str(folder), name="whisper"), engine)
    with serving(RunEngine(engine, "whisper"), model) as server:
        yield server


def ask(server, data: bytes, name: str = "a.wav", **more):
    how = {"model": "whisper", "temperature": 0, **more}
    return server.client().audio.transcriptions.create(file=(name, data), **how)


def test_a_text_is_that_of_transformers(server, whisper):
    """Truth: greedy tokens of transformers, as the tokenizer writes them. The language decides how a text begins."""
    folder, hf, reader = whisper
    tokenizer, seconds, said = load_tokenizer(folder), reader.recordings.steps.seconds, set()
    for number, language in ((1, "de"), (2, "de"), (1, "en")):
        data = wav(number, seconds)
        frames = frames_of(reader, reader.recording(data, "a.wav")).to(hf.dtype)
        how = {"max_new_tokens": MADE, "return_timestamps": False, "use_cache": False, "return_dict_in_generate": True}
        with torch.no_grad():
            tokens = hf.generate(frames, language=language, task="transcribe", **how).sequences[0].tolist()
        assert len(tokens) == 4 + MADE or hf.generation_config.eos_token_id in tokens
        expected = tokenizer.decode(tokens[4:], skip_special_tokens=True).strip()
        assert ask(server, data, language=language).text == expected
        said.add(expected)
    assert len(said) > 1
    whole = ask(server, wav(1, seconds), language="de").text
    assert ask(server, wav(1, seconds), language="de", response_format="text").rstrip("\n") == whole
    events = list(ask(server, wav(1, seconds), language="de", stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole
    assert "".join(event.delta for event in events[:-1]).strip() == whole


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data": b"no sound"}, "file: .*a.wav"),
        ({"data": b""}, "file: .*a.wav"),
        ({"language": "fr"}, "language: language 'fr' is none that the model says: de, en"),
        ({"language": openai.omit}, "language: is missing: .* de, en"),
        ({"prompt": "a b"}, "prompt: is not supported: a text begins as"),
        ({"response_format": "srt"}, "response_format: .*'json' or 'text'"),
        ({"temperature": 3}, "temperature: .*less than or equal to 1"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities.*no times are written"),
        ({"extra_body": {"speed": "2"}}, "speed: is not a parameter that this server knows"),
    ],
)
def test_what_cannot_be_heard_is_refused(server, whisper, more, said):
    data = wav(1, whisper[2].recordings.steps.seconds)
    with pytest.raises(openai.BadRequestError, match=said):
        ask(server, **{"data": data, "language": "de", **more})


def test_other_endpoints_and_models_say_where(server, start):
    assert server.client().models.retrieve("whisper").transcribes is True
    with pytest.raises(openai.BadRequestError, match="POST /v1/audio/transcriptions"):
        server.client().completions.create(model="whisper", prompt="a")
    with pytest.raises(openai.BadRequestError, match="POST /v1/audio/transcriptions"):
        server.client().chat.completions.create(model="whisper", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="stub hears no recordings"):
        start().client().audio.transcriptions.create(model="stub", file=("a.wav", b"a"))
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", json={"model": "whisper"})
    assert answer.status_code == 415 and "a form with a file" in answer.json()["error"]["message"]


def test_forms_are_read_to_the_byte():
    """Truth: httpx's encoding. Files with the marks of forms and lines of every kind in them."""
    bytes_ = b"\r\n--a\r\n\n\r--\0\xff" * 3
    request = httpx.Request("POST", "http://a", data={"model": "b\u00e9"}, files={"file": ("c d.wav", bytes_)})
    kind, whole = request.headers["content-type"], request.read()
    model, file = form_parts(whole, kind)
    assert (model.name, model.text(), file.name, file.filename, file.data) == (
        "model",
        "b\u00e9",
        "file",
        "c d.wav",
        bytes_,
    )
    for data, of, said in (
        (whole, "multipart/form-data", "no boundary"),
        (whole[:-4], kind, "cut short"),
        (b"x" + whole, kind, "does not begin"),
        (whole.replace(b'name="model"', b""), kind, "no name"),
    ):
        with pytest.raises(ApiError, match=said):
            form_parts(data, of)
