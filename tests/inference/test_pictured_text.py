"""Images and encoders through the doors that people use: `phalanx generate`, `phalanx chat`, the server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch

from phalanx.base.errors import DataError
from phalanx.data.images import CONFIG
from phalanx.inference.conversation import Conversation
from phalanx.inference.pictures import PictureReader
from phalanx.inference.request import SamplingOptions
from tests.harness.chat_model import TEMPLATE, chat_folder
from tests.inference.test_streams import png
from tests.models import test_llava, test_t5

USER = "<|im_start|>user\n{{ message.content }}"
LISTED = (
    "<|im_start|>user\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
)
STEPS = {"size": {"shortest_edge": 6}, "crop_size": 6, "image_mean": [0.3] * 3, "image_std": [0.4] * 3}


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A folder of transformers with a tokenizer, a chat template and a processor, and the model."""
    folder = chat_folder(tmp_path_factory.mktemp("llava"))
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(["<image>"])
    core.save(str(folder / "tokenizer.json"))
    assert USER in TEMPLATE
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(USER, LISTED))
    (folder / CONFIG).write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", **STEPS}))
    size = core.get_vocab_size()
    model = replace(test_llava.CLIP, vocab_size=size, image_token_id=core.token_to_id("<image>"))
    hf = test_llava.transformers_model(model)
    hf.save_pretrained(folder)
    for number in (1, 2):
        (folder / f"{number}.png").write_bytes(png(number, 9, 12))
    return folder, hf


def asked(name: str | None, text: str) -> dict:
    parts = [*([{"type": "image", "image": name}] if name else []), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_chats_with_images_are_answered_in_any_layout(warm, llava, tmp_path):
    folder, hf = llava
    prompts = folder / "p.jsonl"
    lines = [asked("1.png", "ab"), asked("2.png", "ab"), asked(None, "ab"), {"prompt": "Arma"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", str(folder), "--prompts", str(prompts), "--tokens", "5", "--temperature", "0"]
    found = []
    for name, more in (("one", []), ("two", ["layout.tp=2", "--ranks", "2"])):
        done = warm.phalanx(*words, "-o", str(tmp_path / name), "train.precision=fp64", *more)
        assert done.returncode == 0, done.stderr
        found.append([json.loads(line) for line in (tmp_path / name).read_text().splitlines()])
    assert found[0] == found[1]
    assert [line.get("images") for line in found[0]] == [["1.png"], ["2.png"], None, None]
    assert found[0][0]["text"] != found[0][1]["text"] and found[0][3]["prompt"] == "Arma"
    prompts.write_text(json.dumps(asked("../1.png", "ab")))
    refused = warm.phalanx(*words)
    assert refused.returncode == 3 and "p.jsonl, line 1: '../1.png' must be a path below" in refused.stderr
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}], "mesages": 1}))
    refused = warm.phalanx(*words)
    assert refused.returncode == 3 and "has mesages beside its messages" in refused.stderr


def test_a_conversation_keeps_its_images(llava):
    """What is asked after an answer is asked with the image before it, whose pages are found in memory."""
    folder, _ = llava
    how = SamplingOptions(tokens=4, temperature=0)
    answers = []
    for name in ("1.png", "2.png"):
        talk = Conversation(str(folder), how)
        image = name, (folder / name).read_bytes()
        first = "".join(talk.answer("ab", images=[image]))
        answers.append((first, "".join(talk.answer("cd"))))
    assert answers[0] != answers[1]
    talk.forget()
    assert "".join(talk.answer("ab", images=[(name, (folder / name).read_bytes())])) == answers[1][0]


def test_a_terminal_shows_an_image_with_the_next_message(warm, llava):
    folder, _ = llava
    words = ("chat", str(folder), "--tokens", "4", "--temperature", "0")
    with_image, without = (warm.phalanx(*words, typed=text) for text in (f"/image {folder / '1.png'}\nab\n", "ab\n"))
    assert with_image.returncode == 0 and with_image.stdout != without.stdout, with_image.stderr
    wrong = warm.phalanx(*words, typed=f"/image {folder / 'config.json'}\nab\n")
    assert "no image of a format that is read" in wrong.stderr and wrong.stdout == without.stdout


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> tuple[Path, torch.nn.Module, tokenizers.Tokenizer]:
    """A folder of transformers with a tokenizer of letters that ends texts, and the model."""
    folder = tmp_path_factory.mktemp("t5")
    letters = {chr(n): n - 29 for n in range(32, 127)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"<pad>": 0, "</s>": 1, "<unk>": 2, **letters}, []))
    core.add_special_tokens(["<pad>", "</s>", "<unk>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    hf = test_t5.transformers_model("1.0: relu, tied, scaled")
    hf.save_pretrained(folder)
    return folder, hf, core


def test_an_encoders_prompt_is_answered(warm, t5, tmp_path):
    """The answer alone is shown, of the text with the token that ends it; equal to that of transformers."""
    folder, hf, core = t5
    texts = ["the fox", "a", "jumps over the lazy dog"]
    wanted = []
    for text in texts:
        ids = torch.tensor([core.encode(text).ids])
        made = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, use_cache=False)
        answer = [token for token in made[0, 1:].tolist() if token != 1]
        wanted.append(core.decode(answer))
    words = ["generate", str(folder), "--tokens", "5", "--temperature", "0", "train.precision=fp64"]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    done = warm.phalanx(*words, "--prompts", str(prompts), "layout.pp=2", "--ranks", "2", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [line["text"] for line in found] == wanted and [line["prompt"] for line in found] == texts
    one = warm.phalanx(*words[:-1], "--prompt", texts[0])
    assert one.returncode == 0 and one.stdout == wanted[0] + "\n"
    refused = warm.phalanx(*words, "--prompts", str(prompts), "layout.cp=2", "--ranks", "2")
    assert refused.returncode == 2 and "layout.cp=2" in refused.stderr and "encoder" in refused.stderr
    planned = warm.phalanx("plan", str(folder), "--serve", "--tokens", "64", "--device", "H100")
    assert planned.returncode == 0 and "a prompt and an answer of 64 tokens each" in planned.stdout, planned.stderr
    refused = warm.phalanx("eval", str(folder), "--tasks", "arc_easy")
    assert refused.returncode == 2 and "has an encoder" in refused.stderr


def test_how_images_become_numbers_is_read_where_the_model_is(tmp_path):
    """In the file of older folders and in that of transformers 5; a run's own setting goes before both."""
    model, steps = test_llava.CLIP, {"image_processor_type": "CLIPImageProcessor", **STEPS}
    usual = PictureReader.of(model, tmp_path).steps
    with pytest.raises(DataError, match="by which the model was trained, is not there, and neither is a preproc"):
        PictureReader.of(model, tmp_path, str(tmp_path / "gone.json"))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": steps}))
    nested = PictureReader.of(model, tmp_path).steps
    assert nested.mean == (0.3, 0.3, 0.3) and nested != usual
    (tmp_path / CONFIG).write_text(json.dumps(steps | {"image_mean": [0.2] * 3}))
    assert PictureReader.of(model, tmp_path).steps.mean == (0.2, 0.2, 0.2)
    (tmp_path / "own.json").write_text(json.dumps(steps | {"image_mean": [0.1] * 3}))
    assert PictureReader.of(model, tmp_path, str(tmp_path / "own.json")).steps.mean == (0.1, 0.1, 0.1)
    assert PictureReader.of(test_t5.CASES["1.0: relu, tied, scaled"], tmp_path) is None
