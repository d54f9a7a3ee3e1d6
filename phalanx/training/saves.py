"""What a run's checkpoints contain, where they go, and what a failed save means for the run. checkpoint/ writes
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.base.errors import CheckpointError
from phalanx.base.log import Log
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.base import base_at, lasting, name_base
from phalanx.checkpoint.embedder_files import EmbedderFacts, embedder_files
from phalanx.checkpoint.hf import read_folder
from phalanx.checkpoint.keep import Keep, remove_leftovers, step_of
from phalanx.checkpoint.manifest import Base, parse
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.save import Snapshot, Target, tokenizer_files
from phalanx.checkpoint.saver import SaveOutcome, Saver
from phalanx.comm.host import host_axis
from phalanx.config.model_source import has_tokenizer, source_of
from phalanx.config.run import Run, checkpoints_of
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig
from phalanx.engine.build import State
from phalanx.nn.objective import EmbeddingObjective, make_objective
from phalanx.observe.metrics import Counters
from phalanx.planning.adapters import saved_peft_config
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizer import is_portable, load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.training.callbacks import Callback

WRITING_S = 6 * 3600.0  # for which ranks wait for each other to write; a rank that dies is noticed at once


def numbers_of(state: State) -> dict[str, Tensor]:
    """Small tensors of a run's state that do not belong to its optimizer."""
    fp8 = {} if state.model.fp8 is None else state.model.fp8.state()
    return {**{f"guard.{k}": v for k, v in state.guard.state().items()}, **{f"fp8.{k}": v for k, v in fp8.items()}}


def turn_end_of(data: DataConfig) -> int | None:
    """The token that ends answers of a run on chats; None: it has none."""
    if not data.chats or data.tokenizer is None:
        return None
    from phalanx.text.chat_masks import ChatEncoder, turn_end  # jinja2: start-up time of runs without chats
    from phalanx.text.chat_template import template_for

    tokenizer = load_tokenizer(data.tokenizer)
    return turn_end(ChatEncoder(tokenizer, template_for(tokenizer, data.tokenizer, data.template), "answers"))


def how_embedded(run: Run, tokenizer: str | None) -> dict[str, bytes]:
    """Files that say how embeddings are made of the model's hidden states, and a tokenizer.json that begins and ends
    texts as in training; none where the model is not trained for embeddings."""
    objective = make_objective(run.task)
    if not isinstance(objective, EmbeddingObjective):
        return {}
    found = embedder_files(EmbedderFacts(objective.pooling, True, run.train.seq_length), run.model.hidden_size)
    files = {} if tokenizer is None or not Path(tokenizer).exists() else tokenizer_files(tokenizer)
    if "tokenizer.json" in files and tokenizer is not None:
        found["tokenizer.json"] = TextMarks.of(tokenizer).written_into(files["tokenizer.json"])
    return found


