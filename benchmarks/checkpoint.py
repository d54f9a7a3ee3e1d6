"""What checkpoints cost on this machine, beside the raw disk in the same run, and how long a run takes to go on from
one.

    torchrun --nproc-per-node 4 benchmarks/checkpoint.py measure CONFIG --folder FOLDER --out OUT.json [--seconds 150] \
[a.b=c ...]
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py resume CONFIG --folder FOLDER --out OUT.json [--cold] \
[layout.tp=2 ...]

Without torchrun: one rank. `measure` leaves what it saved in FOLDER; `resume` goes on from the newest, in any
layout. Each adds a record to OUT.json and writes it anew as soon as a figure is known: a time limit loses nothing
that was measured. `measure` begins with the raw speed of FOLDER; if a save at that speed does not fit into --seconds
it stops there and names a number of layers that would. Loading comes after the first save with steps beside it, and
further saves after that, each only if there is time (`resume` loads too).

Every time is the slowest rank's. stall: what the steps beside a save take longer than as many without, from its
beginning to its end; of that, stall_first: in the first of them, where the step waits for the copy. Files are dropped
from the page cache before they are read, where the system lets one (a tmpfs is memory whatever one does); `resume`
reads them as they are unless --cold, and counts from the start of the rank's process. The raw speed that shares are of
is that of as many threads as a save has, each with a file of its own; that of one thread a rank stands beside it. Each
checkpoint is removed before the next is saved, so that in a tmpfs only the first pays for memory that nobody has used.
Room in FOLDER: one checkpoint and twice RAW_BYTES for each rank; in memory: another for the copies.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from phalanx.base.placement import Placement
from phalanx.bench.step import LR, batches_of, joined, long_enough, wait
from phalanx.checkpoint.keep import Keep, latest, list_checkpoints
from phalanx.checkpoint.load import check_weights, load_state
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.save import Snapshot, Target
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.storage import Storage
from phalanx.checkpoint.threads import threads_of_rank
from phalanx.comm.host import host_axis
from phalanx.config.read import load_run
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.engine.build import State
from phalanx.engine.step import train_step
from phalanx.forecast.text import num_parameters
from phalanx.launch.env import read_placement

RAW_BYTES = 2 << 30  # most that a rank writes and reads raw in one thread (twice as much in several),
RAW_SECONDS = 4.0  # and for how long, unless syncing what was written takes longer
BLOCK = 64 << 20
WARMUP, PLAIN = 2, 4  # steps before, and steps that the others are compared with
MOST_BESIDE, MOST_SAVES = 12, 5  # steps beside a save, and saves that steps go on beside


def started() -> float:
    """time.time() at which this process began, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def over_ranks(state: State, value: float, op: Literal["max", "sum"]) -> float:
    own = torch.tensor([value], dtype=torch.float64, device=state.mesh.device)
    return float(state.mesh.world.all_reduce(own, op).wait().item())


