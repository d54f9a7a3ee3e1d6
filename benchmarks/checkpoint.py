"""What checkpoints cost on this machine, beside the raw disk in the same run, and how long a run takes to go on from one.

torchrun --nproc-per-node 2 benchmarks/checkpoint.py measure CONFIG --folder FOLDER --out OUT.json [a.b=c ...]
torchrun --nproc-per-node 2 benchmarks/checkpoint.py resume CONFIG --folder FOLDER --out OUT.json [layout.tp=2 ...]

Without torchrun: one rank. `measure` leaves one checkpoint in FOLDER, from which `resume` goes on, in any layout; each appends its numbers to
OUT.json and prints them. The stall is the time that as many steps take longer with a save than without; every time is the slowest rank's.
Files are dropped from the page cache before they are read, where the system lets one (a tmpfs is memory whatever one does); `resume` reads
them as they are unless --cold. Room: one checkpoint, and RAW_BYTES for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.base.placement import Placement
from phalanx.bench.step import LR, batches_of, joined, long_enough, wait
from phalanx.checkpoint.keep import Keep, latest
from phalanx.checkpoint.load import load_state
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.checkpoint.save import Snapshot, Target
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.storage import Storage
from phalanx.comm.host import host_axis
from phalanx.launch.env import read_placement
from phalanx.train.build import State
from phalanx.train.config import Run
from phalanx.train.load import load_run, to_dict
from phalanx.train.step import train_step

RAW_BYTES = 4 << 30  # most that a rank writes and reads raw
BLOCK = 64 << 20
WARMUP = 3


def started() -> float:
    """time.time() at which this process began, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def slowest(state: State, seconds: float) -> float:
    own = torch.tensor([seconds], dtype=torch.float64, device=state.mesh.device)
    return float(state.mesh.world.all_reduce(own, "max").wait().item())


