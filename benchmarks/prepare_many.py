"""How the speed of `phalanx data prepare --on ray` grows with CPUs: a Ray cluster of this machine with 1, 2, 4, ... of
them, one shard at a time on each, against one process without Ray.

    python benchmarks/prepare_many.py [--mb 512] [--cpus 1,2,4,8,16]

Wall seconds on a machine that does nothing else. The text is Python's standard library, over and over, as JSON lines.
Shards are a multiple of the CPUs, and the merge counts too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phalanx.text.prepare import stdlib_files

SHARDS_EACH = 4  # of a CPU, so that the slowest shard costs little


def write_text(path: Path, size: int) -> None:
    """JSON lines of about `size` bytes."""
    documents = [json.dumps({"text": file.read_text(encoding="utf-8", errors="ignore")}) for file in stdlib_files()]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for line in documents:
                written += file.write(f"{line}\n")
                if written >= size:
                    break


def seconds(folder: Path, out: str, *words: str) -> float:
    command = [sys.executable, "-m", "phalanx", "data", "prepare", "in.jsonl", "--tokenizer", "bytes", "-o", out]
    began = time.perf_counter()
    subprocess.run([*command, "--workers", "1", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def on_ray(folder: Path, cpus: int) -> float:
    """Seconds on a cluster of its own; the drivers of Ray find it by RAY_ADDRESS. Its workers exist by then."""
    import ray

    ray.init(num_cpus=cpus, include_dashboard=False)
    try:
        ray.get([ray.remote(time.sleep).remote(1) for _ in range(cpus)])
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        return seconds(folder, f"ray-{cpus}", "--on", "ray", "--shards", str(SHARDS_EACH * cpus))
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--cpus", default="1,2,4,8,16")
    asked = parser.parse_args()
    most = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        write_text(folder / "in.jsonl", asked.mb * 10**6)
        alone = seconds(folder, "alone")
        print(f"{asked.mb} MB, {most} CPUs, {platform.processor() or platform.machine()}; one process: {alone:.1f} s")
        print("| CPUs | seconds | speed | of linear |\n| --- | --- | --- | --- |")
        for cpus in map(int, asked.cpus.split(",")):
            if cpus <= most:
                took = on_ray(folder, cpus)
                print(f"| {cpus} | {took:.1f} | {alone / took:.2f} | {alone / took / cpus:.2f} |", flush=True)


if __name__ == "__main__":
    main()
