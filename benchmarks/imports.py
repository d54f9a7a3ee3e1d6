"""What importing a module costs beyond `import torch`: python benchmarks/imports.py FOLDER:MODULE ... [--times 11]

Each FOLDER holds a copy of the package (`git archive COMMIT phalanx | tar x -C FOLDER`). Copies are imported in turns,
each time in a new process with compiled files in place. Printed are medians of CPU time, and the part of it that
Python's garbage collector took: its passes go through all that torch has made, and their number is a matter of chance.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CODE = """
import gc, importlib, sys, time
sys.path.insert(0, sys.argv[1])
began = time.process_time()
import torch
passes = [0.0, 0.0]

def note(phase, info):
    if phase == "start":
        passes[1] = time.process_time()
    else:
        passes[0] += time.process_time() - passes[1]

gc.callbacks.append(note)
between = time.process_time()
importlib.import_module(sys.argv[2])
print(between - began, time.process_time() - between, passes[0])
"""


def once(place: str) -> tuple[float, ...]:
    """CPU seconds of torch, of the module beyond it, and of these those of garbage collections."""
    folder, _, module = place.rpartition(":")
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", CODE, os.path.abspath(folder), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(float(word) for word in done.stdout.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="FOLDER:MODULE")
    parser.add_argument("--times", type=int, default=11)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, ...]]] = {place: [] for place in options.places}
    for place in found:
        once(place)  # writes compiled files
    for _ in range(options.times):
        for place, rows in found.items():
            rows.append(once(place))
    for place, rows in found.items():
        torch, beyond, passes = (1e3 * statistics.median(column) for column in zip(*rows))
        print(f"{place}: torch {torch:.0f} ms, beyond it {beyond:.0f} ms, of these {passes:.0f} ms of collections")


if __name__ == "__main__":
    main()
