"""Initial values of adapters that depend on the frozen matrices that they belong to: the same in every layout, because
each rank computes them from whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.checkpoint.adapters import module_of
from phalanx.config.run import Run
from phalanx.data_parallel.flat import FlatBucket
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.build import write_slot
from phalanx.engine.model import Model
from phalanx.layout.box import Box
from phalanx.layout.buckets import Slot
from phalanx.layout.param import Piece
from phalanx.nn.adapter import find_adapter
from phalanx.ops.quantized.base_weights import stored_values
from phalanx.planning.adapters import quantized_names
from phalanx.planning.blocks import whole_specs

ReadTensor = Callable[[str], Tensor]  # by its global name, a whole global tensor


@torch.no_grad()
def start_adapters(model: Model, read: ReadTensor) -> None:
    """Set what the method's `start` says, from the frozen matrices that `read` gives."""
    lora = model.plan.run.lora
    started = () if lora is None else find_adapter(lora.method).started
    if not started:
        return
    starts = Starts(model, read)
    for holder in model.buffers.holders:
        for slot in (s for s in holder.bucket.slots if not s.spec.exported):
            if all(module_of(piece.name)[1] in started for piece in slot.spec.pieces):
                starts.set(holder, slot)


class Starts:
    """The initial values of one matrix's adapter at a time."""

    def __init__(self, model: Model, read: ReadTensor):
        self._run, self._read, self._device = model.plan.run, read, model.mesh.device
        self._dtype = model.plan.env(model.mesh.at).weights.dtype
        self._pieces = {piece.name: piece for spec in whole_specs(self._run.model) for piece in spec.pieces}
        lora = self._run.lora
        self._quantized = frozenset[str]() if lora is None else quantized_names(self._run.model, lora)
        self._known: tuple[str, dict[str, Tensor]] = ("", {})

    def set(self, holder: FlatBucket | MatrixHome, slot: Slot) -> None:
        """A parameter of adapters, if the method says how it starts."""
        found = [(piece, self._value(piece)) for piece in slot.spec.pieces]
        if any(value is None for _, value in found):
            return
        storage = torch.zeros(slot.spec.shape, dtype=holder.values_dtype, device=self._device)
        for piece, value in found:
            piece.of(storage).copy_(value[piece.box.slices()])  # type: ignore[index]
        write_slot(holder, slot, storage)

    def _value(self, piece: Piece) -> Tensor | None:
        matrix, attribute = module_of(piece.name)
        if matrix not in self._pieces:
            return None
        if self._known[0] != matrix:
            self._known = matrix, self._of(matrix)
        return self._known[1].get(attribute)

    def _of(self, matrix: str) -> dict[str, Tensor]:
        lora = self._run.lora
        if lora is None:
            return {}
        stored = self._read(matrix).to(self._device, self._dtype)
        if matrix in self._quantized:
            stored = stored_values(stored, lora.base)
        oriented = stored.double().mT if self._pieces[matrix].transposed else stored.double()
        return find_adapter(lora.method).start(lora, matrix.removesuffix(".weight"), oriented)


def initial_tensors(run: Run, dtype: torch.dtype | None = None) -> ReadTensor:
    """The random initial values of a model's tensors, in a dtype; None: in that of the masters."""
    wide = torch.float64 if run.train.precision == "fp64" else torch.float32
    pieces = {piece.name: piece for spec in whole_specs(run.model) for piece in spec.pieces}

    def read(name: str) -> Tensor:
        piece = replace(pieces[name], box=Box.full(pieces[name].shape))
        whole = torch.zeros(piece.shape, dtype=dtype or wide)
        piece.init.fill(whole, piece, run.train.seed)
        return whole

    return read
