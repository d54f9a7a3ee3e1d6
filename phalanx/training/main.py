"""train(run, placement): one rank of a training run, from the first look at its folder to the last checkpoint."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from phalanx.base.devices import find_device
from phalanx.base.errors import CheckpointError, DamagedCheckpoint, DataError, NumericalStop
from phalanx.base.garbage import settled
from phalanx.base.log import Log
from phalanx.base.placement import SECRET, Placement
from phalanx.base.records import SinkStart
from phalanx.checkpoint.adapters import adapter_source
from phalanx.checkpoint.agree import agree, together
from phalanx.checkpoint.base import base_at, reading
from phalanx.checkpoint.keep import candidates, list_checkpoints, misnamed, newest_first, none_good, step_of
from phalanx.checkpoint.load import HeadWanted, load_adapters, load_base, load_state, load_weights
from phalanx.checkpoint.lock import FolderLock
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.places import place
from phalanx.checkpoint.trust import open_to_all
from phalanx.comm.health.heartbeat import Heartbeat
from phalanx.comm.mesh import Mesh
from phalanx.config.model_source import keep
from phalanx.config.run import Run, checkpoints_of
from phalanx.config.write import save_run, to_dict
from phalanx.data.background import BackgroundCheck, CheckedFiles
from phalanx.data.loader import Loader
from phalanx.engine.adapter_start import initial_tensors, start_adapters
from phalanx.engine.build import State, build, choices, init_weights
from phalanx.engine.meeting import device_of, identity, joined_mesh
from phalanx.engine.model import Model
from phalanx.forecast.data_table import data_table, open_loaders
from phalanx.forecast.decide import make_plan
from phalanx.forecast.flops import flops_of, mfu_lines
from phalanx.forecast.sample_text import document_lines, documents_of
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of
from phalanx.nn.objective import make_objective
from phalanx.observe.failures import Failures
from phalanx.observe.memory_errors import reported
from phalanx.observe.metrics import Counters, Reporter, Speed
from phalanx.observe.sinks import STEP_LINE, Sinks
from phalanx.observe.starts import note_start
from phalanx.observe.step_line import StepLines
from phalanx.planning.adapters import num_adapters
from phalanx.planning.blocks import exported_shapes
from phalanx.planning.order import total_samples
from phalanx.preflight.first_seconds import FirstSeconds
from phalanx.text.cache import ChatUse, use_text
from phalanx.text.prepare import check_tokenizers
from phalanx.text.tokenizer import load_tokenizer
from phalanx.training.callbacks import Callback
from phalanx.training.loop import Loop, ScoresTasks
from phalanx.training.machine import check_here, fit_here
from phalanx.training.resume import check_resume, check_steps, facts, read_of
from phalanx.training.saves import Saves, numbers_of

if TYPE_CHECKING:
    from phalanx.training.samples import TrainingSamples

# a terminal or a scheduler signals launcher and ranks at once, and the launcher passes its signal on: that is one
# request
SAME_S = 1.0

GOLDEN = 0.618034  # its multiples are spread evenly between whole numbers
FIRST_WIDTH, FIRST_LINES = 100, 13  # of the first chat in the log
# before a scheduler ends the run, time is kept for the last save and the step in progress, twice what they took so far
SAVES_KEPT, STEPS_KEPT = 2.0, 2.0
FINISH_S = 300.0  # for the rest of the background check at the end of a run


class StopRequest:
    """SIGTERM, SIGUSR1 and SIGINT, or a time limit, ask this process to stop after its step; `asked` reports it to the
    loop.

    A second signal ends the process at once, without saving. The previous handlers are restored at the end.
    """

    def __init__(self, limit_s: float | None = None, ends_at: float | None = None) -> None:
        """ends_at: Unix time at which a scheduler ends this process. The run stops `reserve()` seconds before it."""
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s
        self._killed = math.inf if ends_at is None else time.monotonic() + ends_at - time.time()
        self.reserve: Callable[[], float] = lambda: 0.0
        self._first = math.inf
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def asked(self) -> bool:
        now = time.monotonic()
        return self._first < math.inf or now > self._end or now > self._killed - self.reserve()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._first + SAME_S:
            os.write(2, b"stopped at once by a second signal; the last step is not saved\n")
            os._exit(128 + signum)
        self._first = min(self._first, time.monotonic())

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(run: Run, placement: Placement, command: str = "", callbacks: Sequence[Callback] = ()) -> None:
    """Train this rank's part, after the same checks as on the command line: the config, and the memory of this machine.

    Raises PhalanxError of the kind that decides the exit code. command: what a person typed, for the report.
    """
    check_here(run, placement)
    fit = fit_here(run, placement.world_size, placement)
    train_rank(run, fit.placement or placement, command, fit.warning, callbacks)


def train_rank(
    run: Run,
    placement: Placement,
    command: str = "",
    warning: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """As `train`, for a run that has been checked. warning: what those checks found, for the log."""
    with opened(run, placement, command, warning, callbacks) as loop:
        loop.run()


@contextmanager
def opened(
    run: Run,
    placement: Placement,
    command: str = "",
    warning: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Loop]:
    """A run's loop at the run's beginning: its newest checkpoint is loaded, or its weights are initialized. As
    `train_rank`; at the end it completes the background check of the data, and writes the report.

    Until all ranks have agreed on the run and reached its beginning, nothing in its folder changes: a start that is
    refused leaves no trace.
    """
    folder, given = Path(run.dir), run

    def report(failed: type[BaseException] | None, *_: object) -> None:
        if failed is None and placement.rank == 0 and run.log.report:
            report_at_the_end(folder, log)

    with ExitStack() as after:
        log = Log(placement.rank)
        log.wait_for_file()
        after.callback(log.close)
        lock = after.enter_context(FolderLock(folder)) if placement.rank == 0 else None
        failures = after.enter_context(Failures(folder, log, lock.check if lock else lambda: None))
        if warning is not None:
            log.warn(warning)
        if lock is not None:
            note_lock(lock, log)
        use = ChatUse(make_objective(run.task).train_on, run.model.media)
        run = replace(run, data=use_text(run.data, folder, run.model.vocab_size, train_on=use, say=log.info))
        check_tokenizers(run.data)
        loaders = open_loaders(run, run.data)  # problems with the data are reported before the ranks meet
        samples, tasks = opened_samples(run), opened_tasks(run, placement)
        stop = StopRequest(run.train.time_limit_s, placement.ends_at)
        after.callback(stop.restore)
        after.push(report)  # of files that are closed by then; a signal no longer changes how a run that is done ends
        now = facts(loaders[0], load_tokenizer(run.data.tokenizer).fingerprint if run.data.tokenizer else None)
        mine = identity(given, device_of(run, placement), run.data, read_of(loaders))
        looks = FirstSeconds(placement, run.train.timeout_s, log, given)
        mesh, main_folder = after.enter_context(joined_mesh(run, placement, mine, looks))
        run = replace(run, dir=main_folder)
        heartbeat = after.enter_context(heartbeat_of(run, mesh, placement, log))
        plan = make_plan(run, placement.world_size)
        watched = after.enter_context(reported(plan, mesh))
        state = watched.state = build(plan, mesh)
        counters, start = start_state(state, now, log)
        say_idle_rates(state, log)
        if lock is not None:
            begin(given, lock, log)
            placement.word.writes(folder)
        loop = loop_of(state, loaders, counters, start, now, log, stop, after)
        stop.reserve = lambda: SAVES_KEPT * loop.saves.slowest_s + STEPS_KEPT * (loop.reporter.last_s or 0.0)
        if samples is not None:
            loop.samples = samples(state.model, log)
        if tasks is not None:
            loop.tasks = tasks(state.model, log)
        hear(loop, callbacks)
        if lock is not None:
            note_start(folder, placement.world_size, mesh.device, command, data_table(run, *loaders), log)
        data = after.enter_context(background_check(loaders, placement, counters.step, log))
        watch(loop, heartbeat, failures, data, log)
        if lock is not None:
            loop.saves.saver.target = replace(loop.saves.saver.target, check=lock.check)
        loop.saves.prepare()
        placement.word.unsaved()
        with settled():
            yield loop
        finish_check(data, state)
        done = "done" if counters.step >= run.train.last_step else "left"
        log.info(f"{done} step={counters.step} folder={folder}")


def note_lock(lock: FolderLock, log: Log) -> None:
    """Log what a start should know of the lock of its folder."""
    if lock.warning:
        log.warn(lock.warning)
    if lock.took_over:
        log.info(f"the folder was left by {lock.took_over}, which was killed: this run takes over")


def heartbeat_of(run: Run, mesh: Mesh, placement: Placement, log: Log) -> Heartbeat:
    """What finds peers that are lost or hang, and warns of strangers at the store where the ranks met."""
    made = Heartbeat(placement.rank, placement.world_size, run.train.timeout_s, mesh.watch.last, mesh.at.pp, mesh.store)
    made.first_word = placement.word.failed
    made.unsigned = lambda count: log.warn(
        f"{count} messages to the store where the ranks met are not signed by this run, and are ignored: "
        "somebody else writes to it, so the ranks' network is not private"
    )
    if mesh.store is None and placement.world_size > 1 and placement.rank == 0:
        log.warn(
            f"{SECRET} is not set, so ranks say nothing to each other beside collectives: one that hangs is found "
            f"after train.timeout_s={run.train.timeout_s:g} alone, and is not named"
        )
    return made


def watch(loop: Loop, heartbeat: Heartbeat, failures: Failures, data: BackgroundCheck, log: Log) -> None:
    """Notify the watchers of a run of its steps, and the loop of what they find."""

    def began(step: int) -> None:
        heartbeat.at_step(step)
        failures.began(step)
        data.look()

    loop.began, loop.saves.saver.look = began, heartbeat.look
    heartbeat.stood_still = lambda seconds: log.warn(
        f"this process stood still for {seconds:.1f} s: it was stopped, or its machine was"
    )
    loop.reporter.stepped, loop.reporter.slow = heartbeat.stepped, lambda: heartbeat.slow


def opened_samples(run: Run) -> Callable[[Model, Log], TrainingSamples] | None:
    """What continues the prompts of train.samples; None without any. DataError for prompts that cannot be read or
    continued: before ranks meet."""
    if run.train.samples is None:
        return None
    from phalanx.training.samples import Prompts, TrainingSamples  # start-up time: it imports the engine of inference

    prompts = Prompts.read(run)
    return None if prompts is None else lambda model, log: TrainingSamples(model, prompts, log)


def opened_tasks(run: Run, placement: Placement) -> Callable[[Model, Log], ScoresTasks] | None:
    """What makes the scorer of train.eval_tasks; None without any. ConfigError and DataError for tasks and data that
    are not there: before ranks meet."""
    if not run.train.eval_tasks:
        return None
    from phalanx.training.tasks import TaskScorer, TrainingTasks  # of an optional package

    asked = TrainingTasks.read(run) if placement.rank == 0 else None
    return lambda model, log: TaskScorer(model, asked, log)


def hear(loop: Loop, callbacks: Sequence[Callback]) -> None:
    """Notify callbacks of steps, evaluations and checkpoints."""

    def heard(values: dict[str, Any]) -> None:
        for callback in callbacks:
            callback.on_step(values)

    loop.reporter.heard = heard
    loop.callbacks = loop.saves.callbacks = tuple(callbacks)


def keep_config(run: Run, path: Path, log: Log) -> None:
    """Write the resolved config. If the disk has no room, the run continues without it, provided that it would also
    continue without a checkpoint."""
    try:
        save_run(run, path)
    except OSError as error:
        said = f"{path} cannot be written ({error.strerror or error})"
        if run.checkpoint.on_error == "stop":
            raise CheckpointError(f"{said}: free some space, or choose another dir") from error
        log.warn(
            f"{said}: the run goes on (checkpoint.on_error=continue), and is to be continued with the config "
            "it was started with"
        )


def report_at_the_end(folder: Path, log: Log) -> None:
    """A finished run stays finished, whatever happens to its report."""
    from phalanx.observe.report import write_report  # jinja2 and ruamel: start-up time

    try:
        log.say(f"report {write_report(folder)}")
    except OSError as error:
        log.warn(f"report.html cannot be made: {error.filename or folder}: {error.strerror or error}")


def background_check(
    loaders: tuple[Loader, dict[str, Loader]], placement: Placement, step: int, log: Log
) -> BackgroundCheck:
    """The background check, on one rank of each machine, whose copy of the files may be its own. Machines and starts
    begin at different places."""
    loader, valid = loaders
    sources = (
        [source for each in (loader, *valid.values()) for source in each.sources] if placement.local_rank == 0 else []
    )
    first = (placement.rank + step) * GOLDEN % 1
    checked: list[CheckedFiles] = [corpus for source in sources for corpus in source.corpora]
    if loader.scores is not None and sources:
        checked.append(loader.scores)
    return BackgroundCheck(checked, first, log.warn)


def finish_check(data: BackgroundCheck, state: State) -> None:
    """Complete the background check. DataError on all ranks if any found damage."""
    limit_s = min(FINISH_S, state.plan.run.train.timeout_s / 2)  # the other ranks wait in a collective
    found = [problem for problem in agree(state.mesh.world, lambda: data.finish(limit_s)) if problem]
    if found:
        raise DataError("\n".join(dict.fromkeys(found)))


def begin(run: Run, lock: FolderLock, log: Log) -> None:
    """From here on the run writes to its folder."""
    lock.keep()
    log.open(Path(run.dir) / "log.txt")
    keep_config(run, Path(run.dir) / "config.yaml", log)
    keep(run)


def start_state(state: State, now: dict[str, Any], log: Log) -> tuple[Counters, Path | None]:
    """Set weights and state from the run's newest checkpoint, or checkpoint.load, or init_from, or initial values.

    Returns the counters and the checkpoint from which the run continues. A given path that does not exist is an error,
    never a fresh start. now: facts() of this run.
    """
    run = state.plan.run
    own = choose(state, lambda: newest_first(checkpoints_of(run)))
    if own and run.checkpoint.resume == "never":
        raise CheckpointError(
            f"{own[0]} exists and checkpoint.resume=never: choose another dir, or checkpoint.resume=auto to continue"
        )
    load = run.checkpoint.load
    sources = own or (choose(state, lambda: candidates(load)) if load else [])
    if sources:
        source, scalars = load_newest(state, sources, now, log)
        restore_base(state, source, log)
        if scalars.get("train.precision") != run.train.precision:
            before = state.scaler.scale.clone()
            state.scaler.reset()  # a loss scale belongs to its precision
            if state.model.fp8 is not None:
                state.model.fp8.rescale(state.scaler.scale / before)
        log.info(f"continue from {source}")
        return Counters(**{f.name: scalars[f.name] for f in fields(Counters) if f.name in scalars}), source
    start_anew(state, log)
    return Counters(), None


def head_wanted(model: ModelConfig) -> HeadWanted:
    """Which head a model that starts from a folder has."""
    return "none" if model.headless else "new" if model.classes else "the folder's"


def start_anew(state: State, log: Log) -> None:
    """Weights of init_from, or initial values; adapters of lora.init_from, or those saved with the weights, or new
    ones."""
    run, world = state.plan.run, state.mesh.world
    saved = False
    if run.init_from:
        loaded = load_weights(run.init_from, state.buffers, state.mesh, head_wanted(run.model))
        saved = loaded.adapters
        init_weights(state.model, lambda spec: not spec.exported and not (saved and spec.trained))
        if loaded.new:
            init_weights(state.model, lambda spec: any(piece.name in loaded.new for piece in spec.pieces))
            log.info(f"new, with random weights, because the folder has none: {', '.join(sorted(loaded.new))}")
        log.info(f"start from the weights{' and adapters' if saved else ''} of {run.init_from}")
    else:
        init_weights(state.model)
        if run.lora is not None:
            log.warn("the adapters' base has random weights, which stay as they are: init_from=FOLDER names a model's")
    if run.lora is None or saved:
        return
    if run.lora.init_from is not None:
        names, given = family_of(run.model).tensors, run.lora.init_from
        source = together(world, lambda: adapter_source(given, names, run.model.tied))
        load_adapters(source.placed, source.files, state.buffers, state.mesh)
        log.info(f"start from the adapters of {run.lora.init_from}")
    elif run.init_from:
        with reading(run.init_from, exported_shapes(run.model), run.model.headless) as read:
            agree(world, lambda: start_adapters(state.model, read))
    else:
        start_adapters(state.model, initial_tensors(run))


def say_idle_rates(state: State, log: Log) -> None:
    """Warn of learning rates of tensors by name that no rank has, as a misspelt one."""
    optimizers = [config for config in (state.plan.run.optim, state.plan.run.optim.fallback) if config is not None]
    if any(config.lr_scale for config in optimizers):
        idle = agree(state.mesh.world, lambda: state.optimizer.idle_globs)
        for key in sorted(set(idle[0]).intersection(*idle)):
            log.warn(f"{key} fits no tensor that is trained, and does nothing")


def restore_base(state: State, source: Path, log: Log) -> None:
    """Quantize the base of a run with lora.base again, which its checkpoints do not hold: from the folder that
    init_from names, now or when the run began, or, of a run without one, the same random values."""
    run, buffers, world = state.plan.run, state.buffers, state.mesh.world
    if not any(agree(world, lambda: bool(buffers.encoded))):
        return
    manifest = together(world, lambda: read_manifest(source))
    began = manifest.config.get("init_from")
    if began is None and run.init_from is not None:
        raise CheckpointError(
            f"the base of the adapters in {source} was drawn at random, which init_from={run.init_from} would replace: "
            "leave init_from out, or choose another dir for a run of its own"
        )
    folder = run.init_from or began
    if manifest.base is not None:  # compared with its checksums when the state was loaded
        folder = str(base_at(source, manifest.base, run.init_from).folder)
    if folder is None:
        init_weights(state.model, lambda spec: spec.base_format is not None)
    else:
        load_base(folder, buffers, state.mesh)
    log.info(f"base quantized to {run.lora.base if run.lora else ''} from {folder or 'its random values'}")


def choose(state: State, look: Callable[[], list[Path]]) -> list[Path]:
    """Checkpoints as rank 0 sees them."""
    return [
        place(p) for p in agree(state.mesh.world, lambda: [str(p) for p in look()] if state.mesh.rank == 0 else [])[0]
    ]


def load_newest(state: State, sources: list[Path], now: dict[str, Any], log: Log) -> tuple[Path, dict[str, Any]]:
    """Load the first of these checkpoints of which every byte is good; each damaged one is named. If none is good, the
    run does not start."""
    run, problems = state.plan.run, list[str]()
    if state.mesh.rank == 0:
        for warning in filter(None, (*map(open_to_all, (sources[0].parent, sources[0])), *misnamed(sources[0].parent))):
            log.once(warning)
    for path in sources:
        try:
            check_steps(run, together(state.mesh.world, lambda path=path: read_manifest(path)).step, path)  # type: ignore[misc]
            together(state.mesh.world, lambda path=path: check_resume(run, now, read_manifest(path), path, log))  # type: ignore[misc]
            moved = run.init_from if run.lora is not None else None
            scalars = load_state(path, state, run.model, numbers_of(state), moved)
            if state.model.fp8 is not None:
                state.model.fp8.loaded()
            return path, scalars
        except DamagedCheckpoint as error:
            if not run.checkpoint.fallback or len(sources) == 1:
                raise
            problems.append(str(error))
            if state.mesh.rank == 0:
                log.warn(f"{path} is damaged and not used: {error}")
    raise none_good(sources[0].parent, problems)


def loop_of(
    state: State,
    loaders: tuple[Loader, dict[str, Loader]],
    counters: Counters,
    start: Path | None,
    now: dict[str, Any],
    log: Log,
    stop: StopRequest,
    after: ExitStack,
) -> Loop:
    run, mesh, folder = state.plan.run, state.mesh, Path(state.plan.run.dir)
    loader, valid = loaders
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    device = find_device(name)
    peak = device.peak(run.train.precision) if device else None
    last_step = run.train.last_step
    speed = Speed(flops_of(run).per_token, mesh.grid.world, peak, run.train.seq_length, last_step, mesh.shared_bytes)
    sinks = None
    if mesh.rank == 0:
        for warning in state.model.agreed.warnings:
            log.warn(warning)
        for line in describe(state, total_samples(run)):
            log.info(line)
        log.info(choices(state))
        log.info(data_table(run, loader, valid))
        if run.data.chats:
            log_first(loader, run, counters.consumed_samples, log)
        for line in mfu_lines(run, mesh.grid.world, device, name):
            log.info(line)
        sinks = Sinks(run.log, SinkStart(folder, counters.step, to_dict(run), log))
        sinks.add(STEP_LINE, StepLines(log, run.log.interval, last_step, mesh.device.type == "cuda", mesh.grid.world))
        after.callback(sinks.close)
    reporter = Reporter(
        log, sinks, speed, counters, mesh.device, state.model.fp8.names if state.model.fp8 is not None else ()
    )
    one_text = run.data.chats and not run.model.reads_beside  # of several the padding is not one number
    reporter.filled = loader.filled if one_text else None
    reporter.remaining = lambda: (
        total_samples(run, counters.consumed_samples, counters.step) - counters.consumed_samples
    )
    saves = Saves(state, counters, start, now, log)

    def go_back(before: int, tries: int) -> dict[str, Any]:
        """Load an earlier checkpoint than step `before`, the `tries`-th newest; returns its scalars."""
        there = choose(
            state, lambda: [p for p in reversed(list_checkpoints(checkpoints_of(run))) if step_of(p) < before]
        )
        if not there:
            raise NumericalStop(f"there is no checkpoint before step {before} to roll back to")
        path, scalars = load_newest(state, there[min(tries, len(there)) - 1 :], now, log)
        newer = there[: there.index(path)]  # their steps are not on the path that continues from here
        agree(mesh.world, lambda: forget(newer) if mesh.rank == 0 else None)
        if mesh.rank == 0:
            log.warn(f"rolled back to {path}; the data up to step {before} is not used again")
        return scalars

    return Loop(state, loader, valid, reporter, counters, saves, stop.asked, go_back)


def log_first(loader: Loader, run: Run, consumed: int, log: Log) -> None:
    """Print the first chat of the steps to come, with what of it is trained."""
    tokenizer = None if run.data.tokenizer is None else load_tokenizer(run.data.tokenizer)
    first = next(documents_of(loader, consumed))
    for line in document_lines(first, tokenizer, FIRST_WIDTH, colour=False, most=FIRST_LINES):
        log.info(line)


def forget(paths: list[Path]) -> None:
    for path in paths:
        storage_for(path).retire(path)


def describe(state: State, samples: int) -> tuple[str, str]:
    """Lines for the log at the start of a run: the model and how long it trains, and its layout."""
    plan, run = state.plan, state.plan.run
    grid, numel = plan.grid, sum(f.numel for f in plan.facts)
    adapters = "" if run.lora is None else f" frozen, adapters={num_adapters(run)} trained,"
    model = (
        f"model {run.model.family} parameters={numel}{adapters} precision={run.train.precision} "
        f"device={state.mesh.device.type} steps={run.train.last_step} tokens={samples * run.train.seq_length}"
    )
    layout = (
        f"layout world={grid.world} dp={grid.dp} cp={grid.cp} tp={grid.tp} pp={grid.pp} sharding={run.layout.sharding} "
        f"schedule={plan.schedule_name} stages={[len(s) for s in plan.stages]}"
    )
    return model, layout
