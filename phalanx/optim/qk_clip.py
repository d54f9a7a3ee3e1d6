"""QK-clip: after an update, the weights of each head of attention whose largest score in the step exceeded a threshold
are made smaller, so that the same queries and keys would just reach it (Kimi Team, "Kimi K2", 2025, algorithm 1).

Each rank measures the scores of its own heads on its own tokens (nn.scored_attention). One exchange over the pipeline
stage, begun when gradients are complete and beside the sum of the gradient norm, makes of them the largest of all
micro-batches and ranks; a maximum cannot join that sum. Every rank then scales what it updates, before weights travel
to other ranks. Nothing here waits for the device.

measured in forward -- begin --> on the way -- clipped --> here -- settle --> ratios -- apply, to each shard
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, Work
from phalanx.layout.buckets import Slot
from phalanx.layout.strided import boxes_in
from phalanx.nn.scored_attention import ScoredAttention, ScoreOutputs
from phalanx.ops.attention.largest_scores import LargestScores
from phalanx.ops.op import Kernels
from phalanx.ops.optimizer.shard import Shard


@dataclass(frozen=True)
class ScaledOutputs:
    """What the scores of a layer's heads are made of. ratio: the number of the first head's ratio among those of the
    stage."""

    ratio: int
    heads: int
    outputs: ScoreOutputs

    def fill(self, first: int, ratios: Tensor, powers: Tensor) -> None:
        """Set, of outputs `first` .. of the tensor, the number of their ratio and the power."""
        o = self.outputs
        for head in range(self.heads):
            at = o.start + head * o.step - first
            mine = slice(max(0, at), max(0, at + o.count))
            ratios[mine] = self.ratio + head
            powers[mine] = o.power


class QKClip:
    """threshold: the largest score that is left alone. layers: those of attention on this rank, which measure from now
    on. stage: all ranks that hold parts of these layers, or other tokens of them.

    largest  (layers, heads) the largest scores of the step so far, or the threshold where none is larger
    ratio    (layers, heads) of the threshold to the largest score, where that is larger; otherwise 1
    """

    def __init__(
        self, threshold: float, layers: Sequence[ScoredAttention], stage: Axis, like: Tensor, kernels: Kernels = "auto"
    ):
        """like: a tensor of the device and the master dtype."""
        self.threshold, self.stage = threshold, stage
        heads = max((layer.all_heads for layer in layers), default=0)
        self.largest = torch.full((len(layers), heads), threshold, dtype=like.dtype, device=like.device)
        self.ratio = torch.ones_like(self.largest)
        self._coming: Work | None = None
        scaled: dict[str, list[ScaledOutputs]] = {}
        for number, layer in enumerate(layers):
            mine = self.largest[number, layer.first_head : layer.first_head + layer.heads]
            layer.largest = LargestScores(mine, threshold, kernels)
            for each in layer.score_outputs:
                scaled.setdefault(each.name, []).append(ScaledOutputs(number * heads, layer.all_heads, each))
        self._scaled = scaled
        self._shards: dict[tuple[int, ...], ScaledShard] = {}

    def begin(self) -> None:
        """The step's forwards are over: start finding the largest scores of all ranks."""
        self._coming = self.stage.all_reduce(self.largest, "max", async_op=True)

    def clipped(self) -> Tensor:
        """() float64: how many heads of the stage exceeded the threshold; counted on its first rank, zero on others."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        count = (self.largest > self.threshold).sum().double()
        return count if self.stage.index == 0 else torch.zeros_like(count)

    def settle(self, skip: Tensor) -> None:
        """The update that follows scales by these scores, unless it is skipped; the next step's begin anew."""
        self.ratio.copy_(torch.where(skip.bool(), torch.ones_like(self.largest), self.threshold / self.largest))
        self.largest.fill_(self.threshold)

    @torch.no_grad()
    def apply(self, shard: Shard, slots: Sequence[Slot]) -> None:
        """Scale the masters of slots of a shard that have been updated, and their weights."""
        key = (id(shard), *(slot.offset for slot in slots[:1]))
        if key not in self._shards:
            self._shards[key] = ScaledShard(shard, slots, self._scaled, self.ratio)
        self._shards[key].scale(self.ratio)


class ScaledShard:
    """What some scores are made of in slots of a shard: boxes, and for each of their outputs, one box after the other,
    the number of its ratio and the power."""

    def __init__(self, shard: Shard, slots: Sequence[Slot], scaled: Mapping[str, list[ScaledOutputs]], like: Tensor):
        self.shard, these = shard, replace(shard.bucket, slots=tuple(slots))
        self.boxes = [box for box in boxes_in(these, shard.lo, shard.hi) if box.piece.name in scaled]
        self.dims = [scaled[box.piece.name][0].outputs.dim for box in self.boxes]
        self.sizes = [box.box.shape[dim] for box, dim in zip(self.boxes, self.dims)]
        ratios, powers = torch.zeros(sum(self.sizes), dtype=torch.int64), torch.zeros(sum(self.sizes), dtype=like.dtype)
        parts = zip(self.boxes, self.dims, ratios.split(self.sizes), powers.split(self.sizes))
        for box, dim, ratio, power in parts if self.boxes else ():
            for each in scaled[box.piece.name]:
                each.fill(box.box.start[dim], ratio, power)
        self.ratios, self.powers = ratios.to(like.device), powers.to(like.device)

    def scale(self, ratio: Tensor) -> None:
        """ratio: QKClip.ratio."""
        if not self.boxes:
            return
        master, out, lo = self.shard.master, self.shard.out, self.shard.lo
        factors = ratio.flatten()[self.ratios].pow(self.powers).split(self.sizes)
        for box, dim, factor in zip(self.boxes, self.dims, factors):
            values = box.of(master, lo)
            shape = [1] * values.dim()
            shape[dim] = -1
            values.mul_(factor.view(shape))
            if out is not None:
                box.of(out, lo).copy_(values)


def scored_layers(modules: Iterable[object]) -> list[ScoredAttention]:
    """The layers of attention among these, each once."""
    return list({id(m): m for m in modules if isinstance(m, ScoredAttention)}.values())
