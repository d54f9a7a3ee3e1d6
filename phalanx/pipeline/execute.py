"""The executor: carries out a rank's list of instructions in order, and the handlers that compute and pass messages.

Recv, Wait ──▶ _values ──▶ Forward ──▶ _values ──▶ Send
                           │      ▲
                           ▼      │ between segments of one stage: _inner
                         _saved ──▶ Backward (Offload and Fetch in between: _offloaded)
                           └──────▶ InputGrad ──▶ _pending ──▶ WeightGrad
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from phalanx.base.pairwise import pairwise_sum
from phalanx.comm.axis import Axis, Work
from phalanx.comm.mesh import Mesh
from phalanx.nn.adapted_linear import AdaptedMethod
from phalanx.nn.module import Block
from phalanx.nn.offload import Mover, OffloadedActivations, free_storage
from phalanx.nn.run_block import run_block
from phalanx.ops.dense.grads import PendingGradients
from phalanx.pipeline.graphs import Eager, Gradients, Tensors
from phalanx.schedule.actions import (
    Backward,
    Fetch,
    Forward,
    InputGrad,
    Instruction,
    Offload,
    Recv,
    Send,
    Value,
    Wait,
    WeightGrad,
)
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import Border, check_shapes, hidden, pack, sent, unpack

Handlers = Mapping[type, Callable[[Any], None]]


def execute(instructions: Sequence[Instruction], handlers: Handlers) -> None:
    for instruction in instructions:
        handlers[type(instruction)](instruction)


class Stages:
    """The blocks of one rank in segments, and the values in flight between them.

    Autograd's graph is cut at the borders of a segment: forward detaches the input, backward passes on its gradient.
    `begin` starts a step; after it `loss_sum` () float64 is the summed loss if the model's last stage is on this rank,
    else 0. `borders`: the streams that the first block of each (stage, segment) of the model is given. With `loss_seed`
    the head computes its gradients in forward, else in backward.
    """

    def __init__(
        self,
        segments: dict[tuple[int, int], list[Block]],
        segments_per_stage: tuple[int, ...],
        mesh: Mesh,
        borders: Mapping[tuple[int, int], Border],
        runner: Eager | None = None,
        loss_seed: bool = True,
    ):
        self.runner = runner or Eager()
        self.runner.without_gradient = {(0, 0), *(where for where, border in borders.items() if not border[0].learns)}
        self._ends = min(segments), max(segments)  # the first and the last segment of a micro-batch on this rank
        self.segments = segments
        self.segments_per_stage = segments_per_stage
        self.mesh, self.borders = mesh, borders
        self.loss_seed = loss_seed
        self.settles = True  # whether weights may have changed where a step begins
        self._settled: set[tuple[int, int]] = set()  # segments whose adapters have seen this step's weights
        self.finish: Callable[[Block, Any, Batch], Tensor] | None = None  # computes this in place of the loss
        self.losses = torch.zeros(1, dtype=torch.float64, device=mesh.device)  # of each micro-batch
        # the input of the model's first block
        self._none = (torch.empty(0, dtype=borders[0, 0][0].dtype, device=mesh.device),)
        self._values: dict[Value, Gradients] = {}  # named by their reader: one tensor per stream
        # Activations and gradients between segments of one stage, by (kind, stage, segment, micro-batch).
        self._inner: dict[tuple[str, int, int, int], Gradients] = {}
        # Inputs and outputs of each segment in flight, by (stage, segment, micro-batch).
        self._saved: dict[tuple[int, int, int], tuple[Tensors, Tensors]] = {}
        # Weight gradients that wait, by the same.
        self._pending: dict[tuple[int, int, int], PendingGradients] = {}
        self._offloaded: dict[tuple[int, int, int], OffloadedActivations] = {}  # if a block of it is
        self.offloaded_bytes = 0  # copied to the host in this step
        self._receiving: dict[Value, list[Work]] = {}
        self._sending: list[Work] = []

    def begin(self, batches: Sequence[Batch], seed: Tensor | None) -> None:
        """Start a step. `batches`: one per micro-batch. `seed` (): gradient of the summed loss; None: forward only."""
        self.seed = None if seed is None else self.runner.begin(seed, batches)
        self.batches = [replace(b, loss_seed=self.seed, late=not self.loss_seed) for b in batches]
        self.outputs: dict[int, Tensor] = {}
        if self.settles:
            self._settled.clear()
        self.offloaded_bytes = 0
        self.losses = torch.zeros(len(batches), dtype=torch.float64, device=self.mesh.device)

    @property
    def loss_sum(self) -> Tensor:
        return pairwise_sum(self.losses)

    def end(self) -> None:
        """End a step: wait for the sends, so that their buffers are freed."""
        for work in self._sending:
            work.wait()
        self._sending.clear()
        if self.seed is not None:
            self.runner.end()
        left = [*self._values, *self._inner, *self._saved, *self._pending, *self._receiving]
        if left:
            raise RuntimeError(f"the schedule left values behind: {left[:4]}")

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            Forward: self.forward,
            Backward: self.backward,
            InputGrad: self.input_grad,
            WeightGrad: self.weight_grad,
            Recv: self.recv,
            Wait: self.wait,
            Send: self.send,
            Offload: self.offload,
            Fetch: self.fetch,
        }

    def is_last(self, stage: int, segment: int) -> bool:
        return stage == len(self.segments_per_stage) - 1 and segment == self.segments_per_stage[stage] - 1

    def settle(self, where: tuple[int, int]) -> None:
        """Once for a segment, while its weights are there: what adapters compute from weights alone."""
        if where in self._settled:
            return
        self._settled.add(where)
        for method in (m for block in self.segments[where] for m in block.modules()):
            if isinstance(method, AdaptedMethod) and method.on:
                method.settle()

    def forward(self, i: Forward) -> None:
        xs, batch, where = self._input(i), self.batches[i.mb], (i.stage, i.segment)
        self.settle(where)
        if self.seed is not None:
            offloaded = None
            if any(block.offloaded for block in self.segments[where]):
                offloaded = self._offloaded[i.stage, i.segment, i.mb] = OffloadedActivations(self._mover)
            xs, ys = self.runner.forward(where, i.mb, xs, batch, partial(self._compute, where, offloaded=offloaded))
            self._saved[i.stage, i.segment, i.mb] = (xs, ys)
        else:
            with torch.no_grad():
                ys = self._compute(where, xs, batch)
            if where == self._ends[1]:
                batch.forget()
        out = tuple(y.detach() for y in ys)
        if self.is_last(i.stage, i.segment):
            self.take_output(i.mb, out[0])
        elif i.segment == self.segments_per_stage[i.stage] - 1:
            self._values[Value("act", i.stage + 1, i.mb)] = out
        else:
            self._inner["act", i.stage, i.segment + 1, i.mb] = out

    def _compute(
        self, where: tuple[int, int], xs: Tensors, batch: Batch, offloaded: OffloadedActivations | None = None
    ) -> Tensors:
        blocks, is_last = self.segments[where], self.is_last(*where)
        finish = self.finish if is_last else None
        x = unpack(xs, self.borders[where])
        for block in blocks[:-1] if finish else blocks:
            x = run_block(block, x, batch, offloaded)
        if finish:
            return (finish(blocks[-1], x if blocks[-1].takes_streams else hidden(x), batch),)
        return (hidden(x),) if is_last else pack(x, self._border_after(*where))

    def _border_after(self, stage: int, segment: int) -> Border:
        """The streams that a segment returns."""
        following = (stage, segment + 1)
        return self.borders[following if following in self.borders else (stage + 1, 0)]

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self.mesh.device)

    def offload(self, i: Offload) -> None:
        """Copy to the host what the segment saved, except what something else keeps alive anyway: the segment's output,
        weights, the batch and what was derived from it."""
        xs, ys = self._saved[i.stage, i.segment, i.mb]
        offloaded = self._offloaded[i.stage, i.segment, i.mb]
        blocks = self.segments[i.stage, i.segment]
        weights = (p for block in blocks for p in block.parameters())
        self.offloaded_bytes += offloaded.to_host((*ys, *weights, *self.batches[i.mb].tensors))
        if len(xs) > 1 and not all(block.offloaded for block in blocks):
            return  # a block that is not offloaded may have saved a stream that passes others
        before = self._saved.get((i.stage, i.segment - 1, i.mb))
        for number, x in enumerate(xs):
            if offloaded.holds(x):
                free_storage(x)
                if before:  # the input is the output of the segment before
                    free_storage(before[1][number])

    def fetch(self, i: Fetch) -> None:
        self._offloaded[i.stage, i.segment, i.mb].to_device()

    def _wait_for_offloaded(self, i: Backward | InputGrad) -> None:
        """The device waits until what was offloaded is back. No reference to it may outlive this method: backward
        frees each saved tensor after its last use."""
        offloaded = self._offloaded.pop((i.stage, i.segment, i.mb), None)
        if offloaded is not None:
            offloaded.wait()

    def take_output(self, mb: int, out: Tensor) -> None:
        """Keep the result of the last block: the micro-batch's summed loss, or the result of `finish`."""
        if self.finish is None:
            self.losses[mb].copy_(out)
        else:
            self.outputs[mb] = out

    def _input(self, i: Forward) -> Tensors:
        if i.segment > 0:
            return self._inner.pop(("act", i.stage, i.segment, i.mb))  # type: ignore[return-value]
        return self._values.pop(Value("act", i.stage, i.mb)) if i.stage > 0 else self._none  # type: ignore[return-value]

    def input_grad(self, i: InputGrad) -> None:
        """A backward whose weight gradients wait."""
        with self.segments[i.stage, i.segment][0].env.weights.gradients.open() as pending:
            self.backward(i)
        self._pending[i.stage, i.segment, i.mb] = pending

    def weight_grad(self, i: WeightGrad) -> None:
        self._pending.pop((i.stage, i.segment, i.mb)).run()

    def backward(self, i: Backward | InputGrad) -> None:
        xs, ys = self._saved.pop((i.stage, i.segment, i.mb))
        self._wait_for_offloaded(i)
        where = (i.stage, i.segment)
        dxs = self.runner.backward(where, i.mb, xs, ys, self._output_grads(i, ys), last=i.segment == 0)
        if where == self._ends[0]:
            self.batches[i.mb].forget()
        if i.segment > 0:
            self._inner["grad", i.stage, i.segment - 1, i.mb] = dxs
        elif i.stage > 0:
            kept = tuple(dx if dx is None else dx.clone() for dx in dxs) if self.runner.reuses_memory else dxs
            self._values[Value("grad", i.stage - 1, i.mb)] = kept

    def _output_grads(self, i: Backward | InputGrad, ys: Tensors) -> Gradients:
        if self.is_last(i.stage, i.segment):
            return (self.seed.to(ys[0].dtype),)  # type: ignore[union-attr]
        if i.segment < self.segments_per_stage[i.stage] - 1:
            return self._inner.pop(("grad", i.stage, i.segment, i.mb))
        return self._values.pop(Value("grad", i.stage, i.mb))

    def _border_of(self, value: Value) -> Border:
        """The streams that a value of stages consists of."""
        return self.borders[value.stage + (value.kind == "grad"), 0]

    def recv(self, i: Recv) -> None:
        """Post the receives of all streams, of gradients those that there are."""
        hosts, batch, tp = self._hosts, self.batches[i.mb], self.mesh.grid.tp
        self._receiving[i.value] = posted = []
        for spec in sent(self._border_of(i.value), i.kind):
            buffer = spec.empty(batch, tp, "cpu" if hosts else self.mesh.device)
            posted.append(
                hosts.recv(buffer, i.peer) if hosts else self.mesh.edge(i.peer, self.mesh.at.pp).recv(buffer, source=0)
            )

    def wait(self, i: Wait) -> None:
        received = [work.wait().to(self.mesh.device) for work in self._receiving.pop(i.value)]
        border = self._border_of(i.value)
        if len(received) < len(border):  # gradients, and a stream has none
            came = dict(zip(sent(border, i.kind), received, strict=True))
            self._values[i.value] = tuple(came.get(spec) for spec in border)
        else:
            self._values[i.value] = tuple(received)

    def send(self, i: Send) -> None:
        self._sending = [work for work in self._sending if not work.over()]  # frees the buffers of complete sends
        hosts, values = self._hosts, self._values.pop(i.value)
        if i.kind == "act":
            check_shapes(values, self._border_of(i.value), self.batches[i.mb], self.mesh.grid.tp)  # type: ignore[arg-type]
        for value in (v for v in values if v is not None):  # of gradients those that there are
            value = value.clone() if self.runner.reuses_memory and i.kind == "act" else value.contiguous()
            self._sending.append(
                hosts.send(value.cpu(), i.peer) if hosts else self.mesh.edge(self.mesh.at.pp, i.peer).send(value, to=1)
            )

    @property
    def _hosts(self) -> Axis | None:
        """Messages go through hosts in a step that captures graphs: then none may be pending on the devices."""
        return self.mesh.pp_hosts if self.runner.captures else None
