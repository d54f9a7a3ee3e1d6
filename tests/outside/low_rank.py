"""An adapter from outside: y = W x + B (A x) for the linears whose names fit a glob, in one file.

Column linears: A sees this rank's tokens and is whole on each tp rank, B is cut like the base's outputs. Row linears: A
is cut like the base's inputs, B is whole. What travels over tp is `rank` features wide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.layout.param import Init, ParamSpec
from phalanx.nn.linear_method import PLAIN, AnyLinear, LinearMethod
from phalanx.nn.module import Module, OutputRows, column_spec, row_spec
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.matmul import gather_matmul, local_matmul, matmul_scatter

INIT = Init("normal", 0.02)


class LowRank(Module, LinearMethod):
    def __init__(self, linear: AnyLinear, rank: int):
        super().__init__(linear.env)
        pieces, everyone = linear.weight.spec.pieces, self.env.everyone
        outputs, inputs = (1, 0) if pieces[0].transposed else (0, 1)
        wide = pieces[0].shape[inputs]
        if linear.cut == 0:
            whole = OutputRows(f"{pieces[0].name}.lora_A", rank, 0, rank, everyone)
            rows = [
                OutputRows(f"{p.name}.lora_B", p.shape[outputs], p.box.start[outputs], p.box.stop[outputs], p.replicas)
                for p in pieces
            ]
            self.lora_A = self.own(column_spec([whole], wide, INIT))
            self.lora_B = self.own(column_spec(rows, rank, INIT))
        else:
            (base,) = pieces
            own = base.box.start[inputs], base.box.stop[inputs]
            height = base.shape[outputs]
            self.lora_A = self.own(row_spec(f"{base.name}.lora_A", rank, wide, *own, INIT))
            self.lora_B = self.own(
                column_spec([OutputRows(f"{base.name}.lora_B", height, 0, height, everyone)], rank, INIT)
            )

    def own(self, spec: ParamSpec) -> Parameter:
        """A parameter that Hugging Face folders do not have."""
        return self.param(replace(spec, exported=False))

    def gather_matmul(self, x: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        low = local_matmul(x, self.lora_A)
        return super().gather_matmul(x, weight, tp, bias) + gather_matmul(low, self.lora_B, tp)

    def matmul_scatter(self, h: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        low = matmul_scatter(h, self.lora_A, tp)
        return super().matmul_scatter(h, weight, tp, bias) + local_matmul(low, self.lora_B)

    def is_plain(self, weight: Parameter) -> bool:
        return False


@dataclass(frozen=True)
class LowRankLinears:
    """Which linears have an adapter."""

    rank: int
    glob: str = "*"

    def method_of(self, linear: AnyLinear) -> LinearMethod:
        fits = not linear.experts and all(fnmatchcase(name, self.glob) for name in linear.names)
        return LowRank(linear, self.rank) if fits else PLAIN