def timed(state: State, work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, from when all are there to when its device is done."""
    state.mesh.world.barrier()
    wait(state)
    began = time.perf_counter()
    work()
    wait(state)
    return over_ranks(state, time.perf_counter() - began, "max")


def drop_from_cache(where: Path) -> None:
    for path in [where] if where.is_file() else (p for p in where.rglob("*") if p.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def raw(state: State, folder: Path, size: int, threads: int) -> dict[str, float]:
    """Bytes per second of all ranks together, each thread of a rank with a file of its own: written and synced, then
    read again. cold: written from as much memory as is written, which no cache holds, as in a save; otherwise one block
    again and again."""
    paths, block = (
        [folder / f"raw-{state.mesh.rank}-{n}" for n in range(threads)],
        os.urandom(min(BLOCK, size // threads)),
    )
    memory = memoryview(torch.frombuffer(bytearray(block), dtype=torch.uint8).repeat(-(-size // len(block))).numpy())

    def write(number: int, cold: bool) -> int:
        part, written, end = size // threads, 0, time.perf_counter() + RAW_SECONDS
        file = os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        while written < part and time.perf_counter() < end:
            at = number * part + written
            written += os.write(file, memory[at : at + min(len(block), part - written)] if cold else block)
        os.fsync(file)
        os.close(file)
        return written

    def read(path: Path) -> None:
        into = bytearray(len(block))
        with path.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass

    with ThreadPoolExecutor(threads) as pool:

        def all_written(cold: bool) -> tuple[float, float]:
            """Bytes, and seconds."""
            written = list[int]()
            seconds = timed(state, lambda: written.extend(pool.map(write, range(threads), [cold] * threads)))
            return over_ranks(state, sum(written), "sum"), seconds

        cold, cold_s = all_written(cold=True)
        total, seconds = all_written(cold=False)
        for path in paths:
            drop_from_cache(path)
        found = {
            "raw_bytes": total,
            "raw_write": total / seconds,
            "raw_write_cold": cold / cold_s,
            "raw_read": total / timed(state, lambda: list(pool.map(read, paths))),
        }
    for path in paths:
        path.unlink()
    return found


def file_system(folder: Path) -> str:
    """Its kind, as `mount` calls it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max(
        ((where, kind) for where, kind in mounts if folder.resolve().is_relative_to(where)), key=lambda m: len(m[0])
    )[1]


class Record:
    """What was found so far, in the file on rank 0 as soon as it is known."""

    def __init__(self, rank: int, out: Path | None, known: dict[str, Any]):
        self.found, self._out = known, out if rank == 0 else None
        self._before = json.loads(out.read_text()) if self._out and self._out.is_file() else []

    def add(self, **more: Any) -> None:
        self.found.update(more)
        if self._out:
            fresh = self._out.with_suffix(".new")
            fresh.write_text(json.dumps([*self._before, self.found], indent=1), encoding="utf-8")
            fresh.replace(self._out)


class Measured:
    """Steps and saves of one rank."""

    def __init__(self, run: Run, state: State, root: Path, next_batches: Callable[[], Any]):
        self.run, self.state, self.root, self.next_batches, self.saved = run, state, root, next_batches, 0
        self.parts = {"copy_s": math.nan, "write_s": math.nan, "read_back_s": math.nan}
        axis = host_axis(state.mesh.world, 600.0, 3600.0)
        target = Target(root, Storage(), Keep(MOST_SAVES + 1))
        self.saver = Saver(state, target, axis, background=True)
        state.before_update = self.saver.release

    def step(self) -> None:
        train_step(self.state, self.next_batches(), LR)

    def make_room(self) -> None:
        """Earlier checkpoints go, when all ranks have read what they want of them."""
        self.state.mesh.world.barrier()
        for path in list_checkpoints(self.root) if self.state.mesh.rank == 0 else ():
            Storage().retire(path)
        self.state.mesh.world.barrier()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.saved, 0, self.run.model, to_dict(self.run))

    def prepare(self) -> None:
        """As a run does before its first step."""
        self.saver.prepare(self.snapshot())

    def start(self) -> None:
        """Begin a save."""
        self.saved += 1
        self.began = time.perf_counter()
        self.saver.start(self.snapshot())
        self.host_s = time.perf_counter() - self.began

    def wait(self) -> float:
        """Seconds from the beginning of the save to its end; `parts`: until all is in host memory, of writing and
        syncing it, and of reading it back."""
        outcome = self.saver.wait()
        took = time.perf_counter() - self.began
        if outcome is not None:
            saved = outcome.saved
            own = {"copy_s": saved.copy_s, "write_s": saved.write_s, "read_back_s": saved.read_s}
            self.parts = {name: over_ranks(self.state, seconds, "max") for name, seconds in own.items()}
        return over_ranks(self.state, took, "max")


