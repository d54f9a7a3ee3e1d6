"""Processes of tests/harness/warm.py are what `python` would have started: arguments, streams, folder, environment,
signals, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = (
    "import os, sys; print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ['COLOUR'], __name__); "
    "print('told', file=sys.stderr)"
)


@pytest.mark.parametrize("kind", ["code", "stdin", "script", "module"])
def test_a_program_gets_what_it_would_get_from_an_interpreter(warm, tmp_path, kind):
    (tmp_path / "show.py").write_text(SHOW)
    words = {
        "code": ["-c", SHOW],
        "stdin": ["-"],
        "script": [str(tmp_path / "show.py")],
        "module": ["-u", "-m", "show"],
    }[kind]
    text = SHOW if kind == "stdin" else "typed"
    env = {**os.environ, "COLOUR": "blue"}
    ran = [
        subprocess.run([python, *words, "a", "b c"], input=text, cwd=tmp_path, env=env, capture_output=True, text=True)
        for python in (warm.python, sys.executable)
    ]
    assert (
        ran[0].stdout == ran[1].stdout != ""
        and ran[0].stderr == ran[1].stderr == "told\n"
        and ran[0].returncode == ran[1].returncode == 0
    )


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit()",
        "sys.exit(7)",
        "sys.exit('why')",
        "1 / 0",
        "os.kill(os.getpid(), 15)",
        "os.kill(os.getpid(), 9)",
        "threading.Timer(0.1, lambda: print('late')).start()",
        "atexit.register(lambda: print('last'))",
    ],
)
def test_it_ends_as_an_interpreter_would(warm, end):
    ran = [
        subprocess.run([python, "-c", f"import atexit, os, sys, threading; {end}"], capture_output=True, text=True)
        for python in (warm.python, sys.executable)
    ]
    assert (ran[0].returncode, ran[0].stdout) == (ran[1].returncode, ran[1].stdout)
    assert ran[0].stderr.splitlines()[-1:] == ran[1].stderr.splitlines()[-1:]


WAITS = (
    "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); print(os.getpid(), "
    "flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_signals_reach_it(warm, number, status):
    asked = subprocess.Popen([warm.python, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    pid = int(asked.stdout.readline())
    assert pid != asked.pid and Path(f"/proc/{pid}").exists()
    asked.send_signal(number)
    assert asked.wait(30) == status
    assert asked.stdout.read() == ""  # the end of its output: the program that held it is gone


def test_a_signal_is_passed_on_however_early_it_comes(warm):
    """The program itself sends it, to the process that asked for it and may not yet know its number."""
    code = (
        "import os, signal, sys; waited = [signal.SIGTERM]; signal.pthread_sigmask(signal.SIG_BLOCK, waited); "
        "os.kill(int(sys.argv[1]), signal.SIGTERM); signal.sigwait(waited); os._exit(75)"
    )
    for _ in range(20):
        ran = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" $$', warm.python, code], timeout=120)
        assert ran.returncode == 75


def test_what_it_starts_is_warm_too(warm):
    """Its own `sys.executable` asks as well, and torch is there without an import."""
    code = (
        "import subprocess, sys; print('torch' in sys.modules, flush=True); sys.argv[1:] and "
        "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    ran = subprocess.run([warm.python, "-c", code, code], capture_output=True, text=True)
    assert ran.stdout == "True\nTrue\n", ran.stderr
