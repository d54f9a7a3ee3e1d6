"""The records of a training run, each defined once: name, unit, kind, and how the values of several steps become
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.base.records import Record
from phalanx.engine.fp8_state import fp8_scalars, shadow_scalars
from phalanx.observe.routing import routing_scalars


def _slow_scalars(values: Mapping[Any, float]) -> dict[str, float]:
    return {f"slow/rank-{rank}": ratio for rank, ratio in values.items()}


LOSS = Record("loss", "nats per token", reduction="mean")
GRAD_NORM = Record("grad_norm")
LR = Record("lr")
TOKENS_PER_S = Record("tokens_per_s", "tokens/s", reduction="median")
TOKENS_PER_S_PER_GPU = Record("tokens_per_s_per_gpu", "tokens/s", reduction="median")
TFLOPS_PER_GPU = Record("tflops_per_gpu", "TFLOP/s", reduction="median")
MFU = Record("mfu", "of the device's peak", reduction="median")
MEMORY = Record("memory_gib", "GiB", reduction="max")
TOKENS = Record("tokens", "tokens", "counter")
TRAINED_TOKENS = Record("trained_tokens", "tokens", reduction="mean")
PADDING = Record("padding", "of a step's tokens", reduction="mean")
CONSUMED_SAMPLES = Record("consumed_samples", "sequences", "counter")
SKIPPED = Record("skipped", "steps", "counter")
STEP_S = Record("step_s", "s", reduction="sum")
ETA_S = Record("eta_s", "s")
MTP_LOSS = Record("mtp_loss", "nats per token", reduction="mean")
CLIPPED_HEADS = Record("qk_clipped", "heads", reduction="max")
FP8_LOST = Record("fp8_lost", "of a tensor's values", reduction="max")
FP8_WORST = Record("fp8_worst", kind="text")
FP8 = Record("fp8", kind="table", scalars=fp8_scalars)
FP8_SHADOW = Record("fp8_shadow", kind="table", scalars=shadow_scalars)
FP8_FELL_BACK = Record("fp8_fell_back", kind="table")
SLOW = Record("slow", "times the others' time", "table", "max", _slow_scalars)
SAMPLES = Record("samples", kind="table")
EXPERTS = Record("experts", kind="table", scalars=routing_scalars)


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics.jsonl is that of a finished step, rather than one that a program logged itself, which
    may have a `loss` too."""
    return LOSS.name in row and STEP_S.name in row and TOKENS.name in row


METRIC = "task/"


def task_metric(name: str) -> Record:
    """The record of a metric that an objective logs."""
    return Record(f"{METRIC}{name}", reduction="mean")


TASKS = "tasks/"


def task_score(task: str, metric: str) -> Record:
    """The record of a score of one of train.eval_tasks."""
    return Record(f"{TASKS}{task}/{metric}")


def valid_loss(name: str) -> Record:
    """The record of a validation set's loss."""
    return Record(f"valid/{name}", "nats per token")
