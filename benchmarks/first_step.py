"""How long a run takes from its launch to its first step: python benchmarks/first_step.py benchmarks/configs/w1.yaml
[--times 2] [a.b=c ...]

Starts `phalanx train` with made-up tokens, notes when each line comes, and kills it after the line of its first step
(which is printed while the second one runs). Run it twice: the first time compiles kernels, later ones find them in
their caches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

STAGES = ("model ", "kernels ", "step=1 ")  # lines that begin so: everything is built; what was chosen; the first step


def launch(config: str, overrides: list[str], limit_s: float) -> dict[str, float]:
    """Seconds from the launch to each of STAGES."""
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            config,
            f"dir={folder}/run",
            "data.mock=true",
            "log.interval=1",
            *overrides,
        ]
        began, seen = time.perf_counter(), {}
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            lines = []
            for line in run.stdout or ():
                lines.append(line)
                seen |= {s.strip(" ="): time.perf_counter() - began for s in STAGES if line.startswith(s)}
                if line.startswith(STAGES[-1]) or time.perf_counter() - began > limit_s:
                    break
            else:
                raise RuntimeError("".join(lines[-20:]))
        finally:
            run.kill()
            run.wait()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120)
    options = parser.parse_args()
    for number in range(options.times):
        found = launch(options.config, options.overrides, options.limit)
        print(
            f"launch {number + 1}: " + ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in found.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
