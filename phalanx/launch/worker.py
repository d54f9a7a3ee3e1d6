"""One rank started by `launch/local.py`: calls a function by name and leaves word of how it ended.

`python -m phalanx.launch.worker FOLDER TARGET MEETING`: the folder of the launcher, what to call, where the ranks meet.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.base.errors import ConfigError, PhalanxError, Preempted
from phalanx.base.log import describe
from phalanx.launch.env import read_placement
from phalanx.launch.outcome import Outcome

STOPS = (signal.SIGTERM, signal.SIGUSR1)


def main(folder: str, target: str, meeting: str) -> None:
    try:
        for number in STOPS:
            signal.signal(number, stop_early)
        announce(Path(folder), int(os.environ.get("RANK", "0")))
        follow_parent()
        placement, problems = read_placement(os.environ)
        if placement is None:
            raise ConfigError(problems)
        if placement.world_size > 1:  # a restarted rank must not read what an earlier attempt left
            placement = replace(placement, init_method=f"{meeting}/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        arguments = json.loads((Path(folder) / "arguments.json").read_text(encoding="utf-8"))
        find(target)(placement, **arguments)
        deaf()  # there is nothing left to stop
    except BaseException as error:
        deaf()
        leave(folder, error)


def deaf() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def find(target: str) -> Callable[..., Any]:
    """`package.module:function` -> the function."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def stop_early(signum: int, frame: Any) -> None:
    """Until the target installs its own handler there is nothing to save."""
    raise Preempted("asked to stop before training began; start the same command again")


def announce(folder: Path, rank: int) -> None:
    """Forget how an earlier attempt ended, and tell the launcher whom to forward signals to.

    It writes `stop` before it reads the numbers, so no rank is missed.
    """
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    if (folder / "stop").exists():
        os.kill(os.getpid(), signal.SIGTERM)


def follow_parent() -> None:
    """Without its launcher a rank is asked to stop as well: nobody else would end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def leave(folder: str, error: BaseException) -> None:
    """Leave word first (others may lose this rank and say so), then end at once: a lost peer can make an orderly exit hang."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = f"ended with exit status {code}"
    else:
        code = error.exit_code if isinstance(error, PhalanxError) else 1
        text = describe(error)
    if code:
        Outcome(int(os.environ.get("RANK", "0")), code, text, time.time()).write(folder)
    if code == 1 and not isinstance(error, (PhalanxError, SystemExit)):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # a preempted rank is no failure: the launcher must wait for the others rather than end them
    os._exit(0 if code == Preempted.exit_code else code)


if __name__ == "__main__":
    main(*sys.argv[1:])
