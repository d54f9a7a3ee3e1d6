"""A step of Muon without one of its techniques, beside the whole: `bench step` of the same config.

python benchmarks/muon_without.py gram bench step benchmarks/configs/w1.yaml optim.name=muon

gram     iterations work on the matrix itself, also where the Gram matrix of its shorter side is smaller
homes    matrices go to ranks in turn, whatever their updates cost (ranks are started by torchrun)
overlap  gradients go to their homes when backward is over, and weights go back when all are updated
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    elif technique == "overlap":
        from phalanx.data_parallel.buffers import Buffers
        from phalanx.data_parallel.homes import MatrixHome

        send = MatrixHome.send_weights

        def all_at_the_end(home: MatrixHome, bucket: int) -> None:
            home.patient = False  # nothing arrives in the next forward
            for each in home.order if bucket == home.order[-1] else ():
                send(home, each)

        MatrixHome.send_weights = all_at_the_end
        Buffers.sending_early = lambda buffers: nullcontext()
    else:
        raise SystemExit(f"{technique!r} is not gram, homes or overlap")


if __name__ == "__main__":
    leave_out(sys.argv[1])
    main(sys.argv[2:])
