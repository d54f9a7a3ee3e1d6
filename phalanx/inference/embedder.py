"""Embeddings of texts by a model without a head, on the ranks of a layout: texts are packed into sequences, and their
last hidden states pooled as the folder of the model says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.checkpoint.adapters import FOLDER as ADAPTERS
from phalanx.checkpoint.embedder_files import POOLINGS, EmbedderFacts, is_embedder, read_embedder
from phalanx.checkpoint.hf import model_config_from_hf, resolved, without_head
from phalanx.checkpoint.manifest import NAME, read_manifest
from phalanx.checkpoint.storage import sum_of
from phalanx.comm.mesh import Mesh, local_device
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data.files import TOKENIZER_FILES
from phalanx.engine.embeddings import pooled_texts
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import (
    InferenceModel,
    adapters_of,
    load_model,
    refuse_further_streams,
    run_of_model,
    weights_folder,
    without_training,
)
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import IGNORE, PADDING_RUN, Batch
from phalanx.sequence.sample import Pooling
from phalanx.text.marked import TextMarks

IN_FLIGHT = 4  # micro-batches of a pass for each pipeline stage
OPEN = 64  # sequences that are looked at for room, when texts are packed
IdsOf = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class EmbedderFolder:
    """A model whose embeddings are asked for. weights: a Hugging Face folder, or that of a checkpoint."""

    weights: Path
    facts: EmbedderFacts

    @property
    def tokenizer(self) -> str | None:
        """Its tokenizer's folder; None: it has none, and takes ids alone."""
        found = any((self.weights / name).exists() for name in TOKENIZER_FILES)
        return str(self.weights) if found else None

    def run(self, gpu: bool, length: int | None = None) -> Run:
        """The config in which it is computed: a sequence holds the longest text."""
        model = without_head(model_config_from_hf(self.weights))
        refuse_further_streams(model, "phalanx embed")
        found = run_of_model(model, adapters_of(self.weights), gpu)
        most = min(length or self.facts.most_tokens or found.train.seq_length, model.max_position_embeddings)
        train = replace(found.train, seq_length=most)
        return replace(found, train=train, data=DataConfig(mock=True, document_attention=True))

    @property
    def fingerprint(self) -> str:
        """What its embeddings depend on: the model, every byte of its weights, its tokenizer, and how states are
        pooled. Equal embedders have equal ones wherever they lie."""
        marks = None if self.tokenizer is None else TextMarks.of(self.tokenizer)
        text = None if marks is None else [marks.tokenizer.fingerprint, marks.opening, marks.closing]
        model = resolved(asdict(without_head(model_config_from_hf(self.weights))))
        how = [self.facts.pooling, self.facts.normalized]
        known = [model, weight_sums(self.weights), text, how]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def weight_sums(weights: Path) -> list[list[str]]:
    """Checksums of the files of a model's weights: its own, those of its adapters, and those of the base of these."""
    if weights.name != "weights" or not (weights.parent / NAME).is_file():
        return [[sum_of(path) for path in sorted(weights.glob("*.safetensors"))], [], []]
    manifest = read_manifest(weights.parent)
    of = [
        manifest.receipts("weights"),
        manifest.receipts(ADAPTERS),
        {} if manifest.base is None else manifest.base.files,
    ]
    return [[files[name].xxh3 for name in sorted(files) if name.endswith(".safetensors")] for files in of]


def embedder_folder(path: str, pooling: Pooling | None = None) -> EmbedderFolder:
    """Of a run (its newest checkpoint), a checkpoint, or a Hugging Face folder. pooling: of a folder that does not say
    how embeddings are made. ConfigError if neither says it, or both."""
    weights = weights_folder(path)
    if not (weights / "config.json").is_file():
        rule = "must be a run, a checkpoint or a Hugging Face folder: it has no config.json"
        raise ConfigError([Problem("RUN", path, rule, {}, (), "command line")])
    said = is_embedder(weights)
    if said and pooling is not None:
        rule = "has no effect: the model's folder says how its embeddings are made (modules.json)"
        raise ConfigError([Problem("--pooling", pooling, rule, {}, (), "command line")])
    if not said and pooling is None:
        rule = "must be given: the model's folder does not say how its embeddings are made (it has no modules.json)"
        raise ConfigError([Problem("--pooling", None, rule, {}, POOLINGS, "command line")])
    if pooling is not None:
        return EmbedderFolder(weights, EmbedderFacts(pooling))
    return EmbedderFolder(weights, read_embedder(weights))


Numbered = tuple[int, Sequence[int]]
"""A text: its number and its ids."""


@dataclass
class PackedTexts:
    """The texts of a sequence, and how many tokens they have."""

    texts: list[Numbered] = field(default_factory=list)
    tokens: int = 0


