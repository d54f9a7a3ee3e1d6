"""Processes on other hosts, started by ssh, a command like it, or Ray (ray_nodes.py), and their output. What they run
is decided elsewhere: a preflight (cli/preflight.py) or the ranks of a run (ssh.py)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError

# It asks nothing, gives up on a host that does not answer, and notices within a minute that one is gone.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
LOST = 255  # exit status of ssh itself
LAST_WORDS_S = 1.0  # for what is still on its way when the other side has gone silent
KEPT = 20  # last lines of a host's standard error
ADVICE = {
    "Host key verification failed": "ssh does not know this key of it: compare it, then accept it with `ssh {host}`",
    "Permission denied": "ssh may ask for no password here: give the host your key with `ssh-copy-id {host}`",
}


class RemotePipes(Protocol):
    """The way to a process on a host, with its standard streams and its end: a subprocess of ssh is one."""

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Exit status: LOST if the way itself broke. subprocess.TimeoutExpired if it is not over in time."""

    def kill(self) -> None:
        """Cut the way."""


@dataclass
class RemoteProcess:
    """A process on a host; `process` leads to it. said: its last lines on standard error."""

    host: str
    process: RemotePipes
    listener: threading.Thread
    said: deque[str]

    def why(self, otherwise: str) -> str:
        """Why it ended, or does not answer, in one line: the last one that the host or ssh said, with what to do about
        it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS_S)
            self.listener.join(LAST_WORDS_S)
        last = next((line for line in reversed(self.said) if line), "")
        advice = next((text for part, text in ADVICE.items() if part in last), "")
        return "; ".join(filter(None, (last or otherwise, advice.format(host=self.host))))


def start_remote(host: str, ssh: str, command: str, hear: Callable[[str], None] | None = None) -> RemoteProcess:
    """`ssh HOST COMMAND`, with pipes for its streams. hear: called with each line of its standard error, in a thread of
    its own. PhalanxError if there is no such ssh."""
    words = [*shlex.split(ssh), host, command]
    try:
        # a session of its own: Ctrl-C in the terminal is for this process alone, and nobody can be asked for a password
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise PhalanxError(f"{words[0]} cannot be started: {error.strerror}; --ssh names another command") from error
    said: deque[str] = deque(maxlen=KEPT)

    def listen() -> None:
        for line in process.stderr or ():
            text = line.decode(errors="replace").rstrip("\r\n")
            said.append(text.strip())
            if hear is not None:
                hear(text)

    listener = threading.Thread(target=listen, daemon=True, name="phalanx-ssh")
    listener.start()
    return RemoteProcess(host, process, listener, said)


def same_program() -> str:
    """The shell words that start phalanx with this Python, and with the PYTHONPATH of this process."""
    path = os.environ.get("PYTHONPATH")
    words = [sys.executable, "-m", "phalanx"]
    return shlex.join(["env", f"PYTHONPATH={path}", *words] if path else words)
