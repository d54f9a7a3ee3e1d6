"""The command-line programs of schedulers: whether they are installed, and what they answer."""

from __future__ import annotations

import os
import shutil
import subprocess

from phalanx.base.errors import PhalanxError

PATIENCE_S = 60.0  # for an answer: a busy scheduler takes its time


class SchedulerRefused(PhalanxError):
    """A program of the scheduler ended with an error. said: what it printed."""

    kind = "the scheduler refuses: "

    def __init__(self, text: str, said: str = ""):
        self.said = said or text
        super().__init__(text)


class NoScheduler(PhalanxError):
    """The programs of a scheduler are not on this machine."""

    kind = "no scheduler: "


def here(*names: str) -> bool:
    """Whether all of the programs are on this machine."""
    return all(shutil.which(name) for name in names)


def look_for(scheduler: str, *names: str) -> None:
    """NoScheduler unless the programs are on this machine, with where they were looked for."""
    lacking = [name for name in names if shutil.which(name) is None]
    if lacking:
        places = os.environ.get("PATH", "").replace(os.pathsep, ", ")
        raise NoScheduler(
            f"{scheduler} is not here: looked for {', '.join(lacking)} in {places or 'an empty PATH'}; "
            "go to a login node of the cluster, or load its module"
        )


def ask(*words: str) -> str:
    """What a program prints. SchedulerRefused with its complaint if it fails or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise SchedulerRefused(f"{words[0]} did not answer within {PATIENCE_S:g} s") from None
    except FileNotFoundError:
        look_for("the scheduler", words[0])
        raise
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = "; ".join(line.partition("error: ")[2] or line for line in lines) or f"exit status {done.returncode}"
        raise SchedulerRefused(f"{words[0]}: {said}", said)
    return done.stdout.strip()
