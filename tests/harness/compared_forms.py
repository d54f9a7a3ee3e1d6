"""What the first check of a run's kernels compiles for an H200, measured without a GPU: by op, compiled forms and
seconds of a core.

python -m tests.harness.compared_forms [--dtype bfloat16] [OP ...]

Launches compile for sm_90 and do nothing. Tensors are on the CPU and stand for the GPU's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="compared-forms-")

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from phalanx.ops import kernel_tools, proof
from phalanx.ops.op import Implementation, Op, compared_cases, dtype_of, only, table

SHARED = 232448  # bytes that a program may have
PROCESSORS = 132


class Hopper:
    """A driver of an H200 that is not there."""

    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (0, 0, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED, "multiprocessor_count": PROCESSORS},
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *call: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install() -> None:
    """For the life of the process. What no kernel writes is zero, so that numbers of rows and experts are legal."""
    driver.set_active(Hopper())
    torch.Tensor.is_cuda = property(lambda x: True)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    kernel_tools._processors = lambda index: PROCESSORS


def compile_of(op: Op, made: Implementation, dtype: torch.dtype) -> None:
    """All that why_wrong compiles; results are not compared."""
    trial = replace(made, checked=False, tunings=made.tunings[:1])
    for case in compared_cases(op, made, dtype):
        with only(op, trial):
            proof.run_case(case, dtype_of(case, dtype), "triton")


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("ops", nargs="*", help="names of ops; default: all")
    reader.add_argument("--dtype", default="bfloat16")
    asked = reader.parse_args()
    install()
    dtype, forms = getattr(torch, asked.dtype), list[str]()
    knobs.compilation.listener = lambda src, **more: forms.append(src.fn.__name__)
    for op in table():
        for made in op.candidates if not asked.ops or op.name in asked.ops else ():
            if made.checked and (made.dtypes is None or dtype in made.dtypes):
                forms.clear()
                before = sum(os.times()[:4])
                compile_of(op, made, dtype)
                kernels = ", ".join(f"{forms.count(name)} {name}" for name in dict.fromkeys(forms))
                print(f"{op.name:16} {len(forms):3} forms {sum(os.times()[:4]) - before:6.1f} s  {kernels}", flush=True)


if __name__ == "__main__":
    main()
