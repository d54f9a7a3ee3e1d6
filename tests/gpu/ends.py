"""An error on one rank ends every rank, although the others wait for it inside a collective.

`python -m torch.distributed.run --nproc-per-node 2 tests/gpu/ends.py CONFIG ...` is a rank: a training step of two
pipeline stages whose first fails in its second call. `check_ends` starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 90.0  # start, imports and compiling are most of it; the ranks' own time limit is ten minutes
CONFIG = ("recipes/tiny_llama.yaml", "layout.pp=2", "data.mock=true", "train.global_batch=4", "train.seq_length=128")
PLANTED = "planted on the first stage"


def check_ends(kind: str) -> dict[str, str]:
    """name -> "ok ..." or what is wrong."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        *CONFIG,
    ]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, f"train.device={kind}"], cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return {"an error on one rank ends all": f"FAILED some rank still runs after {WITHIN_S:g} s"}
    text = ended.stdout + ended.stderr
    if ended.returncode == 0 or PLANTED not in text:
        return {"an error on one rank ends all": f"FAILED exit {ended.returncode}: {text[-300:]}"}
    return {"an error on one rank ends all": f"ok, {time.monotonic() - began:.0f} s after the start"}


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from phalanx.bench import step
    from phalanx.cli.main import main as phalanx

    plain, calls = step.train_step, 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2 and os.environ["RANK"] == "0":
            raise TypeError(PLANTED)
        return plain(*arguments)  # type: ignore[arg-type]

    step.train_step = failing  # type: ignore[assignment]
    phalanx(["bench", "step", *sys.argv[1:], "--warmup", "2", "--steps", "2"])


if __name__ == "__main__":
    main()