class Embedder:
    """Made on all ranks of a layout together, which make the same calls.

    width   features of an embedding
    most    tokens of the longest text
    """

    def __init__(self, model: InferenceModel, facts: EmbedderFacts):
        self.model, self.facts = model, facts
        run = model.plan.run
        self.width, self.most, self.micro_batch = run.model.hidden_size, run.train.seq_length, run.train.micro_batch

    @torch.no_grad()
    def embed(self, count: int, ids_of: IdsOf) -> Tensor:
        """(count, width) on every rank, in fp32 or wider: the embeddings of texts 0 .. count - 1. ids_of: the ids of
        one, 1 to `most` of them; each rank asks for its own share alone."""
        mesh = self.model.mesh
        dp, device = mesh.dp, mesh.device
        first, last = (count * (dp.index + i) // dp.size for i in (0, 1))
        packed = _packed([(number, ids_of(number)) for number in range(first, last)], self.most)
        batches = [packed[i : i + self.micro_batch] for i in range(0, len(packed), self.micro_batch)]
        rounds = torch.tensor([len(batches)], dtype=torch.int64, device=mesh.world.device)
        most = int(mesh.world.all_reduce(rounds, op="max").wait()[0])  # ranks that share experts compute equally many
        batches += [[]] * (most - len(batches))
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        found = torch.zeros(count, self.width, dtype=wide, device=device)
        at_once = IN_FLIGHT * mesh.pp.size
        for start in range(0, most, at_once):
            some = batches[start : start + at_once]
            pooled = self._forward([self._batch(sequences) for sequences in some])
            if mesh.at.tp > 0 or mesh.at.cp > 0:
                continue  # they have the same
            for number, rows in pooled.items():
                texts = [(at, text) for at, text in _rows(some[number], self.most) if text is not None]
                if texts:
                    places, numbers = (torch.tensor(each, device=device) for each in zip(*texts))
                    found[numbers] = rows[places].to(wide)
        made = mesh.world.all_reduce(found).wait()
        return normalize(made, dim=1) if self.facts.normalized else made

    def narrowed(self, vectors: Tensor, width: int | None) -> Tensor:
        """The first features alone, as embeddings of that width (Matryoshka)."""
        if width is None or width == self.width:
            return vectors
        cut = vectors[:, :width]
        return normalize(cut, dim=1) if self.facts.normalized else cut

    def _forward(self, batches: list[Batch]) -> dict[int, Tensor]:
        stages = self.model.stages
        stages.finish = partial(pooled_texts, pooling=self.facts.pooling)
        stages.begin(batches, seed=None)
        execute(self.model.program(len(batches)), self.model.handlers)
        stages.end()
        return stages.outputs

    def _batch(self, sequences: Sequence[PackedTexts]) -> Batch:
        """A micro-batch of sequences, each of some texts and padding, or of padding alone."""
        size = self.micro_batch * self.most
        tokens, positions, real = (np.zeros(size, np.int64) for _ in range(3))
        documents = np.zeros(size, np.int64)
        following = 0
        whole = [*sequences, *[PackedTexts() for _ in range(self.micro_batch - len(sequences))]]
        for row, sequence in enumerate(whole):
            at = row * self.most
            for length, text in _documents(sequence, self.most):
                here = slice(at, at + length)
                positions[here], documents[here] = np.arange(length), following
                if text is not None:
                    tokens[here], real[here] = text[1], 1
                at, following = at + length, following + 1
        batch = Batch(
            tokens=torch.from_numpy(tokens),
            labels=torch.full((size,), IGNORE, dtype=torch.int64),
            positions=torch.from_numpy(positions),
            samples=torch.zeros(size, dtype=torch.int64),
            num_sequences=self.micro_batch,
            seq_length=self.most,
            documents=torch.from_numpy(documents),
            real=torch.from_numpy(real),
            most_documents=following,
        )
        mesh = self.model.mesh
        return batch.cut(mesh.part).to(mesh.device)


def _packed(texts: Sequence[Numbered], most: int) -> list[PackedTexts]:
    """First-fit decreasing: each text in the first sequence that has room for it. ValueError for one that none has."""
    found, open_from = list[PackedTexts](), 0
    for text in sorted(texts, key=lambda text: -len(text[1])):
        length = len(text[1])
        if not 0 < length <= most:
            raise ValueError(f"text {text[0]} has {length} tokens, expected 1 to {most}")
        home = next((s for s in found[open_from:] if s.tokens + length <= most), None)
        if home is None:
            home = PackedTexts()
            found.append(home)
            open_from = max(0, len(found) - OPEN)
        home.texts.append(text)
        home.tokens += length
    return found


def _documents(sequence: PackedTexts, most: int) -> Iterator[tuple[int, Numbered | None]]:
    """Length and text of each document of a sequence; None: padding, in short ones, which attend to little."""
    for text in sequence.texts:
        yield len(text[1]), text
    left = most - sequence.tokens
    while left:
        length = min(left, PADDING_RUN)
        yield length, None
        left -= length


def _rows(sequences: Sequence[PackedTexts], most: int) -> Iterator[tuple[int, int | None]]:
    """The row of each document of a micro-batch, and the number of its text."""
    row = 0
    for sequence in sequences:
        for _, text in _documents(sequence, most):
            yield row, None if text is None else text[0]
            row += 1


def load_embedder(folder: EmbedderFolder, run: Run, mesh: Mesh) -> Embedder:
    """Collective. run: as of EmbedderFolder.run, perhaps in another layout and precision."""
    world = mesh.grid.world
    plan = make_plan(without_training(run, world), world)
    return Embedder(load_model(folder.weights, plan, mesh), folder.facts)


def embedder_alone(folder: EmbedderFolder, length: int | None = None, precision: str | None = None) -> Embedder:
    """On this process alone."""
    gpu = torch.cuda.is_available()
    run = folder.run(gpu, length)
    if precision is not None:
        changed: Any = {"precision": precision}
        run = replace(run, train=replace(run.train, **changed))
    plan = make_plan(without_training(run, 1), 1)
    return load_embedder(folder, run, Mesh(plan.grid, 0, local_device("cuda" if gpu else "cpu", 0)))


def marks_of(folder: EmbedderFolder) -> TextMarks:
    """How its texts are encoded. CheckpointError if it has no tokenizer."""
    if folder.tokenizer is None:
        raise CheckpointError(f"{folder.weights} holds no tokenizer, so texts cannot be read")
    return TextMarks.of(folder.tokenizer)
