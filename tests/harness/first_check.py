"""What the first check of a run's Triton kernels costs, without a GPU: `python -m tests.harness.first_check CONFIG
[a.b=c ...]` prints for each op how many kernels its cases in bf16 compile for sm_90 and the seconds of CPU that takes,
and those of the reference in float64 with which they would be compared.

Kernels are compiled as they would be launched, with everything that is known of their arguments, and not launched; so
what an op goes on to do with their results may fail.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from phalanx.config.read import load_run
from phalanx.engine.agree import used_ops
from phalanx.forecast.decide import make_plan
from phalanx.ops import proof
from phalanx.ops.op import Case, Op, compared_cases, dtype_of, only


class Hopper:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def cpu_seconds() -> float:
    """Of this process and of the assemblers that it has started."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


class Compiled:
    """seconds: by the name of a kernel, of each form of it that was compiled."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.launch = JITFunction.run

    def instead(self, kernel: Any, *call: Any, **how: Any) -> Any:
        """Stands in for a launch."""
        forms, before = self.forms(kernel), cpu_seconds()
        made = self.launch(kernel, *call, **how | {"warmup": True})
        if self.forms(kernel) > forms:
            self.seconds[kernel.__name__].append(cpu_seconds() - before)
        return made

    @staticmethod
    def forms(kernel: Any) -> int:
        return sum(len(kept[0]) for kept in kernel.device_caches.values())


def reference(op: Op, case: Case, kind: torch.dtype) -> None:
    with torch.enable_grad(), only(op):
        proof.run_case(case, kind, "plain", exact=True)


def line(op: Op, compiled: Compiled) -> str | None:
    """Of an op; None: none of its implementations is checked."""
    compiled.seconds.clear()
    checked = [made for made in op.choices if made.checked]
    compared = 0.0
    for made in checked:
        trial = replace(made, checked=False, tunings=made.tunings[:1])
        for case in compared_cases(op, made, torch.bfloat16):
            kind = dtype_of(case, torch.bfloat16)
            with suppress(RuntimeError, IndexError), torch.enable_grad(), only(op, trial):
                proof.run_case(case, kind, "triton")
            before = cpu_seconds()
            reference(op, case, kind)
            compared += cpu_seconds() - before
    every = [seconds for each in compiled.seconds.values() for seconds in each]
    kernels = ", ".join(f"{name} {len(each)}: {sum(each):.2f}" for name, each in compiled.seconds.items())
    return f"{op.name:<14} {len(every):>3} {sum(every):>7.2f} s {compared:>6.2f} s  {kernels}" if checked else None


def main(config: str, *overrides: str) -> None:
    compiled = Compiled()
    driver.set_active(Hopper())  # type: ignore[arg-type]
    JITFunction.run = compiled_run(compiled)  # type: ignore[method-assign]
    plan = make_plan(load_run(config, ["train.precision=bf16", *overrides]), 1)
    print("op            kernels  compiling  reference")
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder  # nothing is found that was compiled before
        for op in used_ops(plan):
            found = line(op, compiled)
            if found is not None:
                print(found, flush=True)


def compiled_run(compiled: Compiled) -> Any:
    def run(kernel: Any, *call: Any, **how: Any) -> Any:
        return compiled.instead(kernel, *call, **how)

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
