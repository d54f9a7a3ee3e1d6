"""Callback: what a program of your own can react to in a run made by `train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Override the methods you need. Each is called on every rank, in the same order; an exception ends the run.
    Callbacks must not change the model, and collectives in them must be called on every rank."""

    def on_step(self, values: Mapping[str, Any]) -> None:
        """A finished step's row of metrics.jsonl: step, loss, grad_norm, lr, tokens_per_s, ... Values come one step
        late, while the next one runs."""

    def on_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Validation after `step`: set name -> mean loss per token."""

    def on_save(self, path: Path) -> None:
        """A checkpoint is complete. Saves in the background are reported between two later steps."""
