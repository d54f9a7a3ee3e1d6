"""Chats with recordings: what is prepared, what batches have of them, records and files that cannot be used, and a run
from end to end."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tokenizers
import torch

from phalanx.base.errors import DataError
from phalanx.cli.main import main
from phalanx.config.device_check import Facts
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader, Prefetcher, train_loader
from phalanx.data.media import BadMedia
from phalanx.data.sound import BadSound, steps_of
from phalanx.forecast.check import check
from phalanx.models.whisper import WhisperConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE
from phalanx.sequence.frames import FRAMES, frame_rows
from phalanx.sequence.sample import SOUND
from phalanx.text.cache import ChatUse, use_text
from tests.harness.chat_model import chat_folder

SEQ, ROWS = 40, 50  # a second has 50 rows
HERE = Facts(world_size=1, local_ranks=1)
START, END = "<|startoftranscript|>", "<|endoftext|>"
PREFIX = f"{START}<|en|><|transcribe|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    f"{START}" + "<|{{ language or 'en' }}|><|transcribe|>{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer with Whisper's kind of special tokens, and no chat template."""
    found = chat_folder(tmp_path_factory.mktemp("chat"))
    core = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    core.add_special_tokens([START, "<|en|>", "<|de|>", "<|transcribe|>"])
    core.save(str(found / "tokenizer.json"))
    (found / "chat_template.jinja").unlink()
    return found


def words_of(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def tone(hertz: float, seconds: float = 0.8, rate: int = 16_000, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    sound = 0.4 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    soundfile.write(file, sound, rate, format=kind, subtype="PCM_16")
    return file.getvalue()


def model_of(folder: Path) -> WhisperConfig:
    return WhisperConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_mel_bins=8,
        max_source_positions=ROWS,
        max_position_embeddings=SEQ,
        decoder_start_token_id=words_of(folder).token_to_id(START),
    )


def write(where: Path, records: list[Any], files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)
    (where / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(where / "train.jsonl")


def run_of(folder: Path, where: Path, chats: str, **data: Any) -> Run:
    given = {"room": {SOUND: 2 * ROWS}, "split": "100,0,0", **data}
    config = DataConfig(chats=(chats,), tokenizer=str(folder), **given)
    train = TrainConfig(steps=4, global_batch=2, micro_batch=2, seq_length=SEQ, precision="fp64")
    made: TaskConfig = find_objective("transcribe").Config(name="transcribe")
    return Run(model=model_of(folder), train=train, data=config, task=made, dir=str(where / "run"))


def loader_of(run: Run, say=lambda line: None) -> Loader:
    data = use_text(run.data, run.dir, 400, train_on=ChatUse("last_answer", run.model.media), say=say)
    how = {"seq_length": SEQ, "seed": 1, "vocab_size": 400, "samples": 8}
    return train_loader(data, **how, reading=reading_of(replace(run, data=data)))


def record(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"audio": name, "text": text, **more}


FILES = {"a.wav": tone(440.0), "in/b.flac": tone(660.0, kind="FLAC"), "c.wav": tone(220.0, 0.5, 22_050)}
RECORDS = [record("a.wav", "the fox"), record("in/b.flac", "the lazy dog"), record("c.wav", "the weather is fine")]


def expected_rows(run: Run, name: str) -> np.ndarray:
    sound, rate = soundfile.read(io.BytesIO(FILES[name]), dtype="float32")
    assert rate == 16_000
    return frame_rows(steps_of(dict(run.model.media.processor)).log_mel(sound))


@pytest.mark.parametrize("workers", [0, 1])
def test_recordings_stand_beside_their_texts(folder, tmp_path, workers):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES), image_workers=workers)
    loader, words, seen = loader_of(run), words_of(folder), set[str]()
    assert loader.num_samples == 2  # there is room for two recordings in a sequence
    for number in range(2):
        batch = loader.batch([number])
        sound = batch.beside[SOUND]
        assert sound.seq_length == 2 * ROWS and sound.values.shape == (2 * ROWS, FRAMES * 8)
        assert (
            sound.documents[sound.real.bool()].unique().tolist() == batch.documents[batch.real.bool()].unique().tolist()
        )
        for document in batch.documents[batch.real.bool()].unique():
            here = batch.documents == document
            said = words.decode(batch.labels[here].tolist(), skip_special_tokens=False)
            assert batch.tokens[here][0] == run.model.decoder_start_token_id and said.endswith(END)
            assert batch.tokens[here][1:].tolist() == batch.labels[here][:-1].tolist()
            text = said.removesuffix(END)
            seen.add(text)
            name = next(r["audio"] for r in RECORDS if r["text"] == text)
            rows = sound.values[sound.documents == document]
            assert len(rows) == ROWS
            if name != "c.wav":
                assert rows.numpy().tobytes() == expected_rows(run, name).tobytes()
    assert seen == {r["text"] for r in RECORDS}


