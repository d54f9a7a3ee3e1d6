"""Runs that are killed, stopped, starved of disk or handed damaged checkpoints, and what must be left of them:
nothing lost.

tests/faults/matrix.py has which of them are made, and how often. Ranks are forked from this process, which has
everything imported: a run with its death takes a second. The oracle of a case is a run that nobody disturbed: every
loss and gradient norm as hex, the place in the data, and the bytes of the last checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import phalanx.engine.step as step
import phalanx.training.loop as loop
from phalanx.base.errors import PhalanxError
from phalanx.base.log import describe
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import latest, list_checkpoints
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.comm.axis import Axis
from phalanx.config.run import Run
from phalanx.data.loader import Prefetcher
from phalanx.layout.config import LayoutConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.sequence.batch import Batch
from phalanx.training.main import train
from tests.checkpoint.test_checkpoint import Failing, check_survived, prepare, tiny_run
from tests.harness.checkpoints import Lossy, make_state, save_here, set_state
from tests.harness.pool import free_port
from tests.training.test_loop import make_run, rows_of

DROPOUT = GPT2Config(
    vocab_size=67,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    dropout=0.1,
    attention_dropout=0.1,
)
SECRET = "0123456789abcdef" * 2  # of every run here
LIMIT_S = 120.0
Fault = Callable[
    [Run, int, random.Random, float], int
]  # (run, ranks, pick, seconds of the undisturbed run) -> how many were made


@dataclass
class Tally:
    """faults: how many were made; runs: how many were compared to the end; differing: how many values were not as
    undisturbed."""

    faults: int = 0
    runs: int = 0
    differing: int = 0

    def add(self, other: Tally) -> None:
        self.faults += other.faults
        self.runs += other.runs
        self.differing += other.differing


# ---- runs of forked ranks ------------------------------------------------------------------------


LAYOUTS: list[tuple[int, dict]] = [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"sharding": 0})]


def config_of(folder: Path, seed: int, layouts: list[tuple[int, dict]] = LAYOUTS) -> tuple[Run, int]:
    """(run, ranks): layouts, precisions and ways to save in turn."""
    pick = random.Random(seed)
    world, layout = pick.choice(layouts)
    precision = pick.choice(["fp32", "bf16"])
    run = make_run(folder, steps=10, precision=precision, timeout_s=10.0)
    run = replace(run, layout=LayoutConfig(**layout), model=pick.choice([run.model, DROPOUT]))
    return replace(
        run, checkpoint=CheckpointConfig(interval=pick.choice([1, 2, 3]), background=pick.random() < 0.7)
    ), world


def begin(
    run: Run, world: int, before: Callable[[], None] = lambda: None, victim: int | None = None, tcp: bool = False
) -> list[int]:
    """Process numbers of forked ranks that train; what they say goes to output-RANK.txt beside the run's folder.

    before: what each rank does first, or only rank `victim`. tcp: they meet at rank 0, as on several machines,
    rather than in a file
    """
    store = "file://" + tempfile.mktemp(prefix="store-", dir=Path(run.dir).parent)
    if tcp:
        store = f"tcp://localhost:{free_port()}"
    for said_before in Path(run.dir).parent.glob("output-*.txt"):
        said_before.unlink()
    first = [before if victim in (None, rank) else lambda: None for rank in range(world)]
    return [_fork(run, Placement(rank, rank, world, store, SECRET), first[rank]) for rank in range(world)]


def _fork(run: Run, placement: Placement, before: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    import torch

    torch.set_num_threads(1)
    out = open(Path(run.dir).parent / f"output-{placement.rank}.txt", "w", buffering=1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = out  # a test runner may have its own
    faulthandler.disable()  # pytest's, which would write of a rank that gloo aborts
    faulthandler.dump_traceback_later(LIMIT_S - 20, file=out)  # where a rank that does not end is
    code = 1
    try:
        before()
        train(run, placement)
        code = 0
    except PhalanxError as error:
        print(describe(error), flush=True)
        code = error.exit_code
    except BaseException as error:
        print(f"bug: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def in_step(number: int, late_s: float, deed: Callable[[], None]) -> None:
    """In a rank: done `late_s` after its step of this number (of this start) begins, and before the one after it
    begins, however slow the machine is."""
    rate, begun, doing = loop.learning_rate, list[int](), threading.Timer(late_s, deed)

    def learning_rate(optim: Any, now: int, steps: int) -> float:
        begun.append(now)
        if len(begun) == number:
            doing.start()
        elif len(begun) > number:
            doing.join()
        return rate(optim, now, steps)

    loop.learning_rate = learning_rate


def end(pids: list[int]) -> list[int]:
    """Exit codes (negative: the signal). A rank that does not end is a fault of ours."""
    codes, until = {}, time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"ranks did not end: {codes}")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def said(run: Run) -> str:
    return "\n".join(p.read_text(errors="replace") for p in sorted(Path(run.dir).parent.glob("output-*.txt")))


def finish(run: Run, world: int) -> None:
    codes = end(begin(run, world))
    assert codes == [0] * world, f"{codes}\n{said(run)}"


def left_behind(run: Run) -> dict[str, object]:
    """Everything that must be as undisturbed."""
    root = Path(run.dir) / "checkpoints"
    manifest = read_manifest(latest(root))
    found: dict[str, object] = {
        f"step {r['step']} {k}": r[k].hex() if isinstance(r[k], float) else r[k]
        for r in rows_of(run)
        for k in ("loss", "grad_norm", "consumed_samples", "skipped")
    }
    found |= {f"file {name}": receipt.xxh3 for name, receipt in manifest.files.items()}
    found |= {f"number {name}": value for name, value in {**manifest.optimizer, **manifest.scalars}.items()}
    found["damage"] = [p for path in list_checkpoints(root) for p in verify(path)]
    found["strays"] = [p.name for p in root.iterdir() if ".tmp-" in p.name]
    return found


def compare(run: Run, undisturbed: dict[str, object]) -> int:
    found = left_behind(run)
    differing = sorted(k for k in found.keys() | undisturbed.keys() if found.get(k) != undisturbed.get(k))
    for k in differing[:10]:
        print(f"differs: {k}: {undisturbed.get(k)} -> {found.get(k)}")
    return len(differing)


def disturbed(
    folder: Path,
    fault: Fault,
    seed: int,
    layouts: list[tuple[int, dict]] = LAYOUTS,
    change: Callable[[Run], Run] = lambda run: run,
) -> Tally:
    """A run that nobody disturbs, then one that `fault` disturbs (it returns how often), then the same command once
    more. change: what the run has beside what the seed draws."""
    whole, world = config_of(folder / "whole/run", seed, layouts)
    whole = change(whole)
    (folder / "whole").mkdir(parents=True)
    (folder / "other").mkdir()
    begun = time.monotonic()
    finish(whole, world)
    seconds = time.monotonic() - begun
    run = replace(whole, dir=str(folder / "other/run"))
    faults = fault(run, world, random.Random(seed), seconds)
    finish(run, world)
    return Tally(faults, 1, compare(run, left_behind(whole)))


# ---- cases ---------------------------------------------------------------------------------------


def kills(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """kill -9 of one rank, or of all at once, at any time; several times. The others end by themselves and say that
    a peer is lost."""
    made = 0
    for _ in range(8):
        pids = begin(run, world)
        moment = time.monotonic() + pick.uniform(0, 0.8 * seconds)
        while time.monotonic() < moment and (
            made or steps_of(run) < run.train.steps - 3
        ):  # what goes faster than expected is met near its end
            time.sleep(0.002)
        victims = pids if pick.random() < 0.3 else [pick.choice(pids)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        codes = end(pids)
        made += any(code == -signal.SIGKILL for code in codes)
        assert set(codes) <= {0, 6, -signal.SIGKILL}, f"{codes}\n{said(run)}"
    return made


def stops(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """SIGTERM or SIGUSR1 to one rank: all save the same step and end with 75, and no step is done again."""
    made = done = 0
    while done < run.train.steps - 3:
        signum, step, late_s, before = (
            pick.choice([signal.SIGTERM, signal.SIGUSR1]),
            1 + pick.randrange(2),
            pick.uniform(0, 0.03),
            done,
        )
        tell = partial(in_step, step, late_s, partial(signal_self, signum))
        codes = end(begin(run, world, tell, pick.randrange(world)))
        done = len(rows_of(run))
        assert codes == [75] * world and before < done == read_manifest(latest(Path(run.dir) / "checkpoints")).step, (
            f"{codes}\n{said(run)}"
        )
        made += 1
    return made


def signal_self(signum: int) -> None:
    os.kill(os.getpid(), signum)


def steps_of(run: Run) -> int:
    """Steps that a running run has written down."""
    path = Path(run.dir) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


HANG_S, HANG_STEP = 10.0, 2  # train.timeout_s of ranks that hang, and in which step of a start one does
SEVERAL: list[tuple[int, dict]] = [
    (2, {}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (4, {"sharding": 0}),
    (4, {"tp": 2, "pp": 2}),
]


def hangs(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """One rank stops for good (SIGSTOP), stands still in Python, loses its connections or dies: the others end with
    6 in time and name it."""
    return hang(run, world, pick, pick.sample([stopped, stuck, cut_off, killed], 4))


def two_hangs(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    return hang(run, world, pick, [stopped, stuck])


def hang(run: Run, world: int, pick: random.Random, hows: list[Callable[[Run, int, int, float], list[int]]]) -> int:
    made = 0
    for how in hows:
        written = (Path(run.dir) / "metrics.jsonl").exists()  # not before the first line
        if made and written and len(rows_of(run)) > run.train.steps - 4:
            break  # a fast machine has done most of it before the others noticed
        victim = pick.randrange(world)
        codes = how(replace(run, train=replace(run.train, timeout_s=HANG_S)), world, victim, pick.uniform(0, 0.03))
        others = [code for rank, code in enumerate(codes) if rank != victim]
        assert set(others) == {6}, f"{how.__name__} {victim}: {codes}\n{said(run)}"
        names = [f"rank {victim} (host {socket.gethostname()}, process ", f"nothing was heard of ranks {victim} "]
        names += ["rank 0, which keeps the ranks' store, does not answer"] if victim == 0 else []
        assert how is cut_off or any(f"peer lost: {name}" in said(run) for name in names), (
            f"{how.__name__} {victim}\n{said(run)}"
        )
        assert how is not stuck or "training/loop.py" in said(run), said(run)
        made += 1
    return made


def skips(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """One rank leaves out one collective in the middle of the run: all end with 6, and the one is named with what it
    called instead. Texts that the hosts exchange are all gathered by the same two calls, so that where one of those is
    left out nobody can say by whom: then all ranks are named with their places. Gloo aborts a process that was sent
    more than it asked for, with words of its own (NCCL does not)."""
    left_out = Path(run.dir) / "left_out"
    victim, step, number = pick.randrange(world), pick.randrange(3, run.train.steps - 1), pick.randrange(200)

    def before() -> None:
        train_step, local, seen = loop.train_step, Axis._local, list[int]()

        def step_of(*arguments: Any) -> Any:
            seen.append(0)
            return train_step(*arguments)

        def leave_out(axis: Axis, op: str, x: Tensor) -> bool:
            if axis.size > 1 and op != "send" and len(seen) >= step:
                seen[-1] += 1
                if sum(seen[step - 1 :]) == 1 + number % max(1, seen[step - 2]):  # as many calls as the step before had
                    left_out.write_text(axis.name)
                    return True
            return local(axis, op, x)

        loop.train_step, Axis._local = step_of, leave_out  # type: ignore[assignment, method-assign]

    codes = end(begin(replace(run, train=replace(run.train, timeout_s=HANG_S)), world, before, victim, tcp=True))
    by_gloo = -signal.SIGABRT in codes and "Is there a distributed collective mismatch in your code?" in said(run)
    assert set(codes) <= {6, -signal.SIGABRT} and (by_gloo or -signal.SIGABRT not in codes), (
        f"{victim}: {codes}\n{said(run)}"
    )
    named = rf"peer lost: rank {victim} \(host \S+, process \d+\) went another way than the others: rank \d called"
    texts = left_out.exists() and left_out.read_text() == "host"
    everyone = texts and all(re.search(rf"different things: .*rank {rank} \(", said(run)) for rank in range(world))
    assert by_gloo or everyone or re.search(named, said(run)), f"rank {victim} left out call {number}\n{said(run)}"
    return 1


def slow(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """One rank takes longer for each step: it is named, with where it is, and no other; the numbers are the same."""
    victim = pick.randrange(world)

    def before() -> None:
        execute = step.execute

        def late(*arguments: Any) -> None:
            time.sleep(0.7)  # the fault
            execute(*arguments)

        step.execute = late

    codes = end(begin(run, world, before, victim, tcp=True))
    text, works = said(run), r"works \d+ ms of a step of \d+ ms, the others \d+ ms: they wait for it, mostly at \w+/"
    assert codes == [0] * world, f"{codes}\n{text}"
    assert re.search(rf"warning: rank {victim} \(host \S+, process \d+\) is slow: it {works}", text), text
    assert set(re.findall(r"rank (\d+) \(.* is slow", text)) == {str(victim)}, text
    assert f" slow={victim}x" in text and any(str(victim) in row.get("slow", {}) for row in rows_of(run)), text
    return 1


def stopped(run: Run, world: int, victim: int, late_s: float) -> list[int]:
    """Exit codes."""
    return outlived(
        begin(run, world, partial(in_step, HANG_STEP, late_s, partial(signal_self, signal.SIGSTOP)), victim, tcp=True),
        victim,
    )


def stuck(run: Run, world: int, victim: int, late_s: float) -> list[int]:
    """Its main thread waits for nothing between two steps, while its others go on."""

    def before() -> None:
        go_on, doomed = Prefetcher.__next__, threading.Event()

        def block(batches: Prefetcher) -> Batch:
            if doomed.is_set():
                threading.Event().wait()
            return go_on(batches)

        in_step(HANG_STEP, late_s, doomed.set)
        Prefetcher.__next__ = block  # type: ignore[method-assign]

    return outlived(begin(run, world, before, victim, tcp=True), victim)


def cut_off(run: Run, world: int, victim: int, late_s: float) -> list[int]:
    """Its connections are closed under it, as a failing network does."""

    def cut() -> None:
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as ours:
                if ours.family in (socket.AF_INET, socket.AF_INET6) and ours.getpeername():  # a listener has no peer
                    ours.shutdown(socket.SHUT_RDWR)

    return end(begin(run, world, partial(in_step, HANG_STEP, late_s, cut), victim, tcp=True))


def killed(run: Run, world: int, victim: int, late_s: float) -> list[int]:
    return outlived(
        begin(run, world, partial(in_step, HANG_STEP, late_s, partial(signal_self, signal.SIGKILL)), victim, tcp=True),
        victim,
    )


def outlived(pids: list[int], victim: int) -> list[int]:
    """Wait for the others, then end the victim."""
    others = end([pid for pid in pids if pid != pids[victim]])
    os.kill(pids[victim], signal.SIGKILL)
    return [*others[:victim], *end([pids[victim]]), *others[victim:]]


def until_step(run: Run, step: int) -> None:
    wait_for(lambda: steps_said(run) > step)


def steps_said(run: Run) -> int:
    """Steps that the ranks running now have done."""
    path = Path(run.dir).parent / "output-0.txt"
    return path.read_text(errors="replace").count("\nstep=") if path.exists() else 0


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.002)


def full_disk(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """No file may grow past some kilobytes: the run ends with 4 and names the file, or warns and trains on (then its
    last save ends it)."""
    policy = pick.choice(["stop", "continue"])
    limit = pick.choice([12_000, 20_000, 30_000])
    limited = replace(run, checkpoint=replace(run.checkpoint, on_error=policy))
    codes = end(begin(limited, world, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))))
    assert 4 in codes and set(codes) <= {4, 6}, f"{codes}\n{said(run)}"
    assert "could not write" in said(run) and "File too large" in said(run), said(run)
    assert policy == "stop" or len(rows_of(run)) == run.train.steps, "it trained to the end"
    return 1


DAMAGE = ("flip", "cut to nothing", "cut to a byte", "cut in half", "cut by a byte", "remove", "swap", "mix two steps")


def damage(run: Run, world: int, pick: random.Random, seconds: float) -> int:
    """The newest checkpoint of a finished run damaged in one file, in one of eight ways: the next one is used, and
    the file is named."""
    finish(run, world)
    root = Path(run.dir) / "checkpoints"
    newest, older = list_checkpoints(root)[-1], list_checkpoints(root)[-2]
    files = sorted(p for p in newest.rglob("*") if p.is_file())
    file, how = pick.choice(files), pick.choice(DAMAGE)
    data = file.read_bytes()
    if how == "flip":
        bit = pick.randrange(8 * len(data))
        file.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
    elif how == "remove":
        file.unlink()
    elif how == "swap" and len(list((newest / "state").glob("rank-*"))) > 1:
        one, two = sorted((newest / "state").glob("rank-*"))[:2]
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b)
        two.write_bytes(a)
    elif how in ("mix two steps", "swap"):
        shutil.copy(older / "state/rank-00000.safetensors", newest / "state/rank-00000.safetensors")
    else:
        file.write_bytes(
            data[: {"cut to nothing": 0, "cut to a byte": 1, "cut in half": len(data) // 2}.get(how, len(data) - 1)]
        )
    assert verify(newest) != [], (how, file)
    finish(run, world)
    assert f"{newest} is damaged and not used" in said(run) and f"continue from {older}" in said(run), said(run)
    return 1


def sweep(folder: Path, how: str, first: int = 1, every: int = 1, several: bool = False) -> Tally:
    """A save that goes wrong at its storage operation k, for k = first, first + every...: `raise` the operation
    fails, `exit` the process is gone in the middle of it, `lose` the machine is gone: what was not synced is lost,
    all of it or a random part.
    several: files of the state, which threads write at the same time."""
    files = {"max_file_bytes": 2000, "threads": 4} if several else {"threads": 1}
    state, root, tally = make_state(tiny_run()), folder / "checkpoints", Tally()
    set_state(state)
    counting = Failing(0)
    prepare(state, root)
    save_here(state, root, 30, storage=counting, **files)
    for k in range(first, counting.count + 1, every):
        prepare(state, root)
        disk = Lossy(k, seed=k) if how == "lose" else Failing(k, how)
        child = os.fork() if how == "exit" else 0
        if child == 0:
            try:
                save_here(state, root, 30, storage=disk, **files)
            except PhalanxError:
                pass
            if how == "exit":
                os._exit(0)
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
        if how == "lose":
            disk.crash(root, undo_renames=k % 2 == 0)
            good = [p for p in list_checkpoints(root) if verify(p) == []]
            assert good and good[-1].name >= "step-00000020" and latest(root) == good[-1], k
        else:
            check_survived(state, root, k)
        tally.add(Tally(1, 1, 0))
    return tally
