"""What imports cost beyond `import torch`, of a module or of a whole run:

    python benchmarks/imports.py OLD:phalanx.train.main NEW:phalanx.training.main
    python benchmarks/imports.py OLD NEW --run recipes/tiny_llama.yaml

OLD and NEW are folders with a copy of the package (`git archive COMMIT phalanx | tar x -C FOLDER`). Copies take turns,
each time in a new process with compiled files in place. A run is one of one step in one process, which imports torch
first; what it imports is everything from reading its config to its report. Printed are medians of CPU time, the part
of it that Python's garbage collector took (its passes go through all that torch has made, and their number is a matter
of chance), and for a run its CPU time in all, because what is not done by imports may be done later.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import builtins, gc, importlib, sys, time
folder, module, config, run_folder = sys.argv[1:]
sys.path.insert(0, folder)
clock = time.process_time
began = clock()
import torch
imported_torch = clock()
inside = False
spent = passes = pass_began = 0.0

def note(phase, info):
    global passes, pass_began
    if phase == "start":
        pass_began = clock()
    elif inside:
        passes += clock() - pass_began

def timed(load):
    def outermost(*args, **kwargs):
        global inside, spent
        if inside:
            return load(*args, **kwargs)
        inside, since = True, clock()
        try:
            return load(*args, **kwargs)
        finally:
            inside = False
            spent += clock() - since
    return outermost

gc.callbacks.append(note)
builtins.__import__ = timed(builtins.__import__)
importlib.import_module = timed(importlib.import_module)
words = [f"dir={run_folder}", "train.steps=1"]
if module:
    importlib.import_module(module)
elif importlib.util.find_spec("phalanx.api"):
    import phalanx as px
    px.train(px.load(config, *words))
else:  # before there was px
    from phalanx.base.placement import Placement
    from phalanx.train.load import load_run
    from phalanx.train.main import train
    train(load_run(config, words), Placement())
print("measured", imported_torch - began, spent, passes, clock() - imported_torch)
"""


def once(place: str, config: str) -> tuple[float, ...]:
    """CPU seconds of torch, of imports beyond it, of these those of garbage collections, and of all beyond torch."""
    folder, _, module = place.partition(":")
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-c", CODE, os.path.abspath(folder), module, config, os.path.join(runs, "run")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(float(word) for word in done.stdout.split("measured")[1].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="FOLDER[:MODULE]")
    parser.add_argument("--run", default="", metavar="CONFIG", help="a config of one rank that needs no data")
    parser.add_argument("--times", type=int, default=11)
    options = parser.parse_args()
    if bool(options.run) == any(":" in place for place in options.places):
        parser.error("each FOLDER has a :MODULE, or --run names a CONFIG")
    found: dict[str, list[tuple[float, ...]]] = {place: [] for place in options.places}
    for place in found:
        once(place, options.run)  # writes compiled files
    for _ in range(options.times):
        for place, rows in found.items():
            rows.append(once(place, options.run))
    first = next(iter(found))
    for place, rows in found.items():
        torch, beyond, passes, whole = (1e3 * statistics.median(column) for column in zip(*rows))
        ratio = statistics.median(row[1] / other[1] for row, other in zip(rows, found[first]))
        text = f"{place}: torch {torch:.0f} ms, imports beyond it {beyond:.0f} ms ({ratio:.2f} of {first}), "
        text += f"of these {passes:.0f} ms of collections"
        print(text + (f"; in all {whole:.0f} ms" if options.run else ""))


if __name__ == "__main__":
    main()
