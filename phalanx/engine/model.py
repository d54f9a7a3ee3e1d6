"""Model: this rank's part of a model, and what computes with it. What training adds is State (engine.build)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from torch import nn

from phalanx.base.dataclass import dataclass
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.engine.agree import Agreed
from phalanx.engine.fp8_state import Fp8State
from phalanx.nn.head import Head
from phalanx.nn.module import Block
from phalanx.nn.moe import MISSING, MoE
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.nn.pooled_head import PooledHead
from phalanx.nn.scored_attention import ScoredAttention
from phalanx.optim.qk_clip import scored_layers
from phalanx.pipeline.execute import Handlers, Stages
from phalanx.pipeline.graphs import Eager
from phalanx.planning.plan import Plan
from phalanx.schedule.actions import Instruction


@dataclass
class Model:
    """Blocks and weights of one rank. A process may have several models: one that trains, others that it is compared
    with.

    plan      the final one, on which all ranks have `agreed`
    buffers   the flat memory of weights, masters and gradients
    routed    its layers with experts; mtp: its block of multi-token prediction, if any
    metrics   names of the metrics that the objective logs; heads: the heads on this rank, which tally them
    fp8       the state of train.fp8, if the run uses it
    programs  caches the instruction lists by (number of micro-batches, backward or not)
    """

    plan: Plan
    mesh: Mesh
    agreed: Agreed
    blocks: dict[tuple[int, int], list[Block]]
    buffers: Buffers
    stages: Stages
    handlers: Handlers
    routed: tuple[MoE, ...] = ()
    mtp: tuple[MultiTokenPrediction, ...] = ()
    metrics: tuple[str, ...] = ()
    heads: tuple[Head | PooledHead, ...] = ()
    fp8: Fp8State | None = None
    programs: dict[tuple[int, bool], tuple[Instruction, ...]] = field(default_factory=dict)

    def program(self, num_micro_batches: int, backward: bool = True) -> tuple[Instruction, ...]:
        key = (num_micro_batches, backward)
        if key not in self.programs:
            self.programs[key] = self.plan.proved_program(num_micro_batches, backward).lists[self.mesh.at.pp]
        return self.programs[key]

    @property
    def modules(self) -> nn.ModuleList:
        """This rank's blocks, in order. At layout.sharding=0 any torch optimizer may update `modules.parameters()`."""
        return nn.ModuleList(block for segment in self.blocks.values() for block in segment)

    @property
    def scored(self) -> list[ScoredAttention]:
        """Its layers of attention."""
        return scored_layers(m for block in self.modules for m in block.modules())

    def forget_scores(self) -> None:
        """Scores that were measured since the last update are not those of a step."""
        for layer in self.scored:
            if layer.largest is not None:
                layer.largest.forget()

    @contextmanager
    def by_all_to_all(self) -> Iterator[None]:
        """To repeat a step's gradients: inside, tokens travel to their experts by all-to-all, which always has room."""
        self.buffers.zero_grads()
        self.forget_scores()
        runner, self.stages.runner = self.stages.runner, Eager()
        tallies = [layer.tally for layer in self.routed if layer.tally is not None]
        missing = [tally[MISSING].clone() for tally in tallies]
        for layer, tally in zip(self.routed, tallies):
            tally.zero_()
            layer.dispatch = "alltoall"
        try:
            yield
        finally:
            self.stages.runner = runner
            for layer, tally, rows in zip(self.routed, tallies, missing):
                layer.dispatch = layer.env.ops.dispatch
                tally[MISSING] += rows  # for the log

    def train(self, mode: bool = True) -> None:
        """Turn dropout and recomputation on or off."""
        for segment in self.blocks.values():
            for block in segment:
                block.train(mode)