def measure(run: Run, placement: Placement, root: Path, record: Record, ends: float) -> None:
    with joined(run, placement) as state, batches_of(run, state) as next_batches:
        m, expected = Measured(run, state, root, next_batches), run_bytes(state)
        threads, share = threads_of_rank(state.mesh.world), min(RAW_BYTES, expected // state.mesh.world.size)
        record.add(threads=threads, **{f"{name}_one": rate for name, rate in raw(state, root, share, 1).items()})
        disk = raw(state, root, min(2 * share, expected // state.mesh.world.size), threads)
        record.add(expected_bytes=expected, file_system=file_system(root), **disk)
        check_time(run, expected, expected / disk["raw_write"], left(state, ends))
        m.prepare()
        for _ in range(WARMUP):
            m.step()
        plain = [timed(state, m.step) for _ in range(PLAIN)]
        record.add(step_s=median(plain), steps_s=plain)
        m.make_room()
        first = timed(state, lambda: (m.start(), m.saver.release()))
        took = m.wait()
        size = sum(r.size for r in read_manifest(newest(root)).files.values())
        record.add(
            bytes=size,
            background=m.saver.background,
            why_not=m.saver.why_not,
            first_start_s=first,
            first_save_s=took,
            first_write_s=m.parts["write_s"],
        )
        m.make_room()
        m.start()
        m.saver.release()
        took = m.wait()
        record.add(
            alone_s=took,
            alone_over_raw=size / took / disk["raw_write"],
            **m.parts,
            write_over_raw=size / m.parts["write_s"] / disk["raw_write"],
            write_over_cold=size / m.parts["write_s"] / disk["raw_write_cold"],
        )
        took = beside(m, record, took)
        if left(state, ends) > 1.2 * size / disk["raw_read"]:
            reading(state, root, record)
        while len(record.found["saves"]) < MOST_SAVES and left(state, ends) > 1.2 * took:
            took = beside(m, record, took)


def run_bytes(state: State) -> int:
    """Of the whole model: weights, masters and two moments."""
    numel = num_parameters(state.plan)
    return numel * (
        next(f.weight.dtype for f in state.buffers.flat).itemsize + 3 * state.buffers.flat[0].master.element_size()
    )


def left(state: State, ends: float) -> float:
    """Seconds, of the rank with fewest."""
    return -over_ranks(state, time.time() - ends, "max")


def check_time(run: Run, size: int, seconds: float, left: float) -> None:
    if 1.5 * seconds > left:
        layers = max(1, int(run.model.num_hidden_layers * left / (1.5 * seconds)))
        raise SystemExit(
            f"a save of {size / 1e9:.1f} GB takes {seconds:.0f} s at the speed of this folder, {left:.0f} s are left: "
            f"more --seconds, or model.num_hidden_layers={layers}"
        )


def beside(m: Measured, record: Record, expected: float) -> float:
    """A save while training goes on: what it costs the steps. Seconds that all of it took."""
    began, found, plain = time.time(), record.found, record.found["step_s"]
    m.make_room()
    count = min(MOST_BESIDE, max(2, math.ceil(expected / plain)))
    steps = [timed(m.state, lambda: (m.start(), m.step())), *(timed(m.state, m.step) for _ in range(count - 1))]
    stall = {
        "stall_first_s": steps[0] - plain,
        "stall_s": sum(steps) - count * plain,
        "host_s": over_ranks(m.state, m.host_s, "max"),
    }
    if "saves" not in found:
        record.add(**stall, steps_beside_s=steps)  # while the rest is being written
    took = m.wait()
    saves = [*found.get("saves", []), {**stall, "steps_s": steps, "save_s": took, **m.parts}]
    middle = {name: median(s[name] for s in saves) for name in (*stall, "save_s")}
    record.add(
        saves=saves,
        **middle,
        stall_of_100_steps=middle["stall_s"] / (100 * plain),
        save_over_raw=found["bytes"] / middle["save_s"] / found["raw_write"],
    )
    return over_ranks(m.state, time.time() - began, "max")


def reading(state: State, root: Path, record: Record) -> None:
    """Load the checkpoint where it was saved, and compare the checksums of its weights, each rank those of its share
    of the files."""
    path, size = newest(root), record.found["bytes"]
    drop_from_cache(path)
    seconds = timed(state, lambda: load(state, path))
    record.add(load_s=seconds, load_over_raw=size / seconds / record.found["raw_read"])
    manifest, mesh = read_manifest(path), state.mesh
    mine = sum(r.size for r in list(manifest.receipts("weights").values())[mesh.rank :: mesh.world.size])
    threads = threads_of_rank(mesh.world)
    seconds = timed(state, lambda: check_weights(path, manifest, mesh.rank, mesh.world.size, threads))
    record.add(verify_rate=over_ranks(state, mine, "max") / seconds)


def newest(root: Path) -> Path:
    path = latest(root)
    if path is None:
        raise SystemExit(f"{root} holds no checkpoint: run `measure` first")
    return path


def load(state: State, path: Path) -> None:
    load_state(path, state, state.plan.run.model)


def resume(run: Run, placement: Placement, root: Path, record: Record, cold: bool) -> None:
    """Seconds from the start of the process to the end of the first step."""
    path, marks = newest(root), {"imports": time.time()}
    if cold and placement.rank == 0:
        drop_from_cache(path)
    with joined(run, placement, weights=False) as state, batches_of(run, state) as next_batches:

        def mark(name: str) -> None:
            wait(state)
            marks[name] = time.time()
            record.add(seconds_since_start={n: over_ranks(state, at - started(), "max") for n, at in marks.items()})

        mark("meet and build")
        load(state, path)
        mark("load")
        train_step(state, next_batches(), LR)
        mark("first step")
        record.add(resume_s=record.found["seconds_since_start"]["first step"])


def lines(found: dict[str, Any]) -> list[str]:
    if found["what"] == "resume":
        marks = ", ".join(f"{name} {s:.2f}" for name, s in found["seconds_since_start"].items())
        return [f"first step {found['resume_s']:.2f} s after the start: {marks}"]
    gb = {
        name: found.get(name, 0) / 1e9
        for name in ("bytes", "raw_write", "raw_write_cold", "raw_read", "raw_write_one", "raw_read_one", "verify_rate")
    }
    done = [name for name in ("write", "alone", "save", "load") if f"{name}_s" in found]
    rate = {f"{name}_s": f"{gb['bytes'] / found[f'{name}_s']:.2f} GB/s in {found[f'{name}_s']:.2f} s" for name in done}
    share = {name: f"{100 * found[f'{name}_over_raw']:.0f} % of raw" for name in done}
    return [
        f"checkpoint {gb['bytes']:.3f} GB on {found['file_system']}: raw write {gb['raw_write']:.2f} GB/s, raw "
        f"read {gb['raw_read']:.2f} with "
        f"{found['threads']} threads a rank ({gb['raw_write_one']:.2f} and {gb['raw_read_one']:.2f} with one); "
        f"step {1e3 * found['step_s']:.1f} ms",
        f"stall {1e3 * found['stall_s']:.1f} ms a save, {1e3 * found['stall_first_s']:.1f} of it in the first step, "
        f"{100 * found['stall_of_100_steps']:.3f} % of 100 steps (host {1e3 * found['host_s']:.1f} ms, copied after "
        f"{1e3 * found['saves'][-1]['copy_s']:.0f}; {len(found['saves'])} saves)",
        f"first save: {found['first_start_s']:.2f} s until its memory is there, {found['first_write_s']:.2f} s of "
        f"writing; the second, without steps beside: written and synced {rate['write_s']}, "
        f"{share['write']} and {100 * found['write_over_cold']:.0f} % of raw from memory that no cache holds "
        f"({gb['raw_write_cold']:.2f} GB/s); read back in {found['read_back_s']:.2f} s; all of it {rate['alone_s']}"
        + (f"; not in the background: {found['why_not']}" if found["why_not"] else ""),
        f"save beside steps: {rate['save_s']}, {share['save']}; written in {found['saves'][-1]['write_s']:.2f} s",
        f"load: {rate['load_s']}, {share['load']}; verify {gb['verify_rate']:.2f} GB/s a rank"
        if "load" in done
        else "load: no time was left",
    ]


@contextmanager
def profiled(out: Path | None) -> Iterator[None]:
    """The calls that take longest, with all they call and by themselves, as text."""
    with cProfile.Profile() if out else nullcontext() as calls:
        yield
    if out and calls:
        with out.open("w", encoding="utf-8") as file:
            for order in ("cumulative", "tottime"):
                pstats.Stats(calls, stream=file).sort_stats(order).print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "resume"))
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument(
        "--profile",
        type=Path,
        help="write where the main thread of rank 0 spends its time (after the imports) to this file",
    )
    options = parser.parse_args()
    placement = read_placement(os.environ)[0] or Placement()
    run = long_enough(load_run(options.config, ["data.mock=true", *options.overrides]), 1000)
    options.folder.mkdir(parents=True, exist_ok=True)
    known = {
        "what": options.what,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "ranks": placement.world_size,
        "config": options.config,
        "overrides": options.overrides,
        "layout": to_dict(run)["layout"],
    }
    record = Record(placement.rank, options.out, known)
    with profiled(options.profile if placement.rank == 0 else None):
        if options.what == "measure":
            measure(run, placement, options.folder, record, started() + options.seconds)
        else:
            record.add(cold=options.cold)
            resume(run, placement, options.folder, record, options.cold)
    if placement.rank == 0:
        print("\n".join(lines(record.found)), flush=True)


if __name__ == "__main__":
    main()
