"""Programs in processes that have torch imported already: forked from a server, they start in milliseconds instead
of 2.5 s of computing.

`Warm.python` is a program that takes what `python` takes (`-m MODULE`, `-c CODE` or a script). What it starts is a
process of its own with the arguments, environment, folder, streams, signals and exit status that it was given, and
so are the ranks that this starts in turn. It leaves to tests of real interpreters: what is imported and in which
order, hashes that differ between processes, and ranks that outlive a launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
BEHIND = "behind"  # the folder with a file for each process that asks: the number of the program's process
PEER = struct.Struct("3i")  # Linux' ucred: process, user, group
NUMBER = 4  # bytes of a process number or a status on the line
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
# What runs import late is here too: torch's backward imports symbolic_shapes (and sympy), its meta device _dynamo, a
# launcher elastic.
IMPORTED = (
    "torch",
    "torch.distributed.launcher.api",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "tokenizers",
    "matplotlib.figure",
    "phalanx.cli.main",
    "phalanx.cli.setup",
    "phalanx.cli.jobs",
    "phalanx.launch.env",
    "phalanx.training.main",
    "phalanx.verifying.compare",
    "phalanx.inference.generate",
)


class Warm:
    """A server and, in `folder`, the programs `python`, `phalanx` and `torchrun` that ask it. `imported`: what their
    interpreters begin with. `env`: what must be set before that. `inside`: a command that runs the server (and so
    whatever it starts) in a network namespace."""

    def __init__(
        self,
        imported: tuple[str, ...] = IMPORTED,
        env: Mapping[str, str] = MappingProxyType({}),
        inside: tuple[str, ...] = (),
    ) -> None:
        self._imported, self._env, self._inside = imported, env, inside
        self._place = tempfile.TemporaryDirectory(
            prefix="warm-"
        )  # short: the path of a socket has at most 107 characters
        self.folder = Path(self._place.name)
        self.python = str(self.folder / "python")
        self._server: subprocess.Popen | None = None

    def start(self) -> Warm:
        where = self.folder / "socket"
        (self.folder / BEHIND).mkdir()
        for name, words in {"python": "", "phalanx": "-m phalanx", "torchrun": "-m torch.distributed.run"}.items():
            program = self.folder / name
            program.write_text(
                f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{where}" "{self.python}" {words} "$@"\n'
            )
            program.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(where))
        listener.listen(64)
        code = f"from tests.harness.warm import serve; serve({listener.fileno()}, {self._imported})"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **self._env}
        self._server = subprocess.Popen(
            [*self._inside, sys.executable, "-c", code],
            env=env,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        listener.close()
        return self

    def phalanx(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, typed: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`phalanx WORDS`, with `env` beside this environment, and `typed` on its standard input."""
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            [self.folder / "phalanx", *words],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, **own, **self._env, **(env or {})},
            input=typed,
            timeout=150,
        )

    def behind(self, asking: int) -> int | None:
        """The process that runs the program which process `asking` stands for; None before it is there, or if it has
        ended. A test that kills it kills what a user would: `asking` then ends the same way. Killed the other way
        round, the program lives until its keeper sees the line cut, and may still say something."""
        try:
            return int((self.folder / BEHIND / str(asking)).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def close(self) -> None:
        """End the server and whatever it started that is still there."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._place.cleanup()


# ---- the program that asks: the process that others see and signal -------------------------------


def ask(where: str, executable: str, words: list[str]) -> NoReturn:
    """Have the server run it, pass signals on, and end as it ended. Killed itself, it takes the program with it: the
    server sees the line cut."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(where)
    request = json.dumps([executable, words, os.getcwd(), dict(os.environ)]).encode()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, PASSED_ON
    )  # the program may run, and be known to, before this one is told its number
    socket.send_fds(line, [len(request).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(request)
    pid = int.from_bytes(line.recv(NUMBER, socket.MSG_WAITALL), "big")

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    if pid:
        woken, _wake = signals_wake()
        for number in PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        while line not in select.select([line, woken], [], [])[0]:
            woken.recv(64)
    told = line.recv(NUMBER, socket.MSG_WAITALL)
    if not told:
        sys.exit("warm: the server is gone")
    status = int.from_bytes(told, "big")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def signals_wake() -> tuple[socket.socket, socket.socket]:
    """What can be read from when a signal has come (one that comes just before a call that waits would be noticed
    after it only), and what the signal writes to, to be kept open."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    return woken, wake


# ---- the server ----------------------------------------------------------------------------------


def serve(listener: int, imported: tuple[str, ...]) -> NoReturn:
    """Fork a keeper for each request, for ever."""
    for module in imported:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a forked process must not copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(fileno=listener) as door:
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                break
            line.close()
        folder = Path(door.getsockname()).parent
    asking, _, _ = PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    keep(line, folder / BEHIND / str(asking))


def keep(line: socket.socket, behind: Path) -> NoReturn:
    """Fork once more: the child becomes the program; this one tells how it ended, or ends it when nobody is there
    any more to be told."""
    size, fds, _, _ = socket.recv_fds(line, 8, 3)
    with line.makefile("rb") as asked:
        executable, words, folder, env = json.loads(asked.read(int.from_bytes(size, "big")))
    woken, wake = signals_wake()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)  # where asyncio was imported, a fork has done so (Python 3.12 and later)
        wake.close()
        woken.close()
        line.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        become(executable, words, folder, env, fds)
    behind.write_text(str(child))
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(OSError):  # nobody is there any more
        line.sendall(child.to_bytes(NUMBER, "big"))
        while line not in select.select([line, woken], [], [])[0]:
            woken.recv(64)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                behind.unlink(missing_ok=True)
                line.sendall(status.to_bytes(NUMBER, "big"))
                os._exit(0)
    behind.unlink(missing_ok=True)
    os.kill(child, signal.SIGKILL)
    os._exit(1)


def become(executable: str, words: list[str], folder: str, env: dict[str, str], fds: list[int]) -> NoReturn:
    """Be `python WORDS` in that folder with that environment and those streams."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*paths, *(p for p in sys.path if p and p != str(ROOT))]
    sys.executable = executable
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # as at a terminal, even if whoever began the tests ignores Ctrl-C
    status = 1
    try:
        run(words)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # an interpreter's end without taking 2,600 modules apart, which costs 0.3 s
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def run(words: list[str]) -> None:
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-":
        sys.path.insert(0, "")
        sys.argv = words
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
    elif words[0].startswith("-"):
        sys.exit(f"warm: python's option {words[0]} is not known here")
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], sys.argv[3:])
