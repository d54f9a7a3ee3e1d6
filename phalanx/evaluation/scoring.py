"""`phalanx data score`: writes the probabilities that a teacher (or a reference model) gives the tokens of a run, in
any layout, into a score file (data/scores.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.placement import Placement
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.config.task_check import scored_windows
from phalanx.data.index import Corpus
from phalanx.data.loader import Loader, Place, valid_loaders
from phalanx.data.scores import ScoreWriter
from phalanx.data.sources import open_part
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.evaluation.perplexity import ForwardOnly
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import forward_only
from phalanx.nn.module import Block
from phalanx.nn.objective import SequenceObjective, TaskConfig, find_objective, make_objective
from phalanx.sequence.batch import Batch
from phalanx.text.cache import ChatUse, use_text


class ScoredPairs(SequenceObjective):
    """The task of a run that scores pairs. It is never computed: it says that data.pairs is meant."""

    def loss(self, policy_P2: Tensor) -> Tensor:
        return policy_P2.sum(1)


SCORED_PAIRS = f"{__name__}:{ScoredPairs.__qualname__}"


def scoring_task(run: Run) -> TaskConfig:
    """The task of a run that scores the tokens which `run` reads: it says how they are prepared."""
    train_on = make_objective(run.task).train_on
    if run.data.pairs:
        pairs: TaskConfig = find_objective(SCORED_PAIRS).Config(name=SCORED_PAIRS)
        return pairs
    if run.data.chats and train_on is not None:
        chats: TaskConfig = find_objective("sft").Config(name="sft", train_on=train_on)
        return chats
    return TaskConfig()


@dataclass(frozen=True)
class TokenScoring:
    """What to score: `weights`, a Hugging Face folder; the `top` likeliest ids of each token; `out`, the file."""

    weights: str
    top: int
    out: str


def score_rank(run: Run, placement: Placement, what: TokenScoring) -> None:
    """One rank's share; rank 0 writes the file."""
    with ExitStack() as after:
        use = ChatUse(make_objective(run.task).train_on, run.model.media)
        run = replace(run, data=use_text(run.data, run.dir, run.model.vocab_size, train_on=use))
        loaders = loaders_of(run)  # problems with the data are reported before the ranks meet
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement), run.data)))
        count = score(run, mesh, what, loaders)
        if placement.rank == 0:
            print(f"scores={what.out} tokens={count} top={what.top} teacher={what.weights}", flush=True)


def loaders_of(run: Run) -> list[Loader]:
    """Of all data that the run may read: training, and validation if it evaluates."""
    length, seed, vocab = run.train.seq_length, run.train.seed, run.model.vocab_size
    sources, weights = open_part(run.data, 0, seq_length=length, seed=seed, vocab_size=vocab)
    inside, packed = run.data.inside_documents, run.data.is_packed
    found = [Loader(sources, weights, seq_length=length, document_attention=inside, packed=packed)]
    if run.train.eval_interval is not None:
        found += valid_loaders(run.data, seq_length=length, seed=seed, vocab_size=vocab).values()
    return found


def score(run: Run, mesh: Mesh, what: TokenScoring, loaders: list[Loader]) -> int:
    """Write the file; returns the number of tokens scored. Collective."""
    model = ForwardOnly(make_plan(forward_only(run), mesh.grid.world), mesh, what.weights)
    model.stages.finish = partial(_log_probs, top=what.top)
    corpora: list[Corpus] = [corpus for loader in loaders for source in loader.sources for corpus in source.corpora]
    facts = {"top": what.top, "windows": scored_windows(run), "teacher": Path(what.weights).name}
    count = 0
    with ScoreWriter(what.out, corpora, facts) if mesh.rank == 0 else nullcontext() as writer:
        for loader in loaders:
            for places in rounds(loader, run.train.micro_batch * mesh.dp.size):
                found = log_probs(model, loader, places, run.train.micro_batch, what.top).cpu().numpy()
                for place, values in zip(places, found):
                    count += _write(writer, loader, place, values)
    return count


def rounds(loader: Loader, size: int) -> Iterator[list[Place]]:
    """All windows of a loader, `size` at a time; the last ones repeat the last window."""
    places = [
        Place(0, number, w, w) for number, source in enumerate(loader.sources) for w in range(source.windows or 0)
    ]
    for first in range(0, len(places), size):
        some = places[first : first + size]
        yield some + [some[-1]] * (size - len(some))


@torch.no_grad()
def log_probs(model: ForwardOnly, loader: Loader, places: list[Place], micro_batch: int, top: int) -> Tensor:
    """(windows, seq_length, 1 + 2 top) float64, as of Head.log_probs, on every rank; each has computed a part of it."""
    mesh = model.mesh
    first = mesh.dp.index * micro_batch
    whole = loader.read(places[first : first + micro_batch])
    batch = whole.cut(mesh.part.alone)
    model([batch.to(mesh.device)])
    found = torch.zeros(len(places), loader.seq_length, 1 + 2 * top, dtype=torch.float64, device=mesh.device)
    if mesh.at.tp == 0 and 0 in model.stages.outputs:
        at = batch.take(torch.arange(whole.num_tokens)).to(mesh.device)
        mine = found[first : first + micro_batch].view(-1, 1 + 2 * top)
        mine[at] = model.stages.outputs[0]
    return mesh.world.all_reduce(found).wait()


def _log_probs(block: Block, x: Tensor, batch: Batch, top: int) -> Tensor:
    found: Tensor = block.log_probs(x, batch, top)  # type: ignore[operator]
    return found


def _write(writer: ScoreWriter | None, loader: Loader, place: Place, values: np.ndarray) -> int:
    """Write the rows of a window; returns its tokens."""
    origin, at = loader.sources[place.source].origin(place.window), 0
    corpus, ranges = origin if origin is not None else (None, [])
    for first, tokens in ranges:
        if writer is not None and corpus is not None:
            writer.write(corpus, first, values[at : at + tokens])
        at += tokens
    return at
