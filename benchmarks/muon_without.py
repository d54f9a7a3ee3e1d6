"""A step of Muon without one of its techniques, beside the whole: `bench step` of the same config.

python benchmarks/muon_without.py gram bench step benchmarks/configs/w1.yaml optim.name=muon

gram   iterations work on the matrix itself, also where the Gram matrix of its shorter side is smaller
homes  matrices go to ranks in turn, whatever their updates cost (ranks are started by torchrun)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from phalanx.cli.main import main
from phalanx.layout.param import ParamSpec
from phalanx.ops.optimizer import orthogonal


def in_turn(matrices: Sequence[ParamSpec], ranks: int, cost: Callable[[ParamSpec], float] | None = None) -> list[int]:
    return list(islice(cycle(range(ranks)), len(matrices)))


def leave_out(technique: str) -> None:
    if technique == "gram":
        orthogonal.TOGETHER = 1
    elif technique == "homes":
        from phalanx.data_parallel import homes as exchange
        from phalanx.forecast import memory

        exchange.homes_of = memory.homes_of = in_turn
    else:
        raise SystemExit(f"{technique!r} is not gram or homes")


if __name__ == "__main__":
    leave_out(sys.argv[1])
    main(sys.argv[2:])
