"""A tiny model whose embeddings tests ask for: a folder of transformers with a tokenizer, and texts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from phalanx.checkpoint.embedder_files import EmbedderFacts, embedder_files
from phalanx.checkpoint.hf import to_hf
from phalanx.models.registry import family_of
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizers import train_wordpiece
from tests.harness import hf_fuzz, parity

WORDS = "a the one that this of and with very quite rather stone leaf sea sky rose moss flame".split()
LENGTH = 15  # tp 2 does not divide it


def text_of(number: int) -> str:
    dice = np.random.default_rng(number)
    return " ".join(dice.choice(WORDS, 1 + number % 11))


def write_texts(path: Path, count: int) -> Path:
    lines = [{"id": f"t{i}", "text": text_of(i), "source": f"book {i % 3}"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def write_folder(at: Path, model: str, facts: EmbedderFacts | None) -> Path:
    """Weights of transformers, a tokenizer, and how embeddings are made; facts None: it does not say."""
    import transformers

    config: Any = replace(parity.MODELS[model], head="none", max_position_embeddings=32)
    kind = getattr(transformers, family_of(config).class_of(config))
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**to_hf(config, torch.float32)))
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0.0, 0.2).add_(1.0 if p.dim() == 1 else 0.0)
    theirs.save_pretrained(at)
    train_wordpiece([" ".join(WORDS)] * 3, 80, at)
    for name, text in ({} if facts is None else embedder_files(facts, config.hidden_size)).items():
        (at / name).parent.mkdir(exist_ok=True)
        (at / name).write_bytes(text)
    return at


@lru_cache
def their_vectors(folder: Path, pooling: str, count: int, prefix: str = "", length: int = LENGTH) -> Tensor:
    """(count, D) float64, normalized: transformers' hidden states of each text by itself, pooled."""
    from transformers import AutoModel

    experts = {"experts_implementation": "eager"} if "experts" in (folder / "config.json").read_text() else {}
    marks, found = TextMarks.of(str(folder)), []
    with hf_fuzz.wide(), torch.no_grad():
        model = AutoModel.from_pretrained(folder, attn_implementation="eager", **experts).double().eval()
        for number in range(count):
            ids = marks.encode(prefix + text_of(number), length)
            states = model(torch.tensor([ids])).last_hidden_state[0]
            found.append({"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling])
    return normalize(torch.stack(found), dim=1)
