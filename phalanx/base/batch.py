"""The one batch type: flat tokens of one micro-batch, with document boundaries beside them; whole sequences, or a part of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.part import WHOLE, Part

IGNORE = -100  # label of a token that has no loss, as in torch's cross entropy
ROWS = ("tokens", "labels", "positions", "samples", "documents", "real")  # of `whole`, those that there are, in this order


def room_for_documents(count: int, tokens: int) -> int:
    """A bound on `count` documents in a micro-batch that few micro-batches exceed: what is made for one serves the others (CUDA graphs)."""
    return max(1 << (count - 1).bit_length(), usual_documents(tokens))


def usual_documents(tokens: int) -> int:
    """Documents of 512 tokens each."""
    return max(1, tokens // 512)


@dataclass(frozen=True)
class Batch:
    """One micro-batch. T = num_sequences * length tokens, in sequence order, where this rank has `length` of each sequence's tokens.

    tokens      (T,) int64  input ids
    labels      (T,) int64  the next token of each, or IGNORE
    positions   (T,) int64  position inside the sequence (or inside the document, when attention stays inside documents)
    samples     (T,) int64  global sample id of each token: a key of dropout, the same in every layout
    seq_length  tokens of a whole sequence
    documents   (T,) int64  number of the document that each token belongs to, or None: attention then spans the sequence
    real        (T,) int64  1 for tokens, 0 for padding, which is no document's and has no loss; None: there is no padding
    loss_seed   () gradient of the summed loss, when the step knows it before forward: the head then makes its gradients in forward
    most_documents  a bound on the number of documents of the whole sequences, where they are counted; 0: there may be as many as tokens
    part        which places of each sequence these are
    whole       (4 to 6, num_sequences * seq_length) int64 the same of the whole sequences, ROWS by ROWS; None where these are whole
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
    part: Part = WHOLE
    whole: Tensor | None = None
    real: Tensor | None = None
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
    def tensors(self) -> list[Tensor]:
        """All that it holds: its own and what was derived."""
        own = [t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)]
        made = [t for made in self._derived.values() for t in (made if isinstance(made, tuple) else (made,))]
        return own + [t for m in made for t in (m.tensors if isinstance(m, Batch) else [m]) if isinstance(t, Tensor)]

    @property
    def derived_bytes(self) -> int:
        tensors = [t for made in self._derived.values() for t in (made if isinstance(made, tuple) else (made,))]
        return sum(t.derived_bytes if isinstance(t, Batch) else t.nbytes for t in tensors)

    def with_loss(self, labels: Tensor, seed: Tensor | None) -> Batch:
        """The same tokens with other labels (T,) and another gradient of their summed loss; what was derived is not shared."""
        return replace(self, labels=labels, loss_seed=seed, _derived={})

    @property
    def _rows(self) -> list[str]:
        return [name for name in ROWS if getattr(self, name) is not None]

    @property
    def num_real(self) -> Tensor | int:
        """Tokens of the whole micro-batch that are not padding."""
        whole = self.uncut.real
        return self.all_tokens if whole is None else self.derive("real tokens", lambda: whole.sum())

    @property
    def runs(self) -> tuple[Tensor, int]:
        """What statistics of a sequence are taken over: the number (T,) of each token's document, or else sequence, and how many there may be."""
        if self.documents is not None:
            return self.documents, self.room_for_documents
        number = self.derive("sequences", lambda: torch.arange(self.num_tokens, device=self.tokens.device) // self.length)
        return number, self.num_sequences

    @property
    def room_for_documents(self) -> int:
        return self.most_documents or self.all_tokens

    @property
    def length(self) -> int:
        """Tokens of each sequence that are here."""
        return self.part.size(self.seq_length)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_sequences * self.length

    @property
    def all_tokens(self) -> int:
        """Tokens of the whole micro-batch, those of other parts included."""
        return self.num_sequences * self.seq_length

    @property
    def most_tokens(self) -> int:
        """Tokens of the micro-batch that the largest part has."""
        return self.num_sequences * self.part.most(self.seq_length)

    @property
    def places(self) -> Tensor:
        """(T,) place of each token in its sequence (positions restart at documents; places do not)."""
        return self.derive("places", lambda: self.take(torch.arange(self.seq_length, device=self.tokens.device).repeat(self.num_sequences)))

    def cut(self, part: Part) -> Batch:
        """This part of a batch of whole sequences."""
        if part.count == 1:
            return self
        whole = torch.stack([getattr(self, name) for name in self._rows])
        return replace(self, whole=whole)._another(part)

    @property
    def uncut(self) -> Batch:
        """The batch of whole sequences that this is a part of; what it derives is kept with what this derives."""
        if self.whole is None:
            return self
        rows: dict[str, Any] = dict(zip(self._rows, self.whole))
        return self.derive("uncut", lambda: replace(self, **rows, part=WHOLE, whole=None, _derived={}))

    def among(self, run: int) -> Batch:
        """The batch of the part that this one and its neighbours, `run` of them, are together; what it derives is kept with what this does."""
        if run == 1 or self.whole is None:
            return self
        return self.uncut if run == self.part.count else self.derive(("among", run), lambda: self._another(self.part.among(run)))

    def _another(self, part: Part) -> Batch:
        """Another part of the same sequences."""
        taken: dict[str, Any] = dict(zip(self._rows, (self.take(row, part) for row in self.whole)))  # type: ignore[union-attr]
        return replace(self, **taken, part=part, _derived={})

    def take(self, x: Tensor, part: Part | None = None) -> Tensor:
        """This part (or another) of x (num_sequences * seq_length, ...) -> (T, ...)."""
        by_sequence = x.unflatten(0, (self.num_sequences, self.seq_length))
        return torch.cat([by_sequence[:, run.start : run.stop] for run in (part or self.part).runs(self.seq_length)], 1).flatten(0, 1)

    def pad(self, x: Tensor, ranks: int = 1, value: float = 0) -> Tensor:
        """x (T / ranks, ...) filled up with `value` to the rows of the largest part."""
        more = self.most_tokens // ranks - len(x)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, more), value=value) if more else x

    def join(self, pieces: Iterable[Tensor], parts: Iterable[Part]) -> Tensor:
        """What neighbouring parts have, each (T of that part or more, ...) -> (T of all together, ...) in order."""
        first, second = list[Tensor](), list[Tensor]()
        for part, piece in zip(parts, pieces):
            runs = [len(run) for run in part.runs(self.seq_length)]
            rows = piece[: self.num_sequences * sum(runs)].unflatten(0, (self.num_sequences, sum(runs)))
            for found, run in zip((first, second), rows.split(runs, 1)):
                found.append(run)
        return torch.cat([*first, *reversed(second)], 1).flatten(0, 1)

    def split(self, x: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        """The other way: (T of neighbouring parts together, ...) -> each one's (T, ...)."""
        runs = [part.runs(self.seq_length) for part in parts]
        sizes = [len(first) for first, _ in runs] + [len(second) for _, second in reversed(runs)]
        chunks = x.unflatten(0, (self.num_sequences, sum(sizes))).split(sizes, 1)
        return [torch.cat((chunks[i], chunks[-1 - i]), 1).flatten(0, 1) for i in range(len(parts))]

    def to(self, device: torch.device | str) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved, _derived={})
