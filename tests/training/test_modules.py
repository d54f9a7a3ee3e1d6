"""A real task for an encoder: a small BERT that begins at random is pretrained on the source of the standard library,
and learns from a few paragraphs of each module to say of others which module they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.checkpoint.keep import latest
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.engine.build import State
from phalanx.models.bert import BertConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.adamw import AdamWConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.classes import prepare_classes
from phalanx.text.tokenizers import train_wordpiece
from tests.harness.docstrings import library_files
from tests.models.test_models import all_logits

WORDS = 64  # of a paragraph, at most
MODULES = 40  # those with the most paragraphs
LABELLED, TESTS = 8, 15  # paragraphs of each module
VOCABULARY = 4096
SEQ = 256


@dataclass(frozen=True)
class Paragraph:
    module: str
    text: str


def paragraphs() -> Iterator[Paragraph]:
    """Of source files: what stands between empty lines, short ones together, long ones in parts; in single words."""
    for module, source in library_files():
        block = list[str]()
        for part in re.split(r"\n\s*\n", source):
            block += re.findall(r"\w+|[^\w\s]", part)
            while len(block) >= WORDS // 2:
                yield Paragraph(module.partition(".")[0], " ".join(block[:WORDS]))
                block = block[WORDS:]


@dataclass(frozen=True)
class Corpus:
    """modules: names of the classes. labelled and held_out: so many of each. text: all but those that are held out."""

    modules: tuple[str, ...]
    labelled: list[Paragraph]
    held_out: list[Paragraph]
    text: list[Paragraph]
