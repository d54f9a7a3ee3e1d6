"""The executor: carries out a rank's list of instructions in order, and the handlers that compute and pass messages.

Recv, Wait ──▶ _values ──▶ Forward ──▶ _values ──▶ Send
                           │      ▲
                           ▼      │ between segments of one stage: _inner
                         _saved ──▶ Backward (Offload and Fetch in between: _offloaded)
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
from phalanx.nn.module import Block
from phalanx.nn.offload import Mover, OffloadedActivations, free_storage
from phalanx.nn.run_block import run_block
from phalanx.pipeline.graphs import Eager
from phalanx.schedule.actions import Backward, Fetch, Forward, Instruction, Offload, Recv, Send, Value, Wait
from phalanx.sequence.batch import Batch

Handlers = Mapping[type, Callable[[Any], None]]


def execute(instructions: Sequence[Instruction], handlers: Handlers) -> None:
    for instruction in instructions:
        handlers[type(instruction)](instruction)


class Stages:
    """The blocks of one rank in segments, and the values in flight between them.

    Autograd's graph is cut at the borders of a segment: forward detaches the input, backward passes on its gradient.
    `begin` starts a step; after it `loss_sum` () float64 is the summed loss if the model's last stage is on this rank,
    else 0. With `loss_seed` the head computes its gradients in forward, else in backward.
    """

    def __init__(
        self,
        runs: dict[tuple[int, int], list[Block]],
        runs_per_stage: tuple[int, ...],
        mesh: Mesh,
        width: int,
        dtype: torch.dtype,
        runner: Eager | None = None,
        loss_seed: bool = True,
    ):
        self.runner = runner or Eager()
        self._ends = min(runs), max(runs)  # the first and the last segment of a micro-batch on this rank
        self.runs = runs
        self.runs_per_stage = runs_per_stage
        self.mesh, self.width, self.dtype = mesh, width, dtype
        self.loss_seed = loss_seed
        self.finish: Callable[[Block, Tensor, Batch], Tensor] | None = None  # computes this in place of the loss
        self.losses = torch.zeros(1, dtype=torch.float64, device=mesh.device)  # of each micro-batch
        self._none = torch.empty(0, dtype=dtype, device=mesh.device)  # the input of the model's first block
        self._values: dict[Value, Tensor] = {}  # named by their reader
        # Activations and gradients between segments of one stage, by (kind, stage, segment, micro-batch).
        self._inner: dict[tuple[str, int, int, int], Tensor] = {}
        # Input and output of each segment in flight, by (stage, segment, micro-batch).
        self._saved: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._offloaded: dict[tuple[int, int, int], OffloadedActivations] = {}  # if a block of it is
        self.offloaded_bytes = 0  # copied to the host in this step
        self._receiving: dict[Value, Work] = {}
        self._sending: list[Work] = []

    def begin(self, batches: Sequence[Batch], seed: Tensor | None) -> None:
        """Start a step. `batches`: one per micro-batch. `seed` (): gradient of the summed loss; None: forward only."""
        self.seed = None if seed is None else self.runner.begin(seed, batches)
        self.batches = [replace(b, loss_seed=self.seed, late=not self.loss_seed) for b in batches]
        self.outputs: dict[int, Tensor] = {}
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
        left = [*self._values, *self._inner, *self._saved, *self._receiving]
        if left:
            raise RuntimeError(f"the schedule left values behind: {left[:4]}")

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            Forward: self.forward,
            Backward: self.backward,
            Recv: self.recv,
            Wait: self.wait,
            Send: self.send,
            Offload: self.offload,
            Fetch: self.fetch,
        }

    def is_last(self, stage: int, run: int) -> bool:
        return stage == len(self.runs_per_stage) - 1 and run == self.runs_per_stage[stage] - 1

    def forward(self, i: Forward) -> None:
        x, batch, where = self._input(i), self.batches[i.mb], (i.stage, i.run)
        if self.seed is not None:
            offloaded = None
            if any(block.offloaded for block in self.runs[where]):
                offloaded = self._offloaded[i.stage, i.run, i.mb] = OffloadedActivations(self._mover)
            x, y = self.runner.forward(where, i.mb, x, batch, partial(self._compute, where, offloaded=offloaded))
            self._saved[i.stage, i.run, i.mb] = (x, y)
        else:
            with torch.no_grad():
                y = self._compute(where, x, batch)
            if where == self._ends[1]:
                batch.forget()
        out = y.detach()
        if self.is_last(i.stage, i.run):
            self.take_output(i.mb, out)
        elif i.run == self.runs_per_stage[i.stage] - 1:
            self._values[Value("act", i.stage + 1, i.mb)] = out
        else:
            self._inner["act", i.stage, i.run + 1, i.mb] = out

    def _compute(
        self, where: tuple[int, int], x: Tensor, batch: Batch, offloaded: OffloadedActivations | None = None
    ) -> Tensor:
        blocks, finish = self.runs[where], self.finish if self.is_last(*where) else None
        for block in blocks[:-1] if finish else blocks:
            x = run_block(block, x, batch, offloaded)
        return finish(blocks[-1], x, batch) if finish else x

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self.mesh.device)

    def offload(self, i: Offload) -> None:
        """Copy to the host what the segment saved, except what something else keeps alive anyway: the segment's output,
        weights, the batch and what was derived from it."""
        x, y = self._saved[i.stage, i.run, i.mb]
        offloaded = self._offloaded[i.stage, i.run, i.mb]
        weights = (p for block in self.runs[i.stage, i.run] for p in block.parameters())
        self.offloaded_bytes += offloaded.to_host((y, *weights, *self.batches[i.mb].tensors))
        if offloaded.holds(x):
            before = self._saved.get((i.stage, i.run - 1, i.mb))
            for tensor in (x, *(before[1:] if before else ())):  # the input is the output of the segment before
                free_storage(tensor)

    def fetch(self, i: Fetch) -> None:
        self._offloaded[i.stage, i.run, i.mb].to_device()

    def _wait_for_offloaded(self, i: Backward) -> None:
        """The device waits until what was offloaded is back. No reference to it may outlive this method: backward
        frees each saved tensor after its last use."""
        offloaded = self._offloaded.pop((i.stage, i.run, i.mb), None)
        if offloaded is not None:
            offloaded.wait()

    def take_output(self, mb: int, out: Tensor) -> None:
        """Keep the result of the last block: the micro-batch's summed loss, or the result of `finish`."""
        if self.finish is None:
            self.losses[mb].copy_(out)
        else:
            self.outputs[mb] = out

    def _input(self, i: Forward) -> Tensor:
        if i.run > 0:
            return self._inner.pop(("act", i.stage, i.run, i.mb))
        return self._values.pop(Value("act", i.stage, i.mb)) if i.stage > 0 else self._none

    def backward(self, i: Backward) -> None:
        x, y = self._saved.pop((i.stage, i.run, i.mb))
        self._wait_for_offloaded(i)
        dx = self.runner.backward((i.stage, i.run), i.mb, x, y, self._output_grad(i, y), last=i.run == 0)
        if (i.stage, i.run) == self._ends[0]:
            self.batches[i.mb].forget()
        if i.run > 0:
            self._inner["grad", i.stage, i.run - 1, i.mb] = dx  # type: ignore[assignment]
        elif i.stage > 0:
            kept = dx.clone() if self.runner.reuses_memory else dx  # type: ignore[union-attr]
            self._values[Value("grad", i.stage - 1, i.mb)] = kept  # type: ignore[assignment]

    def _output_grad(self, i: Backward, y: Tensor) -> Tensor:
        if self.is_last(i.stage, i.run):
            return self.seed.to(y.dtype)  # type: ignore[union-attr]
        if i.run < self.runs_per_stage[i.stage] - 1:
            return self._inner.pop(("grad", i.stage, i.run, i.mb))
        return self._values.pop(Value("grad", i.stage, i.mb))

    def recv(self, i: Recv) -> None:
        hosts, tokens = self._hosts, self.batches[i.mb].num_tokens // self.mesh.grid.tp
        buffer = torch.empty(tokens, self.width, dtype=self.dtype, device="cpu" if hosts else self.mesh.device)
        self._receiving[i.value] = (
            hosts.recv(buffer, i.peer) if hosts else self.mesh.edge(i.peer, self.mesh.at.pp).recv(buffer, source=0)
        )

    def wait(self, i: Wait) -> None:
        self._values[i.value] = self._receiving.pop(i.value).wait().to(self.mesh.device)

    def send(self, i: Send) -> None:
        self._sending = [work for work in self._sending if not work.over()]  # frees the buffers of complete sends
        hosts, value = self._hosts, self._values.pop(i.value)
        value = value.clone() if self.runner.reuses_memory and i.kind == "act" else value.contiguous()
        self._sending.append(
            hosts.send(value.cpu(), i.peer) if hosts else self.mesh.edge(self.mesh.at.pp, i.peer).send(value, to=1)
        )

    @property
    def _hosts(self) -> Axis | None:
        """Messages go through hosts in a step that captures graphs: then none may be pending on the devices."""
        return self.mesh.pp_hosts if self.runner.captures else None
