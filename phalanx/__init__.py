"""Phalanx trains transformer language models of any size on any number of devices.

    import phalanx as px

    run = px.load("run.yaml", "train.steps=5")
    px.check(run)                  # every problem at once, as exceptions
    print(px.plan(run, ranks=8))   # stages, memory, messages, FLOPs; needs no GPU
    px.train(run)

and `with px.session(run) as s:` for a loop of your own; `with px.sampler("runs/first") as s:` for text. `px.Family` is
for model families of your own, `px.Optimizer` and `@px.optimizer` for optimizers, `@px.lr_schedule` for learning rates,
`px.TokenObjective`, `px.SequenceObjective`, `px.EmbeddingObjective` and `@px.objective` for losses, `px.Adapter` and
`@px.adapter` for fine-tuning beside frozen weights, `px.Sink` and `@px.sink` for places that numbers go to,
`px.DataSource` and `@px.source` for samples, `@px.pipeline_schedule` for the order of a pipeline's work, `px.Callback`
for programs that listen.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.base.version import VERSION as __version__

if TYPE_CHECKING:
    from phalanx.api import check, load, plan, sampler, session, train
    from phalanx.base.records import Record, Row, Sink, SinkStart, sink
    from phalanx.config.run import Run
    from phalanx.data.own_source import DataSource, SourceStart, source
    from phalanx.layout.param import Piece
    from phalanx.models.family import BlockMaker, Family
    from phalanx.nn.adapter import Adapter, LinearPiece, adapter
    from phalanx.nn.objective import EmbeddingObjective, SequenceObjective, StepTexts, TokenObjective, objective
    from phalanx.nn.parameter import Parameter
    from phalanx.ops.dense.token_loss import LogitStats
    from phalanx.ops.optimizer.state import Moment
    from phalanx.optim.config import OptimConfig
    from phalanx.optim.optimizer import Optimizer, ParamRange, WholeMatrix, optimizer
    from phalanx.optim.schedules import LRPoint, lr_schedule
    from phalanx.schedule.actions import Action
    from phalanx.schedule.generators import PipelineShape, pipeline_schedule
    from phalanx.sequence.streams import StreamSpec
    from phalanx.training.callbacks import Callback

PUBLIC = {
    "Action": "phalanx.schedule.actions",
    "Adapter": "phalanx.nn.adapter",
    "BlockMaker": "phalanx.models.family",
    "Callback": "phalanx.training.callbacks",
    "DataSource": "phalanx.data.own_source",
    "EmbeddingObjective": "phalanx.nn.objective",
    "Family": "phalanx.models.family",
    "LRPoint": "phalanx.optim.schedules",
    "LinearPiece": "phalanx.nn.adapter",
    "LogitStats": "phalanx.ops.dense.token_loss",
    "Moment": "phalanx.ops.optimizer.state",
    "OptimConfig": "phalanx.optim.config",
    "Optimizer": "phalanx.optim.optimizer",
    "ParamRange": "phalanx.optim.optimizer",
    "Parameter": "phalanx.nn.parameter",
    "Piece": "phalanx.layout.param",
    "PipelineShape": "phalanx.schedule.generators",
    "Record": "phalanx.base.records",
    "Row": "phalanx.base.records",
    "Run": "phalanx.config.run",
    "SequenceObjective": "phalanx.nn.objective",
    "Sink": "phalanx.base.records",
    "SinkStart": "phalanx.base.records",
    "SourceStart": "phalanx.data.own_source",
    "StepTexts": "phalanx.nn.objective",
    "StreamSpec": "phalanx.sequence.streams",
    "TokenObjective": "phalanx.nn.objective",
    "WholeMatrix": "phalanx.optim.optimizer",
    "adapter": "phalanx.nn.adapter",
    "check": "phalanx.api",
    "load": "phalanx.api",
    "lr_schedule": "phalanx.optim.schedules",
    "objective": "phalanx.nn.objective",
    "optimizer": "phalanx.optim.optimizer",
    "pipeline_schedule": "phalanx.schedule.generators",
    "plan": "phalanx.api",
    "sampler": "phalanx.api",
    "session": "phalanx.api",
    "sink": "phalanx.base.records",
    "source": "phalanx.data.own_source",
    "train": "phalanx.api",
}
__all__ = [
    "Action",
    "Adapter",
    "BlockMaker",
    "Callback",
    "DataSource",
    "EmbeddingObjective",
    "Family",
    "LRPoint",
    "LinearPiece",
    "LogitStats",
    "Moment",
    "OptimConfig",
    "Optimizer",
    "ParamRange",
    "Parameter",
    "Piece",
    "PipelineShape",
    "Record",
    "Row",
    "Run",
    "SequenceObjective",
    "Sink",
    "SinkStart",
    "SourceStart",
    "StepTexts",
    "StreamSpec",
    "TokenObjective",
    "WholeMatrix",
    "__version__",
    "adapter",
    "check",
    "load",
    "lr_schedule",
    "objective",
    "optimizer",
    "pipeline_schedule",
    "plan",
    "sampler",
    "session",
    "sink",
    "source",
    "train",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import phalanx` alone loads nothing."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    from phalanx.base.garbage import seldom_collected

    with seldom_collected():
        value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
