"""Rules of lora.base: what a quantized base is not combined with."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import problem
from phalanx.config.run import Run


def check_base(run: Run) -> list[Problem]:
    lora, fp8 = run.lora, run.train.fp8
    if lora is None or lora.base == "bf16" or fp8 is None:
        return []
    rule = "must be bf16 with train.fp8, which quantizes weights itself"
    return [problem("lora", lora, "base", rule, {"train.fp8.recipe": fp8.recipe}, ("bf16",))]
