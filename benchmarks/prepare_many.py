"""How the speed of `phalanx data prepare --on ray` grows with nodes: a Ray cluster on this machine with 1, 2, 4, ... of
them, one CPU and one shard at a time on each, against one process without Ray, and against as many at once.

    python benchmarks/prepare_many.py [--mb 512] [--nodes 1,2,4,8,16] [--repeats 1] [--tokenizer TOKENIZER]

Wall seconds, the best of the repeats, which take turns. `of linear` needs a machine that does nothing else and has a
core for each node. CPU seconds show on any machine what dividing the work costs: those of the processes that do it,
and apart from them those of each node's daemons of Ray, which run on a node of any size. The text is Python's standard
library, over and over, as JSON lines. The tokenizer is BPE with 16,384 tokens, trained on the same, unless another is
named. Shards are a multiple of the nodes, and the merge counts too.
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

SHARDS_EACH = 4  # of a node, so that the slowest shard costs little
VOCABULARY = 16_384
DATA = (sys.executable, "-m", "phalanx", "data")
PREPARE = (*DATA, "prepare", "in.jsonl", "--workers", "1")
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}

TITLES = """\
| | seconds | CPU seconds | CPU ms a document | of one process's work | Ray's daemons, CPU seconds | speed | of linear |
| --- | --- | --- | --- | --- | --- | --- | --- |"""

Took = tuple[float, float, float]  # wall seconds, CPU seconds of the work, of what had been there before it


def write_text(path: Path, size: int) -> int:
    """JSON lines of about `size` bytes; returns how many."""
    documents = [json.dumps({"text": file.read_text(encoding="utf-8", errors="ignore")}) for file in stdlib_files(size)]
    written = lines = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for line in documents:
                written += file.write(f"{line}\n")
                lines += 1
                if written >= size:
                    break
    return lines


def phalanx(folder: Path, *words: str) -> None:
    subprocess.run([*DATA, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


class CpuSeconds(threading.Thread):
    """CPU seconds of all that this process starts, looked up a few times a second: Ray's daemons do not count what
    their processes took once those have ended. Daemons are what is there already and no worker of Ray."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._found: dict[tuple[int, float], float] = {}
        self._before = dict(self._look())
        self._daemons = {key for key in self._before if not _is_worker(key[0])}

    def _look(self) -> dict[tuple[int, float], float]:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                self._found[process.pid, process.create_time()] = times.user + times.system
        return self._found

    def run(self) -> None:
        while not self._over.wait(0.2):
            self._look()

    def end(self) -> tuple[float, float]:
        """Of the work, and of daemons."""
        self._over.set()
        self.join()
        used = {key: seconds - self._before.get(key, 0.0) for key, seconds in self._look().items()}
        daemons = sum(used[key] for key in self._daemons)
        return sum(used.values()) - daemons, daemons


def _is_worker(pid: int) -> bool:
    with suppress(psutil.Error):
        return "".join(psutil.Process(pid).cmdline()[:1]).startswith("ray::")
    return False


def prepare(folder: Path, tokenizer: str, out: str, *words: str) -> Took:
    began, used = time.perf_counter(), CpuSeconds()
    used.start()
    phalanx(folder, *PREPARE[len(DATA) :], "--tokenizer", tokenizer, "-o", out, *words)
    wall = time.perf_counter() - began
    return wall, *used.end()


def by_hand(folder: Path, tokenizer: str, count: int) -> Took:
    """As many processes at once, without Ray: what the cores of this machine allow."""
    began, used = time.perf_counter(), CpuSeconds()
    used.start()
    words = (*PREPARE, "--tokenizer", tokenizer, "--overwrite")
    shards = [(*words, "-o", f"hand-{i}", "--shard", f"{i}/{count}") for i in range(count)]
    running = [subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL) for words in shards]
    if any([process.wait() for process in running]):
        raise SystemExit("a shard has failed")
    wall = time.perf_counter() - began
    return wall, *used.end()


def one_second() -> None:
    time.sleep(1)


def on_ray(folder: Path, tokenizer: str, nodes: int) -> Took:
    """On a cluster of its own; the drivers of Ray find it by RAY_ADDRESS. Its workers exist by then."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        ray.get([ray.remote(one_second).options(scheduling_strategy="SPREAD").remote() for _ in range(nodes)])
        os.environ["RAY_ADDRESS"] = cluster.address
        words = ("--on", "ray", "--shards", str(SHARDS_EACH * nodes), "--overwrite")
        return prepare(folder, tokenizer, f"ray-{nodes}", *words)
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--nodes", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokenizer", default=None)
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent elsewhere
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        documents = write_text(folder / "in.jsonl", asked.mb * 10**6)
        tokenizer = asked.tokenizer
        if tokenizer is None:
            write_text(folder / "train.jsonl", 10**7)
            phalanx(folder, "train-tokenizer", "train.jsonl", "--vocab-size", str(VOCABULARY), "-o", "bpe")
            tokenizer = "bpe"
        alone: list[Took] = []
        found: dict[int, list[Took]] = {nodes: [] for nodes in map(int, asked.nodes.split(","))}
        hand: dict[int, list[Took]] = {nodes: [] for nodes in found if nodes > 1}
        for _ in range(asked.repeats):
            alone.append(prepare(folder, tokenizer, "alone", "--overwrite"))
            for nodes in found:
                found[nodes].append(on_ray(folder, tokenizer, nodes))
                if nodes in hand:
                    hand[nodes].append(by_hand(folder, tokenizer, nodes))
            every = [rows[-1] for rows in (alone, *found.values(), *hand.values())]
            print(f"load {os.getloadavg()[0]:.1f}: {every}", flush=True)
        cores, chip = len(os.sched_getaffinity(0)), platform.processor() or platform.machine()
        print(f"{asked.mb} MB, {documents:,} documents, tokenizer {tokenizer}, {cores} cores, {chip}")
        print(TITLES)
        wall, work, _ = min(alone)
        print(f"| one process | {wall:.1f} | {work:.1f} | {1e3 * work / documents:.3f} | | | | |")
        for what, kind in (("Ray, nodes", found), ("without Ray, processes at once", hand)):
            for nodes, rows in kind.items():
                took, used, daemons = min(rows)
                shares = f"{work / used:.2f} | {daemons:.1f} | {wall / took:.2f} | {wall / took / nodes:.2f}"
                print(f"| {what}: {nodes} | {took:.1f} | {used:.1f} | {1e3 * used / documents:.3f} | {shares} |")


if __name__ == "__main__":
    main()