def test_a_template_writes_what_comes_before_the_text(folder, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    records = [record("a.wav", "der Hund", chat_template_kwargs={"language": "de"})]
    run = run_of(folder, tmp_path, write(tmp_path, records, FILES), template=str(tmp_path / "t.jinja"))
    batch = loader_of(run).batch([0])
    words, real = words_of(folder), batch.real.bool()
    read = words.decode(batch.tokens[real].tolist(), skip_special_tokens=False)
    said = words.decode(batch.labels[batch.labels != IGNORE].tolist(), skip_special_tokens=False)
    assert read == PREFIX.replace("en", "de") + "der Hund" and said == "der Hund<|im_end|>"


def test_the_same_batches_after_a_resume(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    lists = [[0, 1], [2, 3], [4, 5]]
    with Prefetcher(loader_of(run), lists) as batches, Prefetcher(loader_of(run), lists[1:]) as resumed:
        for a, b in zip(list(batches)[1:], resumed, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.beside[SOUND].values, b.beside[SOUND].values)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (record("x.wav", "a"), "x.wav: no such file"),
        (record("../out.wav", "a"), "must be a path below"),
        (record("/etc/passwd", "a"), "must be a path below"),
        (record("link.wav", "a"), "leads out of"),
        (record("bad.wav", "a"), "bad.wav: damaged"),
        (record("long.wav", "a"), "long.wav: has 1.5 seconds; a recording may have 1"),
        (record("a.wav", ""), "the answer is empty"),
        (record(7, "a"), "a part of type audio has no file"),
        (record("a.wav", None, prompt="a"), "but none of"),
        ({"prompt": "a", "completion": "b"}, "has 0 recordings; each text has one"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "image": "a.png"}]},
                    {"role": "assistant", "content": "b"},
                ]
            },
            "has parts of type image, which this model does not read",
        ),
    ],
)
def test_bad_records_are_named_or_left_out(folder, tmp_path, bad, said):
    (tmp_path / "data").mkdir()
    (tmp_path / "out.wav").write_bytes(FILES["a.wav"])
    (tmp_path / "data" / "link.wav").symlink_to(tmp_path / "out.wav")
    files = {**FILES, "bad.wav": b"RIFF nothing", "long.wav": tone(300.0, 1.5)}
    path = write(tmp_path / "data", [RECORDS[0], bad], files)
    with pytest.raises(DataError, match="data/train.jsonl:2: .*" + said):
        loader_of(run_of(folder, tmp_path, path))
    lines: list[str] = []
    loader = loader_of(run_of(folder, tmp_path, path, bad_chats="skip"), lines.append)
    assert loader.num_samples == 1 and any("bad chats left out" in line and ": 1 (" in line for line in lines)


def test_a_file_that_changes_later_is_named_with_its_record(folder, tmp_path):
    loader = loader_of(run_of(folder, tmp_path, write(tmp_path, RECORDS[:1], FILES)))
    (tmp_path / "a.wav").write_bytes(b"RIFF nothing")
    with pytest.raises(BadSound, match="train.jsonl:1: a.wav: damaged"):
        loader.batch([0])
    (tmp_path / "a.wav").unlink()
    with pytest.raises(BadMedia, match="train.jsonl:1: .*a.wav: no such file"):
        loader.batch([0])


def test_room_for_recordings_is_needed(folder, tmp_path):
    path = write(tmp_path, RECORDS, FILES)
    with pytest.raises(DataError, match=r"train.jsonl:\d+ has 50, and data.room.sound=40; data.room.sound=50 has room"):
        loader_of(run_of(folder, tmp_path, path, room={SOUND: 40}))
    for room in ({}, {"patches": 50}):
        found = check(run_of(folder, tmp_path, path, room=room), HERE)
        assert any(p.field == "data.room" and {SOUND: 200} in p.valid for p in found)


def test_tasks_and_models_that_do_not_fit_are_refused(folder, tmp_path):
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    other = find_objective("seq2seq").Config(name="seq2seq", encoder_length=40)
    found = check(replace(run, task=other), HERE)
    assert any(p.field == "task.name" and "makes no sound" in p.rule and "name: transcribe" in p.rule for p in found)


CONFIG = """\
dir: {dir}
model: {{family: whisper, vocab_size: 400, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
  num_attention_heads: 2, num_mel_bins: 16, max_source_positions: 50, max_position_embeddings: 24,
  decoder_start_token_id: {start}}}
task: {{name: transcribe}}
train: {{steps: 40, global_batch: 8, micro_batch: 8, seq_length: 24}}
optim: {{lr: 0.01, schedule: constant}}
data: {{chats: [{chats}], tokenizer: {tokenizer}, split: "100,0,0", room: {{sound: 50}}}}
"""


def test_a_run_learns_words_from_tones(folder, tmp_path, monkeypatch):
    """Three pitches, three words: after 40 steps the net knows which is which."""
    monkeypatch.chdir(tmp_path)
    heard = {"fox": 300.0, "dog": 900.0, "weather": 2700.0}
    files = {f"{word}{i}.wav": tone(hertz * (1 + 0.02 * i)) for word, hertz in heard.items() for i in range(3)}
    path = write(tmp_path, [record(name, name.rstrip("012.wav")) for name in files], files)
    start = words_of(folder).token_to_id(START)
    text = CONFIG.format(dir=tmp_path / "run", start=start, chats=path, tokenizer=folder)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit, match="^0$"):
        main(["train", "run.yaml"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] > 4.0 and losses[-1] < 0.3


def test_a_missing_package_is_said_before_ranks_meet(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    run = run_of(folder, tmp_path, write(tmp_path, RECORDS, FILES))
    assert any(p.field == "data.chats" and "phalanx[sound]" in p.rule for p in check(run, HERE))
