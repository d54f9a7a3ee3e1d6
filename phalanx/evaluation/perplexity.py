"""`phalanx eval`: loss and perplexity of a checkpoint on prepared sets, in any layout, from weights alone (no
gradients, no optimizer)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, ConfigError, DataError, Problem
from phalanx.base.pairwise import pairwise_sum
from phalanx.base.placement import Placement
from phalanx.base.registry import BUILT_IN
from phalanx.base.text_table import table
from phalanx.checkpoint.manifest import NAME, parse
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.data.config import prefixes_and_weights
from phalanx.data.files import TOKENIZER_FILES
from phalanx.data.loader import Loader, valid_loaders, whole_loaders
from phalanx.engine.build import build_for_inference
from phalanx.engine.evaluate import summed
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import forward_only, load_all, refuse_further_streams, run_of_folder
from phalanx.nn.objective import SEAM, find_objective, make_objective
from phalanx.pipeline.execute import Stages, execute
from phalanx.planning.order import eval_samples
from phalanx.planning.plan import Plan
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.cache import ChatUse, use_text
from phalanx.text.prepare import check_tokenizer, read_manifest
from phalanx.text.tokenizers import load_tokenizer


@dataclass(frozen=True)
class SetResult:
    """Results for one set: tokens with a loss, the mean loss in nats per token and, if its record states the number of
    bytes, per byte of text."""

    name: str
    tokens: int
    loss: float
    bytes_per_token: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


# ---- which run -----------------------------------------------------------------------------------


def base_config(weights: Path, gpu: bool) -> dict[str, Any]:
    """The config with which a checkpoint was made or, for a Hugging Face folder, one with its model. weights: the
    folder of tensors."""
    if weights.name == "weights" and (weights.parent / NAME).is_file():
        config = {name: section for name, section in parse(weights.parent).config.items() if _is_read(name, section)}
        if (config.get("model") or {}).get("head") == "none":
            raise ConfigError([headless_problem(str(weights))])
        if config:  # an evaluation writes to none of the run's sinks
            return {**config, "log": {k: v for k, v in config.get("log", {}).items() if k != "sinks"}}
    run = run_of_folder(weights, gpu)
    refuse_further_streams(run.model, "the loss of its folder (phalanx eval RUN has that of a run)")
    if run.model.headless:
        raise ConfigError([headless_problem(str(weights))])
    return to_dict(run)


def headless_problem(given: str) -> Problem:
    rule = "has no head, so no loss per token: phalanx embed makes its embeddings, train.eval_interval their loss"
    return Problem("CHECKPOINT", given, rule, {"model.head": "none"}, (), "command line")


def _is_read(name: str, section: Any) -> bool:
    """Of a run's config: all but its task. One that says what is asked of models that read both ways, or what is read
    so, stays."""
    if name != "task":
        return True
    task = section.get("name", "") if isinstance(section, dict) else ""
    if task not in BUILT_IN[SEAM]:
        return False
    kind = find_objective(task)
    return kind.both_ways is True or kind.makes_prefix


def tokenizer_of(weights: Path) -> str | None:
    """The folder, if it has a tokenizer."""
    return str(weights) if any((weights / name).exists() for name in TOKENIZER_FILES) else None


# ---- what ranks do -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate.

    weights  a Hugging Face folder or a checkpoint's
    sets     name -> prefixes; empty: the run's own validation sets
    samples  sequences in each set; None: as in the run, or all of a set that was named
    out      a file for the figures as JSON
    """

    weights: str
    sets: Mapping[str, Sequence[str]]
    samples: int | None = None
    out: str | None = None


class ForwardOnly:
    """A model without what training adds, on one rank of a layout."""

    def __init__(self, plan: Plan, mesh: Mesh, weights: str | Path):
        self.plan, self.mesh = plan, mesh
        buffers, self.stages = build_for_inference(plan, mesh)
        load_all(Path(weights), plan.run.model, buffers, mesh)

    @torch.no_grad()
    def __call__(self, batches: list[Batch]) -> Tensor:
        """(2,) float64 over all ranks: summed loss, and the number of tokens with a loss."""
        mesh, stages = self.mesh, self.stages
        mine = torch.stack([(b.labels != IGNORE).sum() for b in batches]).sum().double()
        tokens = mesh.data.all_reduce(mine).wait()
        stages.begin(batches, seed=None)
        execute(self._program(len(batches), stages), stages.handlers())
        stages.end()
        losses = torch.zeros(mesh.data.size, dtype=torch.float64, device=mesh.device)
        if mesh.at.tp == 0:
            losses[mesh.data.index].copy_(stages.loss_sum)
        mesh.world.all_reduce(losses).wait()
        return torch.stack((pairwise_sum(pairwise_sum(losses.view(-1, mesh.grid.cp))), tokens))

    def _program(self, count: int, stages: Stages) -> list[Any]:
        known = stages.handlers()
        return [i for i in self.plan.proved_program(count, backward=False).lists[self.mesh.at.pp] if type(i) in known]


