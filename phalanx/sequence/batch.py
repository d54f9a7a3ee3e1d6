"""The one batch type: flat tokens of one micro-batch with document boundaries; whole sequences, or a shard of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.balance import assign, assign_whole, degrees_of
from phalanx.sequence.paged import PagedSequences
from phalanx.sequence.sample import ENCODER as ENCODER
from phalanx.sequence.sample import IGNORE as IGNORE
from phalanx.sequence.shard import WHOLE, SequenceShard
from phalanx.sequence.unit_route import UnitRoute, meta_route

TEXT = "text"  # the name of a batch's own tokens, where its streams of tokens are named
PADDING_RUN = 512  # the largest number of tokens in a document of padding
# of `whole`, those that there are, in this order
ROWS = (
    "tokens",
    "labels",
    "positions",
    "samples",
    "documents",
    "real",
    "prefix",
)


def room_for_documents(count: int, tokens: int) -> int:
    """An upper bound for `count` documents in a micro-batch that few micro-batches exceed, so that what is made for one
    serves the others (CUDA graphs)."""
    return max(1 << (count - 1).bit_length(), usual_documents(tokens))


def usual_documents(tokens: int) -> int:
    """The number of documents if each has 512 tokens."""
    return max(1, tokens // 512)


Made = TypeVar("Made")


class PerBatch(Generic[Made]):
    """A value that is computed from a batch once, for all layers that need it: a rotary table, a mask. The file that
    computes it owns it: `TABLE = PerBatch[Tensor]()`. The batch keeps it until `forget`."""

    def of(self, batch: Batch, make: Callable[[], Made], *by: Hashable) -> Made:
        """The value of `make`, computed once for each `by`."""
        made, key = batch._made, (self, *by)
        if key not in made:
            made[key] = make()
        return made[key]


NUM_REAL = PerBatch[Tensor]()
SEQUENCE_NUMBERS = PerBatch[Tensor]()
PLACES = PerBatch[Tensor]()
PIECES = PerBatch["tuple[Batch, ...]"]()
# what belongs to tokens and is not in `whole`: other shards never need it
OWN_ROWS = (
    "reference",
    "target_ids",
    "target_log_probs",
    "segments",
    "pair_labels",
    "pair_weights",
    "values",
    "coordinates",
)
UNCUT = PerBatch["Batch"]()
AMONG = PerBatch["Batch"]()
CHUNKED = PerBatch["Batch"]()
PLACES_OF_BALANCED = PerBatch[Tensor]()


@dataclass(frozen=True)
class UnitPlaces:
    """Where the units of a stream are, such as the images of a micro-batch.

    sizes   rows of each unit, in the order of the text; known before they are assigned to ranks, and on the host
    joined  rows that become one of what the text reads
    spots   (m,) int64  where each of these is among the ones of all ranks of tp x cp, one rank after another
    numbers  (T,) int64  of each token of the text here, which of the m it stands for; -1: none. None: of the whole
            micro-batch's tokens for units, the k-th stands for the k-th
    route   how features reach the ranks of tp x cp that share this text, where those of several replicas compute them;
            None: they are there
    """

    sizes: tuple[int, ...]
    joined: int
    spots: Tensor
    numbers: Tensor | None = None
    route: UnitRoute | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps of a micro-batch on a device, beside `numbers`."""
        return [self.spots] if self.route is None else [self.spots, self.route.rows, self.route.order]

    def map(self, change: Callable[[Tensor], Tensor]) -> UnitPlaces:
        """The same with each of its tensors changed."""
        numbers = None if self.numbers is None else change(self.numbers)
        route = None if self.route is None else self.route.map(change)
        return replace(self, spots=change(self.spots), numbers=numbers, route=route)


@dataclass(frozen=True)
class SharedDocument:
    """A document that several shards have: tokens start .. start + length of the whole micro-batch; this is shard
    `part` of it."""

    start: int
    length: int
    part: SequenceShard