class Saves:
    """The saves of one rank; all ranks call each method together.

    start   the checkpoint from which the run continues; facts: what is compared when a run continues from one of these
            saves (training/resume)
    callbacks  are notified of each complete checkpoint
    """

    def __init__(self, state: State, counters: Counters, start: Path | None, facts: dict[str, Any], log: Log):
        self.callbacks: Sequence[Callback] = ()
        self.slowest_s = 0.0  # of the saves so far
        run = state.plan.run
        self.run, self.counters, self.log, self.facts = run, counters, log, facts
        self.parent = step_of(start) if start else None
        self.tokenizer, self.ids = self._tokenizer(state.mesh.rank)
        self.template = None if run.data.template is None else Path(run.data.template).read_bytes()
        self.turn_end = turn_end_of(run.data)
        self.beside = how_embedded(run, self.tokenizer)
        self.base = self._base(state, start)
        root, config = checkpoints_of(run), run.checkpoint
        target = Target(root, storage_for(root), Keep(config.keep_last, config.keep_every), (start,) if start else ())
        if state.mesh.rank == 0:
            for warning in remove_leftovers(root, target.storage):
                log.warn(warning)
        axis = host_axis(state.mesh.world, run.train.timeout_s, WRITING_S)
        self.saver = Saver(state, target, axis, background=config.background, more=numbers_of(state))
        state.before_update = self.saver.release

    def _tokenizer(self, rank: int) -> tuple[str | None, dict[str, Any]]:
        """The tokenizer files that checkpoints carry, and its special tokens: those named in the model's folder, if its
        tokenizer is the run's."""
        tokenizer, source = self.run.data.tokenizer, source_of(self.run)
        named = read_folder(source).token_ids if source else {}
        if tokenizer is None:
            self.source = source
            return None, named
        loaded = load_tokenizer(tokenizer)
        self.source = source if source and has_tokenizer(source, loaded.fingerprint) else None
        if not is_portable(tokenizer):
            tokenizer = str(Path(self.run.dir) / "tokenizer")
            if rank == 0:
                self._keep_tokenizer(loaded, tokenizer)
        own = {} if loaded.eod is None else {"eos_token_id": loaded.eod}
        return tokenizer, {**own, **(named if self.source else {})}

    def _keep_tokenizer(self, tokenizer: Tokenizer, folder: str) -> None:
        try:
            tokenizer.save(folder)
        except OSError as error:
            raise CheckpointError(
                f"the tokenizer that checkpoints carry cannot be written to {folder}: {error.strerror or error}"
            ) from error

    def _base(self, state: State, start: Path | None) -> Base | None:
        """The base of adapters, which checkpoints name; None: they hold all weights."""
        run, made = self.run, list[Base | None]()
        if run.lora is None:
            return None
        if start is None:
            return None if run.init_from is None else name_base(run.init_from, state.mesh.world)

        def known() -> None:
            base = parse(start).base
            if base is not None:
                base = replace(base, folder=lasting(base_at(start, base, run.init_from).folder))
            made.append(base)

        agree(state.mesh.world, known)
        return made[0]

    def prepare(self) -> None:
        """Before the first step: memory that saves in the background need, made while training begins."""
        if self.run.checkpoint.interval is not None:
            self.saver.prepare(self._snapshot())

    def save(self, last: bool = False) -> bool:
        """Save the finished step; returns whether it is saved or under way. `last`: nothing follows, so it is waited
        for and must not fail."""
        self.check(wait=True)
        try:
            self._tell(self.saver.start(self._snapshot()))
            if self.saver.why_not:
                self.log.once(f"checkpoints are not written in the background: {self.saver.why_not}")
        except CheckpointError as error:
            self._failed(error, last)
            return False
        if last:
            self.check(wait=True, last=True)
        return True

    def check(self, wait: bool = False, last: bool = False) -> None:
        """Between two steps: report the outcome of the save in the background."""
        try:
            self._tell(self.saver.wait() if wait else self.saver.finished())
        except CheckpointError as error:
            self._failed(error, last)

    def _failed(self, error: CheckpointError, last: bool) -> None:
        if last or self.run.checkpoint.on_error == "stop":
            raise error
        if self.log.rank == 0:
            self.log.warn(f"a checkpoint was not saved, and training goes on (checkpoint.on_error=continue): {error}")

    def _tell(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        self.parent = step_of(outcome.saved.path)
        self.slowest_s = max(self.slowest_s, outcome.took_s)
        waited = f" (in {outcome.took_s:.2f} s; the run waited {outcome.waited_s:.3f} s)"
        self.log.info(f"saved {outcome.saved.path}{waited}")
        if outcome.saved.removed:
            names = ", ".join(Path(path).name for path in outcome.saved.removed)
            self.log.info(f"removed {names} (checkpoint.keep_last={self.run.checkpoint.keep_last})")
        for warning in outcome.saved.warnings:
            self.log.warn(warning)
        for callback in self.callbacks:
            callback.on_save(Path(outcome.saved.path))

    def _snapshot(self) -> Snapshot:
        run, counters = self.run, self.counters
        scalars = {**asdict(counters), "train.precision": run.train.precision, "facts": self.facts}
        return Snapshot(
            counters.step,
            counters.consumed_samples,
            run.model,
            to_dict(run),
            scalars,
            self.tokenizer,
            self.ids,
            self.parent,
            self.source,
            saved_peft_config(run, None if self.base is None else self.base.folder),
            self.template,
            self.turn_end,
            self.beside,
            separate=run.lora is not None,
            base=self.base,
        )
