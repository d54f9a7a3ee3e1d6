"""Experts of a layer stacked in two tensors (Qwen3.5 as published; what transformers 5 holds in memory), read as the
matrices of each expert.

    X.experts.gate_up_proj (E, 2F, D)   X.experts.N.gate_proj.weight, X.experts.N.up_proj.weight (F, D)
    X.experts.down_proj (E, D, F)       X.experts.N.down_proj.weight (D, F)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.checkpoint.tensors import Index, Open, Stored, StoredBox
from phalanx.layout.box import Box

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The end of a stack's name -> the matrices whose rows follow each other in it."""


@dataclass(frozen=True)
class ExpertOfStack(StoredBox):
    """Rows `first` and on of one expert in a stack that is stored as `whole`. Its key is its own: boxes of one key are
    read together, as rows of one tensor."""

    whole: StoredBox
    expert: int
    first: int

    def read(self, files: Open, where: tuple[slice, ...]) -> Tensor:
        rows, columns = where
        own = slice(self.expert, self.expert + 1), slice(self.first + rows.start, self.first + rows.stop), columns
        return self.whole.read(files, own)[0]


def unstacked(index: Index, wanted: Mapping[str, tuple[int, ...]]) -> Index:
    """The index with the matrices of each expert in the place of stacks, where the model has these and not the
    stack."""
    found: Index = {}
    for name, stored in index.items():
        at, _, end = name.rpartition(".")
        matrices = STACKS.get(end, ())
        first = f"{at}.0.{matrices[0]}.weight" if matrices else ""
        if name in wanted or first not in wanted or len(stored.shape) != 3 or stored.shape[1] % len(matrices):
            found[name] = stored
            continue
        experts, rows, columns = stored.shape
        shape, (whole,) = (rows // len(matrices), columns), stored.parts
        for expert in range(experts):
            for number, matrix in enumerate(matrices):
                key = f"{at}.{expert}.{matrix}.weight"
                part = ExpertOfStack(whole.file, key, Box.full(shape), whole, expert, number * shape[0])
                found[key] = Stored(shape, [part])
    return found
