"""Which implementations the ops of a run use: what the config asks for, and what the ranks agreed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.config.device_check import unfit_for_optional_kernels
from phalanx.config.run import Run
from phalanx.ops.op import Kernels


@dataclass(frozen=True)
class KernelsPlan:
    """`triton` and `cublaslt` are None until the ranks have met (engine.agree).

    mode       train.kernels; if `auto` would run different kernels on different ranks, those that run on all
    plain_ops  ops that run their reference in every mode
    unfit      for each op with a kernel from an optional package: the config values that this kernel does not support
    triton     whether Triton kernels run
    cublaslt   whether every rank has cuBLASLt
    """

    mode: Kernels
    plain_ops: tuple[str, ...]
    unfit: Mapping[str, Mapping[str, Any]]
    triton: bool | None = None
    cublaslt: bool | None = None

    @property
    def text(self) -> str:
        """What the config asks for."""
        return self.mode + (f", but plain {', '.join(self.plain_ops)}" if self.plain_ops else "")


def kernels_plan(run: Run) -> KernelsPlan:
    return KernelsPlan(run.train.kernels, tuple(run.train.plain_ops), unfit_for_optional_kernels(run))
