"""Scores of tasks: rows for people, JSON, and the calibration of multiple-choice tasks from the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.text_table import table
from phalanx.evaluation.calibration import Calibration, calibration, plain_calibration

NAME, METRIC = 28, 22  # characters of a task's and of a metric's name in a table
NO_FILTER = "none"


@dataclass(frozen=True)
class TaskScore:
    """One metric of a task or a group of tasks. stderr: None if the harness has none. filter: of answers, NO_FILTER if
    they are as they came. few_shot: examples before a question; None for groups of unequal ones."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    few_shot: int | None
    samples: int | None


@dataclass(frozen=True)
class TaskResults:
    scores: tuple[TaskScore, ...]
    calibrations: Mapping[str, Calibration]
    versions: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "scores": [asdict(score) for score in self.scores],
            "calibration": {name: plain_calibration(each) for name, each in self.calibrations.items()},
            "versions": dict(self.versions),
        }


def results_of(found: Mapping[str, Any], tasks: Mapping[str, Any]) -> TaskResults:
    """From what the harness's `evaluate` returns, with its samples."""
    scores: list[TaskScore] = []
    for name, metrics in found["results"].items():
        better = found["higher_is_better"].get(name) or {}
        samples = (found["n-samples"].get(name) or {}).get("effective")
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            scores.append(
                TaskScore(
                    task=name,
                    metric=metric,
                    filter=kind,
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    higher_is_better=better.get(metric),
                    few_shot=found["n-shot"].get(name),
                    samples=samples,
                )
            )
    calibrations = {}
    for name, task in tasks.items():
        questions = choices_of(task, found["samples"][name])
        if questions:
            calibrations[name] = calibration([row for row, _ in questions], [answer for _, answer in questions])
    return TaskResults(tuple(scores), calibrations, found["versions"])


def choices_of(task: Any, samples: Sequence[Mapping[str, Any]]) -> list[tuple[list[float], int]]:
    """Of a multiple-choice task, log-likelihoods of each question's choices and the number of its right one; questions
    with several right ones, or none, are left out."""
    if task.OUTPUT_TYPE != "multiple_choice" or not samples:
        return []
    first, found = samples[0]["filter"], []
    for sample in samples:
        if sample["filter"] != first:
            continue
        choices = task.doc_to_choice(sample["doc"])
        right = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
        right = choices.index(right) if isinstance(right, str) and right in choices else right
        row = [float(logprob) for logprob, _ in sample["filtered_resps"][: len(choices)]]
        if isinstance(right, int) and 0 <= right < len(row):
            found.append((row, right))
    return found


def text_of(results: TaskResults) -> str:
    """At most 80 characters wide."""
    rows = [("task", "shots", "metric", "value", "stderr")]
    before = None
    for score in results.scores:
        metric = score.metric if score.filter == NO_FILTER else f"{score.metric} ({score.filter})"
        shots = "" if score.few_shot is None else str(score.few_shot)
        same = score.task == before
        before = score.task
        error = "" if score.stderr is None or score.stderr != score.stderr else number(score.stderr)
        task = "" if same else shortened(score.task, NAME)
        rows.append((task, "" if same else shots, shortened(metric, METRIC), number(score.value), error))
    text = table(rows, left=(0, 2))
    if not results.calibrations:
        return text
    rows = [("calibration", "ECE", "Brier", "temperature", "ECE at it")]
    for name, each in results.calibrations.items():
        fitted = "none" if each.temperature is None else f"{each.temperature:.3f}"
        scaled = "" if each.scaled_ece is None else f"{each.scaled_ece:.4f}"
        rows.append((shortened(name, NAME), f"{each.ece:.4f}", f"{each.brier:.4f}", fitted, scaled))
    return f"{text}\n\n{table(rows, left=(0,))}"


def number(value: float) -> str:
    """With 4 places, or as many digits as stay within 10 characters."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
