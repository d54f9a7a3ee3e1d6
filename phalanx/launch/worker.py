"""One rank started by `launch/local.py`: calls a function by name and records how it ended.

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
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from phalanx.base.errors import PhalanxError, Preempted
from phalanx.base.log import describe, flush_quietly, refusal
from phalanx.base.placement import SECRET, Placement, Word
from phalanx.launch.bus import BusErrors
from phalanx.launch.early import NOTHING_TO_SAVE, STOPS, deaf
from phalanx.launch.ends import ends_at
from phalanx.launch.outcome import Outcome
from phalanx.launch.rank_log import keep_output
from phalanx.observe.failures import taken


def main(folder: str, target: str, meeting: str) -> None:
    word = Left(Path(folder), int(os.environ.get("RANK", "0")))
    try:
        for number in STOPS:
            signal.signal(number, word.stop_early)
        word.announce()
        keep_output(os.environ, word.rank)
        follow_parent()
        world = int(os.environ["WORLD_SIZE"])
        secret = os.environ.pop(SECRET, "")  # processes started by this rank need not have it
        local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        node = Path(folder) / "node.json"
        more = json.loads(node.read_text(encoding="utf-8")) if node.exists() else {}
        placement = Placement(
            word.rank, local_rank, world, meeting if world > 1 else "", secret, word, local_size, **more
        )
        placement = replace(placement, ends_at=ends_at(os.environ))
        arguments = json.loads((Path(folder) / "arguments.json").read_text(encoding="utf-8"))
        with BusErrors(word.failed):
            find(target)(placement, **arguments)
        deaf()  # there is nothing left to stop
        flush_quietly()
    except BaseException as error:
        deaf()
        word.leave(error)


class Left(Word):
    """What a rank leaves in the folder of its launcher: its number, whether it has something to save, and how it
    ended."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._failed_at: float | None = None

    def announce(self) -> None:
        """Tell the launcher to which process to pass signals. The launcher writes `stop` before it reads these numbers,
        so no rank is missed."""
        partial = self.folder / f"rank-{self.rank}.partial"
        partial.write_text(str(os.getpid()), encoding="utf-8")
        os.replace(partial, partial.with_suffix(".pid"))
        if (self.folder / "stop").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    def writes(self, folder: Path) -> None:
        partial = self.folder / "run.partial"  # this rank may be killed here, and the launcher reads what it left
        partial.write_text(json.dumps(asdict(taken(folder))), encoding="utf-8")
        os.replace(partial, partial.with_suffix(".json"))

    def unsaved(self) -> None:
        (self.folder / f"rank-{self.rank}.unsaved").touch()

    def failed(self, error: BaseException) -> None:
        self._failed_at = self._failed_at or time.time()
        code, text = _code_and_text(error)
        with suppress(OSError):  # the launcher may be gone, with its folder
            if code:
                Outcome(self.rank, code, text, self._failed_at).write(self.folder)

    def leave(self, error: BaseException) -> NoReturn:
        """Record the error first (others may lose this rank and report that), then end at once: a lost peer can make an
        orderly exit hang."""
        self.failed(error)
        code, _ = _code_and_text(error)
        if code == 1 and not isinstance(error, (PhalanxError, SystemExit)) and refusal(error) is None:
            traceback.print_exception(error)
        flush_quietly()
        # a preempted rank is not a failure: the launcher must wait for the others rather than end them
        os._exit(0 if code == Preempted.exit_code else code)

    def stop_early(self, signum: int, frame: FrameType | None) -> None:
        """Until the target installs its own handler there is nothing to save, so the process ends without unwinding, as
        in early.stop_early."""
        if self._failed_at is None:
            with suppress(OSError):
                (self.folder / f"rank-{self.rank}.early").touch()
            self.leave(Preempted(NOTHING_TO_SAVE))


def _code_and_text(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code, f"ended with exit status {code}"
    return error.exit_code if isinstance(error, PhalanxError) else 1, describe(error)


def find(target: str) -> Callable[..., Any]:
    """`package.module:function` -> the function."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def follow_parent() -> None:
    """Without its launcher a rank is asked to stop as well: nobody else would end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


if __name__ == "__main__":
    main(*sys.argv[1:])
