"""Generated files begin with the command that made them, which is that of the process."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """The command of a user: a test's own process has none of Phalanx."""
    monkeypatch.setattr(sys, "argv", ["phalanx", "launch", "run.yaml"])
