"""Generated files begin with the command that made them, which is that of the process."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A port of this machine that nobody else can take, where nothing listens until a test says so."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        yield bound


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The command of a user: a test's own process has none of Phalanx."""
    monkeypatch.setattr(sys, "argv", ["phalanx", "launch", "run.yaml"])
