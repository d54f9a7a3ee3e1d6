"""Which implementations a run's ops take: what the config asks for, and what ranks agreed on when they met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.device_check import unfit_for_optional_kernels
from phalanx.config.run import Run
from phalanx.ops.op import Kernels


@dataclass(frozen=True)
class KernelsPlan:
    """The last two are None until ranks have met (engine.agree).

    mode       train.kernels; where `auto` would run other kernels on some ranks than on others, those that run on all
    plain_ops  ops that run their reference whatever the mode is
    unfit      by op that has a kernel from an optional package, what in the config that kernel cannot do
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
        """As the config asks for them."""
        return self.mode + (f", but plain {', '.join(self.plain_ops)}" if self.plain_ops else "")


def kernels_plan(run: Run) -> KernelsPlan:
    return KernelsPlan(run.train.kernels, tuple(run.train.plain_ops), unfit_for_optional_kernels(run))