def timed(state: State, work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, from when all are there to when its device is done."""
    state.mesh.world.barrier()
    wait(state)
    began = time.perf_counter()
    work()
    wait(state)
    return slowest(state, time.perf_counter() - began)


def drop_from_cache(folder: Path) -> None:
    for path in (p for p in folder.rglob("*") if p.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def raw(state: State, folder: Path, size: int) -> dict[str, float]:
    """Bytes per second of all ranks together, each with a file of its own: written and synced, then read again."""
    path, block = folder / f"raw-{state.mesh.rank}", os.urandom(min(BLOCK, size))
    count = max(1, size // len(block))

    def write() -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(count):
            left = memoryview(block)
            while left:
                left = left[os.write(file, left) :]
        os.fsync(file)
        os.close(file)

    def read() -> None:
        into = bytearray(len(block))
        with path.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass

    total = count * len(block) * state.mesh.world.size
    found = {"write": total / timed(state, write)}
    drop_from_cache(folder)
    found["read"] = total / timed(state, read)
    path.unlink()
    return found


class Measured:
    """Steps and saves of one rank."""

    def __init__(self, run: Run, state: State, root: Path, next_batches: Callable[[], Any]):
        self.run, self.state, self.root, self.next_batches, self.saved = run, state, root, next_batches, 0
        axis = host_axis(state.mesh.world, 600.0, 3600.0)
        target = Target(root, Storage(), Keep(1))
        self.saver = Saver(state.buffers, state.optimizer, state.scaler, state.mesh, target, axis, background=True)
        state.before_update = self.saver.release

    def steps(self, count: int) -> None:
        for _ in range(count):
            train_step(self.state, self.next_batches(), LR)

    def start(self) -> None:
        """Begin a save; the checkpoint before it goes first, to save room."""
        before, self.saved = latest(self.root), self.saved + 1
        if self.state.mesh.rank == 0 and before is not None:
            Storage().retire(before)
        self.state.mesh.world.barrier()
        self.began = time.perf_counter()
        self.saver.start(Snapshot(self.saved, 0, self.run.model, to_dict(self.run)))
        self.host_s = time.perf_counter() - self.began

    def wait(self) -> float:
        self.saver.wait()
        return slowest(self.state, time.perf_counter() - self.began)


def measure(run: Run, placement: Placement, root: Path, repeats: int) -> dict[str, Any]:
    with joined(run, placement) as state, batches_of(run, state) as next_batches:
        m = Measured(run, state, root, next_batches)
        m.steps(WARMUP)
        step = timed(state, lambda: m.steps(WARMUP)) / WARMUP
        first = timed(state, m.start)
        took = m.wait()
        count = max(3, min(100, round(1.5 * took / step)))  # so that the writing ends before the steps do
        plain, stalls, hosts = timed(state, lambda: m.steps(count)), [], []
        for _ in range(repeats):
            stalls.append(timed(state, lambda: (m.start(), m.steps(count))) - plain)
            hosts.append(slowest(state, m.host_s))
            m.wait()
        m.start()
        saving = m.wait()
        path = newest(root)
        size = sum(r.size for r in read_manifest(path).files.values())
        drop_from_cache(path)
        loading = timed(state, lambda: load(state, path))
        checking = timed(state, lambda: check(path) if placement.rank == 0 else None)
        disk = raw(state, root, min(RAW_BYTES, size // state.mesh.world.size))
        step = plain / count
        return {
            "bytes": size, "step_s": step, "steps_with_a_save": count, "stall_s": median(stalls), "stalls_s": stalls,
            "stall_of_100_steps": median(stalls) / (100 * step), "host_s": median(hosts), "first_save_s": first, "background_save_s": took,
            "save_s": saving, "load_s": loading, "verify_s": checking, "raw_write": disk["write"], "raw_read": disk["read"],
            "save_over_raw": size / saving / disk["write"], "load_over_raw": size / loading / disk["read"], "verify_rate": size / checking,
        }  # fmt: skip


def newest(root: Path) -> Path:
    path = latest(root)
    if path is None:
        raise SystemExit(f"{root} holds no checkpoint: run `measure` first")
    return path


def load(state: State, path: Path) -> None:
    load_state(path, state.buffers, state.optimizer, state.scaler, state.mesh, state.plan.run.model)


def check(path: Path) -> None:
    """Every byte, on one core, as `phalanx checkpoint verify` does."""
    if problems := verify(path):
        raise SystemExit("\n".join(problems))


def resume(run: Run, placement: Placement, root: Path, cold: bool) -> dict[str, Any]:
    """Seconds from the start of the process to the end of the first step."""
    path, marks = newest(root), {"imports": time.time()}
    if cold and placement.rank == 0:
        drop_from_cache(path)
    with joined(run, placement) as state, batches_of(run, state) as next_batches:
        marks["meet and build"] = time.time()
        load(state, path)
        wait(state)
        marks["load"] = time.time()
        train_step(state, next_batches(), LR)
        wait(state)
        marks["first step"] = time.time()
        since = {name: slowest(state, at - started()) for name, at in marks.items()}
    return {"layout": to_dict(run)["layout"], "cold": cold, "seconds_since_start": since, "resume_s": since["first step"]}


def lines(found: dict[str, Any]) -> list[str]:
    if "resume_s" in found:
        return [f"first step {found['resume_s']:.2f} s after the start: " + ", ".join(f"{n} {s:.2f}" for n, s in found["seconds_since_start"].items())]
    gb = {name: found[name] / 1e9 for name in ("bytes", "raw_write", "raw_read", "verify_rate")}
    return [
        f"checkpoint {gb['bytes']:.3f} GB; step {1e3 * found['step_s']:.1f} ms",
        f"stall {1e3 * found['stall_s']:.1f} ms a save, {100 * found['stall_of_100_steps']:.3f} % of 100 steps (host {1e3 * found['host_s']:.1f} ms); "
        f"first save {found['first_save_s']:.2f} s, memory included",
        f"save {gb['bytes'] / found['save_s']:.2f} GB/s in {found['save_s']:.2f} s, raw write {gb['raw_write']:.2f}: {100 * found['save_over_raw']:.0f} %",
        f"load {gb['bytes'] / found['load_s']:.2f} GB/s in {found['load_s']:.2f} s, raw read {gb['raw_read']:.2f}: {100 * found['load_over_raw']:.0f} %",
        f"verify {gb['verify_rate']:.2f} GB/s on one core",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "resume"))
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    placement = read_placement(os.environ)[0] or Placement()
    run = long_enough(load_run(options.config, ["data.mock=true", *options.overrides]), 1000)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "measure":
        measured = measure(run, placement, options.folder, options.repeats)
    else:
        measured = resume(run, placement, options.folder, options.cold)
    if placement.rank == 0:
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
        measured = {"what": options.what, "device": device, "ranks": placement.world_size, "config": options.config, **measured}
        print("\n".join(lines(measured)), flush=True)
        if options.out:
            before = json.loads(options.out.read_text()) if options.out.is_file() else []
            options.out.write_text(json.dumps([*before, measured], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
