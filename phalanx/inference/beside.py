"""The engine beside training: text from the weights and the layout that train, while they train.

Weights that are sharded (ZeRO-3 / FSDP) are gathered block by block, as a forward of training gathers them. Nothing
that training reads is changed: no gradient, no tally, no random number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from phalanx.engine.model import Model
from phalanx.inference.engine import Engine, EngineOptions, Messages
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import forget_memory


class TrainedModel:
    """A model that trains, as engines use it. Made on all ranks together, once for a run.

    wait_s  seconds that ranks wait for each other in a step of an engine
    """

    def __init__(self, model: Model, wait_s: float = 600.0):
        self.model, self.messages = model, Messages(model.mesh.world, wait_s, model.mesh.pp.size)

    @contextmanager
    def engine(self, options: EngineOptions | None = None) -> Iterator[Engine]:
        """Inside, an engine over the weights as they are; no step of training may be made. Its memory is freed at the
        end. Collective: on rank 0 the caller submits, steps and at last pauses; all others `follow`.

        A step of it has no more tokens than a micro-batch of training, so that its activations need no more memory.
        ConfigError if not even one sequence fits into memory.
        """
        model = self.model
        options = options or EngineOptions()
        most = max(model.plan.most_tokens, options.sequences)
        with ExitStack() as after:
            after.callback(self._give_back)
            model.train(False)
            if model.fp8 is not None:  # a few tokens do not fill whole scaling blocks
                after.enter_context(model.fp8.without())
            model.buffers.ready()
            beside = InferenceModel(model.plan, model.mesh, model.stages, model.handlers, trains=True)
            yield Engine(beside, replace(options, tokens=min(options.tokens, most)), messages=self.messages)

    def _give_back(self) -> None:
        model = self.model
        model.stages.finish = None
        model.stages.outputs = {}
        for layer in model.routed:
            layer.dispatch = layer.env.ops.dispatch
        forget_memory([block for segment in model.blocks.values() for block in segment])
        model.train()