def evaluate_rank(run: Run, placement: Placement, what: Evaluation) -> None:
    """One rank's share; rank 0 prints the table and writes the file."""
    with ExitStack() as after:
        use = ChatUse(make_objective(run.task).train_on, run.model.media)
        run = replace(run, data=use_text(run.data, run.dir, run.model.vocab_size, train_on=use))
        loaders = open_sets(run, what)  # problems with the data are reported before the ranks meet
        mesh, _ = after.enter_context(joined_mesh(run, placement, identity(run, device_of(run, placement))))
        results = results_of(run, mesh, what, loaders)
        if placement.rank == 0:
            tell(results, what, run, mesh)


def results_of(run: Run, mesh: Mesh, what: Evaluation, loaders: Mapping[str, Loader]) -> list[SetResult]:
    model = ForwardOnly(make_plan(forward_only(run), mesh.grid.world), mesh, what.weights)
    results, named = [], what.sets or run.data.valid
    for name, loader in loaders.items():
        loss, tokens = summed(run, mesh, loader, samples_of(run, loader, what), model).tolist()
        results.append(
            SetResult(name, int(tokens), loss / tokens if tokens else math.nan, bytes_per_token(named.get(name, ())))
        )
    return results


def open_sets(run: Run, what: Evaluation) -> dict[str, Loader]:
    how: Any = {
        "seq_length": run.train.seq_length,
        "vocab_size": run.model.vocab_size,
        "reading": replace(reading_of(run), scores=None),
    }
    if what.sets:
        loaders = whole_loaders(run.data, what.sets, **how)
    else:
        loaders = valid_loaders(run.data, seed=run.train.seed, **how)
    if not loaders:
        raise DataError(
            "the run has no validation set (data.split has no second part, data.valid is empty): name one "
            "with --data PREFIX"
        )
    return loaders


def check_sets(what: Evaluation, tokenizer: str | None) -> None:
    """DataError if token files were made with a tokenizer other than the model's."""
    if tokenizer is not None:
        known = load_tokenizer(tokenizer)
        for prefix in (prefix for given in what.sets.values() for prefix in prefixes_and_weights(given)[0]):
            check_tokenizer(prefix, known)


def samples_of(run: Run, loader: Loader, what: Evaluation) -> int:
    there = loader.num_samples
    if what.samples is not None:
        return min(what.samples, there or what.samples)
    return there if what.sets and there is not None else eval_samples(run, loader)


def bytes_per_token(given: Sequence[str]) -> float | None:
    """For the files of a set, from the records that `prepare` leaves beside them; None if one of them does not say."""
    prefixes, weights = prefixes_and_weights(given)
    records = [read_manifest(prefix) for prefix in prefixes]
    counts = [(record.get("text_bytes"), record.get("tokens")) for record in records]
    known = [
        (text, tokens)
        for text, tokens in counts
        if isinstance(text, int) and isinstance(tokens, int) and min(text, tokens) > 0
    ]
    if weights or not counts or len(known) < len(counts):
        return None
    return sum(text for text, _ in known) / sum(tokens for _, tokens in known)


def tell(results: Sequence[SetResult], what: Evaluation, run: Run, mesh: Mesh) -> None:
    print(
        f"{what.weights}: {run.model.family} on {mesh.grid.text}, {run.train.precision}, sequences of "
        f"{run.train.seq_length:,}"
    )
    rows = [("set", "tokens", "loss", "perplexity", "bits/byte")]
    for r in results:
        bits = "unknown" if r.bits_per_byte is None else f"{r.bits_per_byte:.4f}"
        rows.append((r.name, f"{r.tokens:,}", f"{r.loss:.6f}", f"{r.perplexity:,.4f}", bits))
    print(table(rows, left=(0,)), flush=True)
    if what.out is not None:
        record = {
            "weights": what.weights,
            "precision": run.train.precision,
            "seq_length": run.train.seq_length,
            "layout": mesh.grid.text,
        }
        Path(what.out).write_text(
            json.dumps({**record, "sets": [r.plain() for r in results]}, indent=1), encoding="utf-8"
        )


def need_sets(weights: Path, sets: Mapping[str, Sequence[str]]) -> None:
    """A Hugging Face folder has no validation sets of its own."""
    if not sets and not (weights.parent / NAME).is_file():
        rule = "is needed: a Hugging Face folder has no validation set of its own"
        raise ConfigError([Problem("--data", None, rule, {}, ("--data PREFIX", "--data notes.txt"), "command line")])


def check_folder(weights: Path) -> None:
    if not (weights / "config.json").is_file():
        raise CheckpointError(
            f"{weights} holds no config.json: it is neither a run, nor a checkpoint, nor a Hugging Face folder"
        )
