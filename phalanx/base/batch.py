"""The one batch type: flat tokens of one micro-batch, with document boundaries beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # label of a token that has no loss, as in torch's cross entropy


def room_for_documents(count: int, tokens: int) -> int:
    """A bound on `count` documents in a micro-batch that few micro-batches exceed: what is made for one serves the others (CUDA graphs)."""
    return max(1 << (count - 1).bit_length(), usual_documents(tokens))


def usual_documents(tokens: int) -> int:
    """Documents of 512 tokens each."""
    return max(1, tokens // 512)


@dataclass(frozen=True)
class Batch:
    """One micro-batch. T = num_sequences * seq_length tokens, in sequence order.

    tokens     (T,) int64  input ids
    labels     (T,) int64  the next token of each, or IGNORE
    positions  (T,) int64  position inside the sequence (or inside the document, when attention stays inside documents)
    samples    (T,) int64  global sample id of each token: a key of dropout, the same in every layout
    documents  (T,) int64  number of the document that each token belongs to, or None: attention then spans the sequence
    loss_seed  () gradient of the summed loss, when the step knows it before forward: the head then makes its gradients in forward
    most_documents         a bound on the number of documents, where they are counted; 0: there may be as many as tokens
    The ints are host facts: whether a batch is uniform is never read from the device.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    num_sequences: int
    seq_length: int
    documents: Tensor | None = None
    loss_seed: Tensor | None = None
    most_documents: int = 0
    _derived: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def derive(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes of this batch, made once: every layer uses the same rotary table or mask."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def forget(self) -> None:
        """Free what was derived; done when the last block of this rank is through with the batch."""
        self._derived.clear()

    @property
    def derived_bytes(self) -> int:
        tensors = [t for made in self._derived.values() for t in (made if isinstance(made, tuple) else (made,))]
        return sum(t.nbytes for t in tensors)

    def with_loss(self, labels: Tensor, seed: Tensor | None) -> Batch:
        """The same tokens with other labels (T,) and another gradient of their summed loss; what was derived is not shared."""
        return replace(self, labels=labels, loss_seed=seed, _derived={})

    @property
    def room_for_documents(self) -> int:
        return self.most_documents or self.num_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_length

    def to(self, device: torch.device | str) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved, _derived={})
