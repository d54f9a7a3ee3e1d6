"""Streams: what crosses a block border, as named tensors. Nearly all models have one, "hidden".

    embedding ──hidden, memory──▶ layer ──hidden, memory──▶ layer ──hidden──▶ head

A block declares what goes on from it (`nn.module.Block.streams`); messages between pipeline stages, static buffers of
CUDA graphs, and the forecast follow from that before any process group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.batch import Batch

HIDDEN = "hidden"
Streams = dict[str, Tensor]
"""Streams by name: what blocks that handle more than "hidden" take and return."""


def token_rows(batch: Batch, tp: int) -> int:
    """One row for each token, sharded over tp like "hidden"."""
    return batch.num_tokens // tp


@dataclass(frozen=True)
class StreamSpec:
    """One stream at a block border: on each rank a tensor (rows, width_on(tp)).

    width    of the whole
    rows     (this rank's batch, size of tp) -> rows on this rank
    heads    the width is of so many heads, sharded over tp like keys: each rank has its own, ranks that share a head
             the same one; 0: each rank has the whole width
    dtype    None: the compute dtype. A stream with an integer dtype has no gradient
    learns   whether anything before this border is trained; if not, the stream has no gradient either
    """

    name: str
    width: int
    rows: Callable[[Batch, int], int] = token_rows
    dtype: torch.dtype | None = None
    learns: bool = True
    heads: int = 0

    def width_on(self, tp: int) -> int:
        """Features on each of so many ranks."""
        return self.width // self.heads * max(1, self.heads // tp) if self.heads else self.width

    def of(self, compute: torch.dtype) -> StreamSpec:
        """The same with its dtype filled in."""
        return self if self.dtype else replace(self, dtype=compute)

    @property
    def has_gradient(self) -> bool:
        return self.learns and (self.dtype is None or self.dtype.is_floating_point)

    def empty(self, batch: Batch, tp: int, device: torch.device | str) -> Tensor:
        """An uninitialized tensor for this stream; the dtype must be filled in."""
        return torch.empty(self.rows(batch, tp), self.width_on(tp), dtype=self.dtype, device=device)


Border = tuple[StreamSpec, ...]
"""The streams that cross one block border, in the order in which they are sent."""


def checked(border: Border, block: str) -> Border:
    """The streams that a block declares. TypeError if "hidden" is not among them, or a name occurs twice."""
    found = [spec.name for spec in border]
    if HIDDEN not in found or len(set(found)) < len(found):
        raise TypeError(
            f"{block}.streams() returns {names(border) or 'nothing'}: {HIDDEN!r} must be among them, and each once"
        )
    return tuple(border)


def pack(x: Tensor | Streams, border: Border) -> tuple[Tensor, ...]:
    """The tensors of a border, in its order. TypeError if they are not those that were declared."""
    if isinstance(x, Tensor):
        x = {HIDDEN: x}
    if len(x) != len(border) or any(spec.name not in x for spec in border):
        raise TypeError(
            f"a block returned the streams {', '.join(x)}, but declares {names(border)}: mend its streams()"
        )
    return tuple(x[spec.name] for spec in border)


def unpack(tensors: Sequence[Tensor], border: Border) -> Tensor | Streams:
    """The inverse of `pack`: a single stream is returned as its tensor."""
    if len(border) == 1:
        return tensors[0]
    return {spec.name: tensor for spec, tensor in zip(border, tensors, strict=True)}


def hidden(x: Tensor | Streams) -> Tensor:
    """The input of blocks that take one stream."""
    return x if isinstance(x, Tensor) else x[HIDDEN]


def sent(border: Border, kind: Literal["act", "grad"]) -> Border:
    """The streams of a border that are sent: forward, or back as gradients."""
    return border if kind == "act" else tuple(spec for spec in border if spec.has_gradient)


def check_shapes(tensors: Sequence[Tensor], border: Border, batch: Batch, tp: int) -> None:
    """TypeError if a stream does not have the declared rows, width and dtype."""
    for spec, tensor in zip(border, tensors, strict=True):
        declared = (spec.rows(batch, tp), spec.width_on(tp))
        if tuple(tensor.shape) != declared or tensor.dtype != spec.dtype:
            raise TypeError(
                f"stream {spec.name!r} is {tuple(tensor.shape)} of {tensor.dtype}, but the blocks declare {declared} "
                f"of {spec.dtype}: mend their streams()"
            )


def names(border: Border) -> str:
    return ", ".join(spec.name for spec in border)
