"""A real task with images: handwritten digits (scikit-learn's, 8 x 8 pixels, from 43 writers), two to an image. A small
LLaVA that begins at random says which digits they are, and which is larger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image

import phalanx as px
from phalanx.checkpoint.keep import latest
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.engine.build import State
from phalanx.models.llava import LlavaConfig
from phalanx.models.vision_config import VisionConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.config import OptimConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PATCHES
from phalanx.text.cache import ChatUse, use_text
from tests.models.test_models import all_logits

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
SEQ, SIDE = 252, 16  # a sequence has room for some chats; two digits of 8 x 8 in a square
HELD_OUT = 400
PROCESSOR = "preprocessor_config.json"


def tokenizer_folder(folder: Path) -> Path:
    """Letters and digits, each a token, and how images become numbers."""
    folder.mkdir()
    letters = [chr(n) for n in range(32, 127)]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    core.add_special_tokens(["<image>", "<|end|>"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    steps = {"size": {"shortest_edge": SIDE}, "crop_size": SIDE, "image_mean": [0.3] * 3, "image_std": [0.4] * 3}
    (folder / PROCESSOR).write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", **steps}))
    return folder


def write_pairs(folder: Path, name: str, digits: np.ndarray, values: np.ndarray, count: int, seed: int) -> str:
    """Chats about `count` images of two digits drawn from these."""
    rng = np.random.default_rng(seed)
    (folder / name).mkdir()
    lines = []
    for number in range(count):
        left, right = rng.integers(0, len(digits), 2)
        picture = np.zeros((SIDE, SIDE), np.uint8)
        for at, which in ((0, left), (8, right)):
            top = rng.integers(0, SIDE - 7)
            picture[top : top + 8, at : at + 8] = digits[which]
        Image.fromarray(picture).save(folder / name / f"{number}.png")
        a, b = int(values[left]), int(values[right])
        parts = [{"type": "image", "image": f"{name}/{number}.png"}, {"type": "text", "text": "?"}]
        answer = {"role": "assistant", "content": f"{a} {b}: {max(a, b)}"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": parts}, answer]}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / f"{name}.jsonl")


def run_of(folder: Path, pairs: int, steps: int) -> tuple[Run, str]:
    """The run, and held-out chats, of digits that no image of training has."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    digits, values = (found.images[order] * 15.9).astype(np.uint8), found.target[order]
    training = write_pairs(folder, "train", digits[HELD_OUT:], values[HELD_OUT:], pairs, 1)
    held_out = write_pairs(folder, "test", digits[:HELD_OUT], values[:HELD_OUT], 300, 2)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    model = LlavaConfig(
        **sizes,
        vocab_size=97,
        num_hidden_layers=2,
        image_token_id=95,
        vision=VisionConfig(**sizes, num_hidden_layers=3, image_size=SIDE, patch_size=4, hidden_act="gelu"),
        vision_feature_layer=-1,
        initializer_range=0.04,
    )
    words = str(tokenizer_folder(folder / "words"))
    data = DataConfig(chats=(training,), tokenizer=words, processor=words, split="100,0,0", room={PATCHES: 17 * 10})
    options: dict[str, Any] = {"steps": steps, "global_batch": 8, "micro_batch": 8, "seq_length": SEQ}
    optim = OptimConfig(lr=0.002, warmup_steps=min(50, steps // 4), schedule="cosine", weight_decay=0.05)
    task = find_objective("sft").Config(name="sft")
    train = TrainConfig(**options, device="cpu")
    return Run(model=model, train=train, task=task, data=data, optim=optim, dir=str(folder / "run")), held_out


def batches_of(run: Run, chats: str) -> list[Batch]:
    data = replace(run.data, chats=(chats,))
    data = use_text(data, run.dir, 97, train_on=ChatUse("answers", run.model.media), say=lambda line: None)
    how = {"seq_length": SEQ, "seed": 1, "vocab_size": 97, "samples": 1, "reading": reading_of(replace(run, data=data))}
    loader = train_loader(data, **how)
    return [loader.batch([number]) for number in range(loader.num_samples)]


def swapped(batch: Batch) -> Batch:
    """Each image in the place of the next one."""
    images = batch.beside[PATCHES]
    size = images.units.sizes[0]
    count = sum(images.units.sizes)
    moved = torch.cat((images.values[:count].roll(size, 0), images.values[count:]))
    return replace(batch, beside={PATCHES: replace(images, values=moved)})


def share_right(state: State, batches: list[Batch]) -> float:
    """Of answers, those whose every token is the likeliest, which greedy decoding would then say."""
    right, logits = list[bool](), all_logits(state, batches)
    state.model.stages.finish = None
    state.model.train()
    for batch, found in zip(batches, logits):
        labelled = (batch.labels != IGNORE).numpy()
        wrong = (found.argmax(-1) != batch.labels.numpy()) & labelled
        documents = batch.documents.numpy()
        right += [not wrong[documents == number].any() for number in np.unique(documents[labelled])]
    return float(np.mean(right))


def trained(run: Run) -> tuple[Any, list[float]]:
    losses = []
    with px.session(run) as session:
        for batches in session.batches():
            losses.append(session.train_step(batches).loss.item())
        return session, losses


def test_digits_begin_to_be_read(tmp_path):
    run, _ = run_of(tmp_path, pairs=400, steps=40)
    _, losses = trained(run)
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    kept = latest(Path(run.dir) / "checkpoints") / "weights" / PROCESSOR
    assert kept.read_text() == (tmp_path / "words" / PROCESSOR).read_text()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_digits_are_read(tmp_path):
    run, held_out = run_of(tmp_path, pairs=5000, steps=1000)
    with px.session(run) as session:
        for batches in session.batches():
            session.train_step(batches)
        batches = batches_of(run, held_out)
        found = share_right(session.state, batches)
        chance = share_right(session.state, [swapped(batch) for batch in batches])
    assert found >= 0.85 and chance <= 0.1, (found, chance)