@dataclass(frozen=True)
class Batch:
    """One micro-batch. T = num_sequences * length tokens, in sequence order, where this rank has `length` tokens of
    each sequence.

    tokens      (T,) int64  input ids
    labels      (T,) int64  what is predicted at each token (the next token, or what the task says), or IGNORE
    positions   (T,) int64  position inside the sequence (or inside the document, when attention stays inside documents)
    samples     (T,) int64  global sample id of each token: a key of dropout, the same in every layout
    seq_length  tokens of a whole sequence
    documents   (T,) int64  number of the document that each token belongs to; None: attention spans the sequence
    real        (T,) int64  1 for tokens, 0 for padding, which belongs to no document and has no loss; None: no padding
    prefix      (T,) int64  1 for the first tokens of each document (or sequence), as many as read each other whatever
                their order, where attention has prefixes; None: there are none
    loss_seed   () gradient of the summed loss, if the step knows it before forward: the head then computes its
                gradients in forward
    late        the head computes them in backward all the same
    most_documents  an upper bound on the number of documents in the whole sequences, where they are counted; 0: as many
                    as tokens
    longest_document  an upper bound on the tokens of a document, where it is known; 0: a sequence's
    label_rows  an upper bound on the tokens of the whole micro-batch that have a label, where the task labels few (the
                same for all micro-batches of as many tokens); 0: there is none, or this micro-batch has more
    part        which positions of each sequence this shard holds
    whole       (4 to 7, num_sequences * seq_length) int64 the same rows for whole sequences, in the order of ROWS; None
                if these are whole
    balanced    (num_sequences * seq_length,) int64  if documents are balanced over shards: the positions, in the whole
                micro-batch, of the first shard's tokens, then of the second's and so on; None: each shard has its
                chunks of each sequence
    piece       a piece of a balanced batch over which attention is computed separately; its shapes hardly ever repeat
    shared      with balanced: the documents of which this shard has a part, in the order of its tokens; whole documents
                follow
    reference   (T,) fp32 or wider: the log-probability that another model gives each label; None: there is none
    target_ids, target_log_probs  (T, K) int64, fp32: the ids that another model finds most likely at each token, and
                their log-probabilities; None: there are none
    text_gradients, text_sums  (R, D) fp32 or wider: the gradient of the step's summed loss by each document's
                embedding, and (1 + K,) float64: the summed loss and K metrics of the documents here, where the step has
                computed them beforehand; None: it has not
    segments    (T,) int64: which text of its document a token belongs to (BERT's token types); None: all to the first
    pair_labels, pair_weights  (T,) int64: at the first token of each document that is a pair of texts, its class, else
                IGNORE, and the weight of its loss; None: there are no pairs
    paged       sequences that continue from what layers remember of them (generation): the tokens here are pieces of
                several sequences, laid out flat; num_sequences is 1
    beside      further streams by name. An encoder's text is a batch of the same sequences with tokens, positions and a
                length of its own, without labels; documents with one number belong together. A stream of units
                (images) is one sequence of as many rows as the micro-batch happens to have
    values      (T, features) floats, what the model reads in place of tokens; None: it reads tokens
    coordinates  (T, axes) int64: where each token is, where one position does not say it; None: it does
    units       of a stream of units (sequence.units), where they are, for the text; None: it is no such stream
    idle        of a further stream in generation: it is padding alone, so blocks that work on it have nothing to do

    The ints are known on the host: whether a batch is uniform is never read from the device.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    num_sequences: int
    seq_length: int
    documents: Tensor | None = None
    loss_seed: Tensor | None = None
    late: bool = False
    most_documents: int = 0
    longest_document: int = 0
    label_rows: int = 0
    part: SequenceShard = WHOLE
    whole: Tensor | None = None
    real: Tensor | None = None
    prefix: Tensor | None = None
    balanced: Tensor | None = None
    shared: tuple[SharedDocument, ...] = ()
    piece: bool = False
    reference: Tensor | None = None
    target_ids: Tensor | None = None
    target_log_probs: Tensor | None = None
    text_gradients: Tensor | None = None
    text_sums: Tensor | None = None
    segments: Tensor | None = None
    pair_labels: Tensor | None = None
    pair_weights: Tensor | None = None
    paged: PagedSequences | None = None
    values: Tensor | None = None
    coordinates: Tensor | None = None
    units: UnitPlaces | None = None
    idle: bool = False
    beside: Mapping[str, Batch] = field(default_factory=dict)
    _made: dict[tuple[Hashable, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """By owner (PerBatch)."""

    def forget(self) -> None:
        """Free what was computed from it; called when the last block of this rank is done with the batch."""
        self._made.clear()
        for other in self.beside.values():
            other.forget()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it holds: its own and those computed from it."""
        own = [t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)]
        made = [t for made in self._made.values() for t in (made if isinstance(made, tuple) else (made,))]
        own += [] if self.units is None else self.units.tensors
        own += [t for other in self.beside.values() for t in other.tensors]
        return own + [t for m in made for t in (m.tensors if isinstance(m, Batch) else [m]) if isinstance(t, Tensor)]

    @property
    def derived_bytes(self) -> int:
        made = [t for made in self._made.values() for t in (made if isinstance(made, tuple) else (made,))]
        batches = [*self.beside.values(), *(b for b in made if isinstance(b, Batch))]
        return sum(b.derived_bytes for b in batches) + sum(t.nbytes for t in made if isinstance(t, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with each of its tensors changed, those of `beside` too; nothing computed from it is kept."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        if self.units is not None:
            changed["units"] = self.units.map(change)
        return replace(self, **changed, beside={n: b.map(change) for n, b in self.beside.items()}, _made={})

    def roomier(self, documents: int, longest: int) -> Batch:
        """The same with larger bounds on documents, if it has any: then any batch within these can be copied to it."""
        if self.documents is None:
            return self
        wide = replace(self, most_documents=documents, longest_document=longest, _made={})
        if self.text_gradients is None:
            return wide
        more = min(wide.room_for_documents, self.all_tokens) - len(self.text_gradients)
        return replace(wide, text_gradients=F.pad(self.text_gradients, (0, 0, 0, more)))

    def copy_from(self, other: Batch) -> None:
        """Overwrite its tensors, except the gradient of the loss, with those of a batch of the same shapes, which may
        have the gradients of fewer texts."""
        for f in fields(self):
            mine, value = getattr(self, f.name), getattr(other, f.name)
            if f.name == "text_gradients" and value is not None:
                mine.copy_(F.pad(value, (0, 0, 0, len(mine) - len(value))))
            elif isinstance(value, Tensor) and f.name != "loss_seed":
                mine.copy_(value)
        if self.units is not None and other.units is not None:
            self.units.spots.copy_(other.units.spots)
        for name, mine in self.beside.items():
            mine.copy_from(other.beside[name])

    def with_loss(self, labels: Tensor, seed: Tensor | None) -> Batch:
        """The same tokens with other labels (T,) and another gradient of their summed loss; derived values are not
        shared."""
        return replace(self, labels=labels, loss_seed=seed, label_rows=0, _made={})

    @property
    def labelled(self) -> Tensor:
        """(T,) whether each token has a label."""
        return self.labels != IGNORE

    @property
    def _rows(self) -> list[str]:
        return [name for name in ROWS if getattr(self, name) is not None]

    @property
    def num_real(self) -> Tensor | int:
        """Tokens of the whole micro-batch that are not padding."""
        whole = self.uncut.real
        return self.all_tokens if whole is None else NUM_REAL.of(self, whole.sum)

    @property
    def runs(self) -> tuple[Tensor, int]:
        """The units of per-sequence statistics: the number (T,) of each token's document, or else sequence, and an
        upper bound of them."""
        if self.documents is not None:
            return self.documents, self.room_for_documents
        number = SEQUENCE_NUMBERS.of(
            self, lambda: self.take(torch.arange(self.all_tokens, device=self.tokens.device) // self.seq_length)
        )
        return number, self.num_sequences

    @property
    def room_for_documents(self) -> int:
        return self.most_documents or self.all_tokens

    @property
    def longest(self) -> int:
        """An upper bound on the tokens of a document, or of a sequence."""
        return min(self.longest_document or self.seq_length, self.seq_length)

    @property
    def length(self) -> int:
        """Tokens of each sequence in this shard."""
        return self.part.size(self.seq_length)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_sequences * self.length

    @property
    def all_tokens(self) -> int:
        """Tokens of the whole micro-batch, including those in other shards."""
        return self.num_sequences * self.seq_length

    @property
    def most_tokens(self) -> int:
        """Tokens of the micro-batch in the largest shard."""
        return self.num_sequences * self.part.most(self.seq_length)

    @property
    def places(self) -> Tensor:
        """(T,) index of each token in its sequence (positions restart at documents; these do not)."""
        return PLACES.of(
            self,
            lambda: self.take(torch.arange(self.seq_length, device=self.tokens.device).repeat(self.num_sequences)),
        )

    def cut(self, part: SequenceShard) -> Batch:
        """This shard of a batch of whole sequences."""
        if part.everyone == 1:
            return self
        if self.units is not None:
            return self if self.units.route is not None else self._assigned(self.units, part)
        if self.beside:
            alone = replace(self, beside={}).cut(part)
            return replace(alone, beside={name: other.cut(part) for name, other in self.beside.items()})
        if part.count == 1:
            return self
        part = replace(part, rank=0, ranks=1, replica=0, replicas=1)
        whole, balanced = torch.stack([getattr(self, name) for name in self._rows]), None
        shared: tuple[SharedDocument, ...] = ()
        if part.dynamic:
            part, (balanced, shared) = SequenceShard(part.index, part.count), self._balance(part)
        other = replace(self, whole=whole, balanced=balanced, shared=shared)._another(part)
        own: dict[str, Any] = {name: other.take(x) for name in OWN_ROWS if (x := getattr(self, name)) is not None}
        return replace(other, **own) if own else other

    def _assigned(self, units: UnitPlaces, part: SequenceShard) -> Batch:
        """The rows of the units that are assigned to one of the ranks of tp x cp, each unit whole. All ranks have as
        many rows as the fullest needs; the rest is padding, documents of its own."""
        count, here, joined = part.everyone, part.here, units.joined
        if self.tokens.is_meta:  # the most that may come
            largest = max(units.sizes, default=0)  # balance.assign_whole's bound; assign_shared has no rank with more
            most = min(self.num_tokens, (self.num_tokens + (part.sharers - 1) * largest) // part.sharers)
            rows = -(-most // joined) * joined
            if part.replicas > 1:
                features = self.num_tokens // joined
                units = replace(units, route=meta_route(self.tokens, rows // joined, features, part))
            return self._of_units([], rows, units)
        if part.replicas > 1:
            raise TypeError("units of several replicas are assigned where they are read (sequence.units)")
        homes, starts = assign_whole(units.sizes, count), [0, *accumulate(units.sizes)]
        loads, moves = [0] * count, list[int]()
        for size, start, home in zip(units.sizes, starts, homes):
            moves.append(loads[home] - start)
            loads[home] += size
        rows = max(joined, *loads)
        moves = [(home * rows + move) // joined for home, move in zip(homes, moves)]
        unit = torch.bucketize(units.spots * joined, units.spots.new_tensor(starts[1:]), right=True)
        spots = units.spots + units.spots.new_tensor([*moves, 0])[unit]
        mine = [(starts[i], starts[i + 1]) for i, home in enumerate(homes) if home == here]
        return self._of_units(mine, rows, replace(units, spots=spots))

    def _of_units(self, spans: Sequence[tuple[int, int]], rows: int, units: UnitPlaces) -> Batch:
        """Spans of rows, each a document, and padding, in `rows` rows."""
        device, found = self.tokens.device, [np.arange(start, stop) for start, stop in spans]
        at = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *found])).to(device)
        more, sizes = rows - len(at), [len(span) for span in found]
        sizes += [min(PADDING_RUN, rows - first) for first in range(len(at), rows, PADDING_RUN)]

        def own(x: Tensor, value: int = 0) -> Tensor:
            return torch.cat([x[at], x.new_full((more, *x.shape[1:]), value)])

        return replace(
            self,
            tokens=own(self.tokens),
            labels=own(self.labels, IGNORE),
            positions=own(self.positions),
            samples=own(self.samples),
            real=torch.cat([self.tokens.new_ones(len(at)), self.tokens.new_zeros(more)]),
            documents=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device),
            most_documents=room_for_documents(len(sizes), rows),
            longest_document=max(sizes),
            values=None if self.values is None else own(self.values),
            coordinates=None if self.coordinates is None else own(self.coordinates),
            seq_length=rows,
            units=units,
            _made={},
        )

    def _balance(self, part: SequenceShard) -> tuple[Tensor | None, tuple[SharedDocument, ...]]:
        """`balanced` and `shared` for a shard of this batch of whole sequences; nothing if documents cannot be assigned
        so that all shards are full.

        On the meta device every sequence is one document that all shards share, which takes the most memory.
        """
        starts, lengths, padding = self._documents_here()
        sizes = self._sizes(part.count)
        shares = assign(lengths, sizes, (part.count,) if self.tokens.is_meta else degrees_of(part.count, part.heads))
        if shares is None:
            return None, ()
        shared = sorted(
            (-share.degree, start, length, share)
            for start, length, share in zip(starts, lengths, shares)
            if share.degree > 1
        )
        here: list[list[np.ndarray]] = [[] for _ in sizes]
        mine = []
        for _, start, length, share in shared:  # starts are unique
            for rank, each in enumerate(share.parts, share.first):
                here[rank] += [np.arange(start + run.start, start + run.stop) for run in each.runs(length)]
                if rank == part.index:
                    mine.append(SharedDocument(start, length, each))
        for rank, places in enumerate(here):
            alone = [
                np.arange(s, s + n)
                for s, n, share in zip(starts, lengths, shares)
                if share.degree == 1 and share.first == rank
            ]
            lacking = sizes[rank] - sum(map(len, places)) - sum(map(len, alone))
            filler, padding = padding[:lacking], padding[lacking:]
            places.append(np.sort(np.concatenate([*alone, filler])))
        balanced = torch.from_numpy(np.concatenate([place for places in here for place in places]))
        return balanced.to(self.tokens.device), tuple(mine)

    def _documents_here(self) -> tuple[list[int], list[int], np.ndarray]:
        """Starts and lengths of the documents of whole sequences, and the positions of padding."""
        if self.documents is None or self.tokens.is_meta:
            return (
                list(range(0, self.num_tokens, self.seq_length)),
                [self.seq_length] * self.num_sequences,
                np.empty(0, np.int64),
            )
        starts = np.flatnonzero(np.diff(self.documents.numpy(), prepend=-1))
        lengths = np.diff(starts, append=self.num_tokens)
        if self.real is None:
            return starts.tolist(), lengths.tolist(), np.empty(0, np.int64)
        real = self.real.numpy()
        kept = real[starts] > 0
        return starts[kept].tolist(), lengths[kept].tolist(), np.flatnonzero(real == 0)

    def _sizes(self, count: int) -> list[int]:
        """Tokens of each of `count` shards."""
        return [self.num_sequences * part.size(self.seq_length) for part in SequenceShard(0, count).all]

    @property
    def pieces(self) -> tuple[Batch, ...]:
        """The pieces of a balanced batch over which attention is computed, in the order of its tokens: this shard of
        each shared document, and the documents that are whole here."""
        return PIECES.of(self, self._make_pieces)

    def _make_pieces(self) -> tuple[Batch, ...]:
        rows: dict[str, Any]
        pieces, at = [], 0
        for doc in self.shared:
            here = dict(zip(self._rows, self.whole[:, doc.start : doc.start + doc.length]))  # type: ignore[index]
            rows = {name: here[name] for name in self._rows if name not in ("documents", "real")}
            pieces.append(Batch(**rows, num_sequences=1, seq_length=doc.length, piece=True).cut(doc.part))
            at += pieces[-1].num_tokens
        if at < self.num_tokens:
            rows = {name: getattr(self, name)[at:] for name in self._rows}
            number, count = self.runs  # the number of sequences, where attention spans them
            rows |= {"documents": number[at:], "most_documents": count, "longest_document": self.longest}
            pieces.append(Batch(**rows, num_sequences=1, seq_length=self.num_tokens - at, piece=True))
        return tuple(pieces)

    @property
    def uncut(self) -> Batch:
        """The batch of whole sequences to which this shard belongs; values derived from it are kept together with this
        batch's."""
        if self.whole is None:
            return self
        rows: dict[str, Any] = {**dict(zip(self._rows, self.whole)), **dict.fromkeys(OWN_ROWS)}
        return UNCUT.of(self, lambda: replace(self, **rows, part=WHOLE, whole=None, balanced=None, shared=(), _made={}))

    def among(self, run: int) -> Batch:
        """The batch that `run` neighbouring shards, including this one, form together; values derived from it are kept
        together with this batch's."""
        if run == 1 or self.whole is None:
            return self
        return (
            self.uncut if run == self.part.count else AMONG.of(self, lambda: self._another(self.part.among(run)), run)
        )

    def chunked(self, size: int) -> Batch:
        """The same tokens with a document for every `size` tokens, counted from the first token of each document (or
        sequence): attention inside chunks. What is derived from it is kept together with this batch's."""
        return CHUNKED.of(self, lambda: self._make_chunks(size), size)

    def _make_chunks(self, size: int) -> Batch:
        whole = self.uncut
        place = torch.arange(self.all_tokens, device=self.tokens.device)
        number, count = whole.runs
        first = (place % self.seq_length == 0) | (number != number.roll(1))
        start = place.where(first, 0).cummax(0).values
        chunks = (first | ((place - start) % size == 0)).cumsum(0) - 1
        room = min(self.all_tokens, count + self.num_sequences + self.all_tokens // size)
        bounds: dict[str, Any] = {"most_documents": room, "longest_document": min(self.longest, size)}
        if self.whole is None:
            return replace(self, documents=chunks, **bounds, _made={})
        rows = {**dict(zip(self._rows, self.whole)), "documents": chunks}
        both = torch.stack([rows[name] for name in ROWS if name in rows])
        return replace(self, documents=self.take(chunks), whole=both, **bounds, _made={})

    def _another(self, part: SequenceShard) -> Batch:
        """Another shard of the same sequences."""
        taken: dict[str, Any] = dict(zip(self._rows, (self.take(row, part) for row in self.whole)))  # type: ignore[union-attr]
        taken |= dict.fromkeys(OWN_ROWS)
        return replace(self, **taken, part=part, _made={})

    def take(self, x: Tensor, part: SequenceShard | None = None) -> Tensor:
        """This shard (or another) of x (num_sequences * seq_length, ...) -> (T, ...)."""
        part = part or self.part
        if self.balanced is not None:
            return x[self.balanced.split(self._sizes(part.count))[part.index]]
        by_sequence = x.unflatten(0, (self.num_sequences, self.seq_length))
        return torch.cat([by_sequence[:, run.start : run.stop] for run in part.runs(self.seq_length)], 1).flatten(0, 1)

    def pad(self, x: Tensor, ranks: int = 1, value: float = 0) -> Tensor:
        """x (T / ranks, ...) padded with `value` to the rows of the largest shard."""
        more = self.most_tokens // ranks - len(x)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, more), value=value) if more else x

    def join(self, pieces: Iterable[Tensor], parts: Iterable[SequenceShard]) -> Tensor:
        """The tokens of neighbouring shards, each (T of that shard or more, ...) -> (T of all together, ...) in order.
        For a balanced batch: of all shards."""
        if self.balanced is not None:
            whole = torch.cat([piece[:size] for piece, size in zip(pieces, self._sizes(self.part.count))])
            return whole[PLACES_OF_BALANCED.of(self, self.balanced.argsort)]
        first, second = list[Tensor](), list[Tensor]()
        for part, piece in zip(parts, pieces):
            runs = [len(run) for run in part.runs(self.seq_length)]
            rows = piece[: self.num_sequences * sum(runs)].unflatten(0, (self.num_sequences, sum(runs)))
            for found, run in zip((first, second), rows.split(runs, 1)):
                found.append(run)
        return torch.cat([*first, *reversed(second)], 1).flatten(0, 1)

    def split(self, x: Tensor, parts: Sequence[SequenceShard]) -> list[Tensor]:
        """The inverse: (T of neighbouring shards together, ...) -> each one's (T, ...)."""
        runs = [part.runs(self.seq_length) for part in parts]
        sizes = [len(first) for first, _ in runs] + [len(second) for _, second in reversed(runs)]
        chunks = x.unflatten(0, (self.num_sequences, sum(sizes))).split(sizes, 1)
        return [torch.cat((chunks[i], chunks[-1 - i]), 1).flatten(0, 1) for i in range(len(parts))]

    def to(self, device: torch.device | str) -> Batch:
        paged = None if self.paged is None else self.paged.to(device)
        return replace(self.map(lambda t: t.to(device, non_blocking=True)), paged=paged)
