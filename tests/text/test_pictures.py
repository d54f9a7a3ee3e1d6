"""Chats with images: what is prepared, what batches have of them, and records and files that cannot be used."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image

from phalanx.base.errors import DataError
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.images import BadImage, open_image, processor_of
from phalanx.data.loader import Loader, Prefetcher, train_loader
from phalanx.data.media import BadMedia
from phalanx.models.llava import LlavaConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE
from phalanx.sequence.patches import PATCHES
from phalanx.sequence.shard import SequenceShard
from phalanx.text.cache import ChatUse, find_text, use_text
from tests.harness.chat_model import TEMPLATE, chat_folder
from tests.harness.parity import MODELS
from tests.harness.same_samples import same_at_any_size_and_after_resume

SEQ = 96
LISTED = (
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module", params=["parts", "text"])
def folder(request, tmp_path_factory) -> Path:
    """A tokenizer with an image token, and a template that takes lists of parts, or one that knows texts alone."""
    found = chat_folder(tmp_path_factory.mktemp("chat"))
    core = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    core.add_special_tokens(["<image>"])
    core.save(str(found / "tokenizer.json"))
    if request.param == "parts":
        user = "<|im_start|>user\n{{ message.content }}"
        assert user in TEMPLATE
        lists = "{% if message.content is string %}{{ message.content }}{% else %}" + LISTED + "{% endif %}"
        (found / "chat_template.jinja").write_text(TEMPLATE.replace(user, f"<|im_start|>user\n{lists}"))
    return found


def token_of(folder: Path) -> int:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<image>")


def png(number: int, height: int, width: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image(name: str | None = None) -> dict[str, str]:
    return {"type": "image"} if name is None else {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, str], answer: str = "fine", **more: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": list(parts)}
    return {"messages": [asked, {"role": "assistant", "content": answer}], **more}


def model_of(folder: Path) -> LlavaConfig:
    return replace(MODELS["llava"], vocab_size=400, image_token_id=token_of(folder))


def write(where: Path, records: list[Any], files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)
    (where / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(where / "train.jsonl")


def run_of(folder: Path, where: Path, chats: str, task: str = "sft", **data: Any) -> Run:
    config = DataConfig(chats=(chats,), tokenizer=str(folder), split="100,0,0", **{"room": {PATCHES: 12}, **data})
    train = TrainConfig(steps=4, global_batch=2, micro_batch=2, seq_length=SEQ, precision="fp64")
    made: TaskConfig = find_objective(task).Config(name=task)
    return Run(model=model_of(folder), train=train, data=config, task=made, dir=str(where / "run"))


def loader_of(run: Run, say=lambda line: None) -> Loader:
    data = use_text(run.data, run.dir, 400, train_on=ChatUse("answers", run.model.media), say=say)
    assert find_text(run.data, run.dir, ChatUse("answers", run.model.media)) == data
    run = replace(run, data=data)
    how = {"seq_length": SEQ, "seed": 1, "vocab_size": 400, "samples": 8}
    return train_loader(run.data, **how, reading=reading_of(run))


FILES = {"a.png": png(1, 9, 9), "in/b.png": png(2, 20, 7), "c.png": png(3, 6, 6)}
RECORDS = [
    chat(image("a.png"), text("what is it?"), answer="a fox"),
    chat(text("the fox and the dog: "), image("in/b.png"), text("or"), image("c.png"), answer="dog"),
    chat(text("no picture"), answer="fine"),
    chat(image(), text("stop here"), image(), images=["c.png", "a.png"]),
]


def expected_rows(run: Run, name: str) -> np.ndarray:
    model = run.model
    steps = processor_of(dict(model.media.processor)).steps
    return model.patch_form.units(steps.pixels(open_image(FILES[name], name))).values


@pytest.mark.parametrize("workers", [0, 1])
def test_images_reach_their_tokens(folder, tmp_path, workers):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES), image_workers=workers)
    loader, form, token = loader_of(run), run.model.patch_form, run.model.image_token_id
    seen: dict[str, int] = {}
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number in range(loader.num_samples):
        batch = loader.batch([number])
        images = batch.beside[PATCHES]
        assert (batch.tokens == token).sum() == len(images.units.spots) == 4 * len(images.units.sizes)
        assert (batch.labels != token).all() and (batch.labels != IGNORE).any()
        assert sum(images.units.sizes) <= 12
        at = 0
        for document in batch.documents[batch.real.bool()].unique():
            here = batch.documents == document
            said = words.decode(batch.tokens[here].tolist(), skip_special_tokens=False)
            named = {"what is it?": ["a.png"], "the fox and": ["in/b.png", "c.png"], "stop here": ["c.png", "a.png"]}
            for name in next((names for begins, names in named.items() if begins in said), []):
                rows = images.values[images.documents == at].numpy()
                assert rows.tobytes() == expected_rows(run, name).tobytes() and len(rows) == form.rows(6, 6)
                at, seen[name] = at + 1, seen.get(name, 0) + 1
    assert seen == {"a.png": 2, "in/b.png": 1, "c.png": 2}


def test_the_same_batches_after_a_resume_and_beside_each_other(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    first, later = loader_of(run), loader_of(run)
    lists = [[0, 1], [2, 3], [4, 5]]
    with Prefetcher(first, lists) as batches, Prefetcher(later, lists[1:]) as resumed:
        whole = list(batches)
        for a, b in zip(whole[1:], resumed, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.beside[PATCHES].values, b.beside[PATCHES].values)


def test_the_same_samples_at_every_number_of_ranks_and_after_resume(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    found = same_at_any_size_and_after_resume(lambda: loader_of(run))
    assert any(row[1] for row in found.values())


def test_a_rank_decodes_the_images_that_it_computes_with(folder, tmp_path, monkeypatch):
    """What it cuts from the micro-batch is what it would cut if it had decoded all; each image is decoded once."""
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    decoded: list[str] = []

    def counted(data: bytes, name: str) -> Image.Image:
        decoded.append(name)
        return open_image(data, name)

    samples = [0, 1, 2]
    whole = loader_of(run).batch(samples)
    assert whole.beside[PATCHES].values.any()
    monkeypatch.setattr("phalanx.data.pictures.open_image", counted)
    for parts in ([SequenceShard(rank=rank, ranks=2) for rank in range(2)], SequenceShard(0, 2).all):
        decoded.clear()
        for part in parts:
            with Prefetcher(loader_of(run), [samples], part=part) as batches:
                [mine] = list(batches)
            wanted = whole.cut(part)
            pairs = [(mine.beside[PATCHES], wanted.beside[PATCHES])]
            assert torch.equal(mine.tokens, wanted.tokens)
            for ours, theirs in pairs:
                assert torch.equal(ours.values, theirs.values) and torch.equal(ours.coordinates, theirs.coordinates)
                assert torch.equal(ours.units.spots, theirs.units.spots) and ours.units.sizes == theirs.units.sizes
        assert len(decoded) == len(whole.beside[PATCHES].units.sizes) > 2


def test_replicas_decode_each_others_images(folder, tmp_path, monkeypatch):
    """Of the micro-batches of two replicas each image is decoded once, by the rank that computes it; their texts are
    those that each would read alone."""
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    micro_batches = [[0, 1], [2, 0]]
    alone = [loader_of(run).batch(samples) for samples in micro_batches]
    decoded: list[str] = []

    def counted(data: bytes, name: str) -> Image.Image:
        decoded.append(name)
        return open_image(data, name)

    monkeypatch.setattr("phalanx.data.pictures.open_image", counted)
    rows, parts = [], [SequenceShard(rank=i, ranks=2, replica=r, replicas=2) for r in range(2) for i in range(2)]
    for part in parts:
        with Prefetcher(loader_of(run), [[0, 1, 2, 0]], part=part) as batches:
            [mine] = list(batches)
        wanted, own = alone[part.replica], mine.beside[PATCHES]
        assert torch.equal(mine.tokens, wanted.tokens) and torch.equal(mine.labels, wanted.labels)
        assert own.units.sizes == wanted.beside[PATCHES].units.sizes
        assert len(own.units.spots) == (mine.tokens == run.model.image_token_id).sum() > 0
        rows += [each.numpy().tobytes() for each in own.values[own.real.bool()].split(5)]  # an image has five rows
    expected = [each.numpy().tobytes() for whole in alone for each in whole.beside[PATCHES].values.split(5)]
    assert sorted(rows) == sorted(expected) and len(decoded) == len(expected) > 4


def test_chats_with_images_are_mixed_with_text(folder, tmp_path):
    """Three parts of text to one with images, at every point of the run; a sample has the images of its own chats."""
    pictured = write(tmp_path, RECORDS[:2], FILES)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(chat(text(f"the dog {i}"))) + "\n" for i in range(9)))
    run = run_of(folder, tmp_path, pictured)
    run = replace(run, data=replace(run.data, chats=("0.25", pictured, "0.75", str(tmp_path / "text.jsonl"))))
    loader, token = loader_of(run), run.model.image_token_id
    batches = [loader.batch([number]) for number in range(8)]
    tokens = [int((batch.tokens == token).sum()) for batch in batches]
    assert sum(map(bool, tokens[:4])) == sum(map(bool, tokens[4:])) == 1
    for batch, count in zip(batches, tokens):
        images = batch.beside[PATCHES]
        assert count == len(images.units.spots) and bool(images.real.sum()) == bool(count)


def test_images_in_tar_files(folder, tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name, data in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    run = run_of(folder, tmp_path, write(tmp_path, [chat(image("s.tar/in/b.png"), text("what is it?"))], {}))
    batch = loader_of(run).batch([0])
    assert batch.beside[PATCHES].values.numpy().tobytes() == expected_rows(run, "in/b.png").tobytes()
    for name, said in (
        ("s.tar/x.png", "has no file 'x.png'"),
        ("s.tar/link.png", "has no file"),
        ("t.tar/a", "cannot"),
    ):
        with pytest.raises(DataError, match=said):
            loader_of(run_of(folder, tmp_path, write(tmp_path, [chat(image(name), text("a"))], {})))


def test_sequences_have_room_for_patches(folder, tmp_path):
    """A sequence has no more patches than it has room for, although its tokens would fit."""
    records = [chat(image("a.png"), text("what is it?")) for _ in range(6)]
    run = run_of(folder, tmp_path, write(tmp_path, records, FILES))
    loader = loader_of(run)
    counts = [len(loader.batch([n]).beside[PATCHES].units.sizes) for n in range(loader.num_samples)]
    assert max(counts) == 2 and sum(counts) == 6  # images have five rows each
    narrow = replace(run, data=replace(run.data, room={PATCHES: 4}))
    with pytest.raises(
        DataError, match=r"train.jsonl:\d+ has 5, and data.room.patches=4; data.room.patches=5 has room"
    ):
        loader_of(narrow)


def test_trained_on_everything_but_images(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    data = use_text(run.data, run.dir, 400, train_on=ChatUse("all", run.model.media), say=lambda line: None)
    how = {"seq_length": SEQ, "seed": 1, "vocab_size": 400, "samples": 8}
    batch = train_loader(data, **how, reading=reading_of(replace(run, data=data))).batch([0, 1])
    assert (batch.labels != run.model.image_token_id).all() and (batch.tokens == run.model.image_token_id).any()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (chat(image("x.png"), text("a")), "x.png: no such file"),
        (chat(image("../out.png"), text("a")), "must be a path below"),
        (chat(image("/etc/passwd"), text("a")), "must be a path below"),
        (chat(image("bad.png"), text("a")), "bad.png: damaged or cut short"),
        (chat(image("no.png"), text("a")), "no.png: no image of a format that is read"),
        (chat(image(), text("a")), "a part of type image has no file"),
        (chat(image(), image(), text("a"), images=["a.png"]), "have 2 images, and the list `images` has 1 names"),
        (chat(image("a.png"), text("a"), images=["a.png"]), "name each once"),
        (
            chat({"type": "video", "video": "a"}, text("a")),
            "a part of type 'video': those of text, image, audio can",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [image("a.png"), text("b")]},
                ]
            },
            "a part of type image is a user's, not of role assistant",
        ),
    ],
)
def test_bad_records_are_named_or_left_out(folder, tmp_path, record, said):
    (tmp_path / "data").mkdir()
    (tmp_path / "out.png").write_bytes(FILES["a.png"])
    files = {**FILES, "bad.png": png(1, 60, 60)[:900], "no.png": b"nothing"}
    path = write(tmp_path / "data", [RECORDS[0], record], files)
    with pytest.raises(DataError, match="data/train.jsonl:2: .*" + said):
        loader_of(run_of(folder, tmp_path, path))
    lines: list[str] = []
    loader = loader_of(run_of(folder, tmp_path, path, bad_chats="skip"), lines.append)
    assert loader.num_samples == 1 and any("bad chats left out" in line and ": 1 (" in line for line in lines)


def test_a_file_that_changes_later_is_named_with_its_record(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS[:1], FILES))
    loader = loader_of(run)
    (tmp_path / "a.png").write_bytes(FILES["a.png"][:70])
    with pytest.raises(BadImage, match="train.jsonl:1: a.png: damaged or cut short"):
        loader.batch([0])
    (tmp_path / "a.png").unlink()
    with pytest.raises(BadMedia, match="train.jsonl:1: .*a.png: no such file"):
        loader.batch([0])


def test_what_does_not_fit_the_model_is_refused(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    with pytest.raises(DataError, match="model.image_token_id=9 is no special token of data.tokenizer"):
        loader_of(replace(run, model=replace(run.model, image_token_id=9)))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(DataError, match="makes images of 224 x 224 pixels, and the model reads"):
        loader_of(replace(run, data=replace(run.data, processor=str(tmp_path))))
    with pytest.raises(DataError, match="train.jsonl:1: has parts of type image, which this model does not read"):
        use_text(run.data, run.dir, 400, train_on="answers", say=lambda line: None)


def test_a_chat_that_is_cut_keeps_the_images_of_what_is_left(folder, tmp_path):
    asked = [
        {"role": "user", "content": [image("a.png"), text("what is it?")]},
        {"role": "assistant", "content": "a fox"},
    ]
    later = [
        {"role": "user", "content": [image("c.png"), text("the dog " * 60)]},
        {"role": "assistant", "content": "dog"},
    ]
    path = write(tmp_path, [{"messages": [*asked, *later]}], FILES)
    run = run_of(folder, tmp_path, path, too_long="cut")
    batch = loader_of(run).batch([0])
    assert batch.beside[PATCHES].values.numpy().tobytes() == expected_rows(run, "a.png").tobytes()
