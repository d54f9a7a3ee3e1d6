"""How the speed of `phalanx data prepare --on ray` grows with CPUs: a Ray cluster of this machine with 1, 2, 4, ... of
them, one shard at a time on each, against one process without Ray.

    python benchmarks/prepare_many.py [--mb 512] [--cpus 1,2,4,8,16] [--repeats 1] [--tokenizer TOKENIZER]

Wall seconds, the best of the repeats, which take turns, and CPU seconds of that one with all processes of the cluster.
`of linear` needs a machine that does nothing else; the CPU seconds also show on a busy one what dividing the work and
Ray cost. The text is Python's standard library, over and over, as JSON lines. The tokenizer is BPE with 16,384 tokens,
trained on the same, unless another is named. Shards are a multiple of the CPUs, and the merge counts too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from phalanx.text.prepare import stdlib_files

SHARDS_EACH = 4  # of a CPU, so that the slowest shard costs little
VOCABULARY = 16_384

Took = tuple[float, float]  # wall seconds and CPU seconds


def write_text(path: Path, size: int) -> None:
    """JSON lines of about `size` bytes."""
    documents = [json.dumps({"text": file.read_text(encoding="utf-8", errors="ignore")}) for file in stdlib_files(size)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for line in documents:
                written += file.write(f"{line}\n")
                if written >= size:
                    break


def phalanx(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "phalanx", "data", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


class CpuSeconds(threading.Thread):
    """CPU seconds of all that this process starts, looked up a few times a second: Ray's daemons do not count what
    their processes took once those have ended."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._found: dict[tuple[int, float], float] = {}
        self._before = dict(self._look())

    def _look(self) -> dict[tuple[int, float], float]:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                self._found[process.pid, process.create_time()] = times.user + times.system
        return self._found

    def run(self) -> None:
        while not self._over.wait(0.2):
            self._look()

    def end(self) -> float:
        self._over.set()
        self.join()
        return sum(self._look().values()) - sum(self._before.values())


def prepare(folder: Path, tokenizer: str, out: str, *words: str) -> Took:
    began, used = time.perf_counter(), CpuSeconds()
    used.start()
    phalanx(folder, "prepare", "in.jsonl", "--tokenizer", tokenizer, "-o", out, "--workers", "1", *words)
    return time.perf_counter() - began, used.end()


def one_second() -> None:
    time.sleep(1)


def on_ray(folder: Path, tokenizer: str, cpus: int) -> Took:
    """On a cluster of its own; the drivers of Ray find it by RAY_ADDRESS. Its workers exist by then."""
    import ray

    ray.init(num_cpus=cpus, include_dashboard=False)
    try:
        ray.get([ray.remote(one_second).remote() for _ in range(cpus)])
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        words = ("--on", "ray", "--shards", str(SHARDS_EACH * cpus), "--overwrite")
        return prepare(folder, tokenizer, f"ray-{cpus}", *words)
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--cpus", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokenizer", default=None)
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent elsewhere
    most = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        write_text(folder / "in.jsonl", asked.mb * 10**6)
        tokenizer = asked.tokenizer
        if tokenizer is None:
            write_text(folder / "train.jsonl", 10**7)
            phalanx(folder, "train-tokenizer", "train.jsonl", "--vocab-size", str(VOCABULARY), "-o", "bpe")
            tokenizer = "bpe"
        every = [cpus for cpus in map(int, asked.cpus.split(",")) if cpus <= most]
        alone: list[Took] = []
        found: dict[int, list[Took]] = {cpus: [] for cpus in every}
        for _ in range(asked.repeats):
            alone.append(prepare(folder, tokenizer, "alone", "--overwrite"))
            for cpus in every:
                found[cpus].append(on_ray(folder, tokenizer, cpus))
            print(f"load {os.getloadavg()[0]:.1f}: {alone[-1]} {[rows[-1] for rows in found.values()]}", flush=True)
        wall, work = min(alone)
        print(f"{asked.mb} MB, tokenizer {tokenizer}, {most} CPUs, {platform.processor() or platform.machine()}")
        print("| | seconds | CPU seconds | speed | of linear |\n| --- | --- | --- | --- | --- |")
        print(f"| one process | {wall:.1f} | {work:.1f} | | |")
        for cpus, rows in found.items():
            took, used = min(rows)
            print(f"| Ray, {cpus} CPUs | {took:.1f} | {used:.1f} | {wall / took:.2f} | {wall / took / cpus:.2f} |")


if __name__ == "__main__":
    main()
