"""Run on a machine with GPUs: `python tests/gpu/run.py`. Prints a short table last; exit code 1 if anything failed.

`--device cpu --world 2` runs the same on the CPU (small attention, gloo), which finds mistakes in the checks
themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from phalanx.comm.mesh import many_queues
from tests.gpu.checks import all_checks
from tests.gpu.ends import check_ends
from tests.gpu.layouts import check_layouts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world", type=int, help="ranks of the layouts part; default: the number of GPUs")
    parser.add_argument("--precisions", default="fp64,fp32,bf16", help="of the layouts part")
    parser.add_argument(
        "--layouts",
        default="",
        help="of the layouts part, those whose name contains one of these, separated by semicolons",
    )
    parser.add_argument(
        "--only", default="", help="run the checks whose name contains one of these, separated by semicolons"
    )
    parser.add_argument(
        "--part",
        default="0/1",
        help="of the checks of one device: I/N runs every N-th from the I-th on, for N devices to share",
    )
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    world = options.world or (torch.cuda.device_count() if options.device == "cuda" else 1)
    first, every = map(int, options.part.split("/"))
    started, table = time.time(), {}
    only = options.only.split(";")
    chosen = [(name, check) for name, check in all_checks().items() if any(part in name for part in only)][first::every]
    for name, check in chosen:
        begun = time.time()
        try:
            table[name] = check(device)
        except Exception as error:
            traceback.print_exc()
            table[name] = f"FAILED {type(error).__name__}: {str(error)[:200]}"
        print(f"{time.time() - begun:6.1f} s  {name}: {table[name]}", flush=True)  # what a limit of time leaves
    if world > 1 and any(part in "layouts" for part in only):
        try:
            table |= check_layouts(
                options.device, world, tuple(options.precisions.split(",")), options.layouts.split(";")
            )
        except Exception as error:
            traceback.print_exc()
            table["layouts"] = f"FAILED {type(error).__name__}: {str(error)[:200]}"
    if world > 1 and any(part in "ends" for part in only):
        table |= check_ends(options.device)
    failed = [name for name, text in table.items() if text.startswith("FAILED")]
    for name, text in table.items():
        print(f"{name:60s} {text}")
    what = torch.cuda.get_device_name(device) if options.device == "cuda" else "CPU"
    print(
        f"{len(table) - len(failed)} of {len(table)} passed on {what} x {world}, torch {torch.__version__}, "
        f"{time.time() - started:.0f} s"
    )
    for name in failed:
        print(f"FAILED: {name}: {table[name]}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    many_queues()
    sys.exit(main())
