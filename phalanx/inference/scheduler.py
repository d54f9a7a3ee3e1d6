"""Which tokens of which sequences are computed in the next step: a pure function of its state, without device or clock.

All ranks of a layout run it in lockstep: the same requests, cancellations and tokens in the same order give the same
steps.

    add -> waiting --admitted, with known pages of its prefix--> prompt, in pieces --> decoding, a token each step
              ^                                                     |                     |
              +--------- preempted: its pages go to others ---------+---------------------+--> finished

In each step whoever decodes comes first; prompts, and those who wait, share what is left of the step's tokens by rank:
higher priority, then earlier arrival. If pages run out, the last by rank gives its pages back and is computed anew from
its tokens; the first by rank always goes on, so everybody ends.

The host may read tokens a step late (`SchedulerSpec.late`): step n + 1 is scheduled before the tokens of step n are
observed. A sequence's next token is then SAMPLED: the device still has it. An end token found late makes the token
that step n + 1 draws after it surplus; it is dropped. A request with a grammar waits until its last token is observed,
since that token decides which may follow.

Pipeline stages are busy with several steps at once (`SchedulerSpec.in_flight`), of different sequences: those who
decode take turns.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.inference.pages import GroupSpec, PageTables, SourcePages, first_key, page_key, pages_of, pages_touched
from phalanx.inference.prefix_states import PrefixStates
from phalanx.inference.request import EndReason, Finished, PromptImage, Request

SAMPLED = -1
"""In place of a token: the last one that was sampled for this row, which only the device has."""

DRAFTED = -2
"""In place of a token: the first of the row's drafts, which only the device has; DRAFTED - 1: the second, and so on."""

SOURCE_TOKENS = 2048
"""Of sources that an encoder reads in one step, unless one alone has more: its attention costs by their square."""

NO_TOKEN = -1
"""In what is observed: no token here."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec:
    """What bounds a step. ValueError if no sequence could ever be computed.

    most_sequences  run at once: rows of tables, and of what the device keeps of each
    most_tokens     in one step; at least most_sequences, so that nobody who decodes waits
    longest         tokens of a sequence, prompt and made ones together: positions of the model
    page_size       tokens in a page
    groups          layers that remember alike
    late            tokens of a step are observed after so many more are scheduled; at most in_flight
    in_flight       steps that are computed at once (pipeline stages): a sequence whose last token has not been observed
                    is in each in_flight-th step at most, and of those who decode each step has its part
    prefixes        a sequence may begin with pages that another one has filled; where layers keep a state, only after
                    one that is kept too
    states          of prefixes that are kept beside those of rows (inference/prefix_states.py)
    further         tokens after a page on which what is remembered in it hangs too (multi-token prediction): a prefix
                    is known by them, and known when the last of them is
    source          layers that remember what an encoder has read; None: there is no encoder
    source_longest  tokens or rows that an encoder reads at most; None: as many as a sequence has
    """

    most_sequences: int
    most_tokens: int
    longest: int
    page_size: int
    groups: tuple[GroupSpec, ...]
    late: int = 1
    in_flight: int = 1
    further: int = 0
    prefixes: bool = True
    states: int = 0
    source: GroupSpec | None = None
    source_longest: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.late <= self.in_flight:
            raise ValueError(f"late={self.late}: must be from 0 to in_flight={self.in_flight}")
        if not 1 <= self.most_sequences <= self.most_tokens:
            raise ValueError(
                f"most_tokens={self.most_tokens}: must be at least most_sequences={self.most_sequences} >= 1"
            )
        for group in self.groups:
            least = (
                1
                if group.window is None
                else min(self.window_pages(group.window), pages_of(self.longest, self.page_size))
            )
            if group.num_pages - 1 < least:
                raise ValueError(
                    f"num_pages={group.num_pages}: must be at least {least + 1} for a window of {group.window} tokens"
                )

    def window_pages(self, window: int) -> int:
        """Pages that one token of a long sequence reads and writes."""
        return pages_touched(window, self.page_size)

    @property
    def room(self) -> int:
        """Tokens of the longest sequence that has positions and, alone, pages."""
        full = [(group.num_pages - 1) * self.page_size for group in self.groups if group.window is None]
        return min(self.longest, *full) if full else self.longest

    @property
    def source_room(self) -> int:
        """Tokens or rows of the longest source that an encoder reads; 0: there is no encoder."""
        if self.source is None:
            return 0
        return min(self.most_of_source, (self.source.num_pages - 1) * self.page_size)

    @property
    def most_of_source(self) -> int:
        """The same, whatever there are pages for."""
        return self.longest if self.source_longest is None else self.source_longest

    @property
    def image_room(self) -> int:
        """Tokens of the largest image: all of them are computed in one step, beside those who decode, with a window
        before the first of them."""
        room, size = self.most_tokens - self.most_sequences + 1, self.page_size
        for group in self.groups:
            pages = group.num_pages - 1
            if group.window is not None and pages < pages_of(self.longest, size):
                room = min(room, (pages - 1) * size - group.window + 2)  # pages_touched(window - 1 + room) <= pages
        return max(0, room)


class RequestDoesNotFit(ValueError):
    """A request that no state of the scheduler could serve: tokens of its prompt, tokens it asks for (None: any), and
    how many both may be together."""

    def __init__(self, request: Request, room: int):
        self.prompt = len(request.prompt)
        self.tokens = request.options.tokens
        self.room = room
        if not request.prompt:
            text = "an empty prompt has no next token; it needs at least one"
        elif self.tokens is None:
            text = f"a prompt of {self.prompt} tokens leaves no room for another: prompt and answer have {room}"
        else:
            text = f"{self.prompt} tokens of a prompt and {self.tokens} to be made need more room than there is: {room}"
        super().__init__(text)


class SourceDoesNotFit(ValueError):
    """An encoder's text that no state of the scheduler could hold, or that is empty."""

    def __init__(self, tokens: int, room: int):
        self.tokens = tokens
        self.room = room
        empty = "the encoder has nothing to read; it needs at least one token"
        super().__init__(f"{tokens} tokens for the encoder need more room than there is: {room}" if tokens else empty)


class ImageDoesNotFit(ValueError):
    """An image with more tokens than a step has beside those who decode."""

    def __init__(self, tokens: int, room: int):
        self.tokens = tokens
        self.room = room
        super().__init__(f"an image of {tokens} tokens is larger than a step has room for: {room}")


@dataclass(frozen=True, eq=False)
class Step:
    """What is computed next: S sequences, one after another in one batch of T tokens; decoding ones first.

    Layers must write what they remember of a step's tokens before they attend: a sequence may read pages that are
    filled in the same step, by sequences before it.

    number     counts steps that have sequences
    requests   (S,) their numbers
    rows       (S,) the row of each, which it keeps while it runs: of tables, and of what the device keeps for it
    firsts     (S,) positions of their first tokens here
    counts     (S,) tokens of each
    samples    (S,) bool: a token is drawn after its last one, or one after each of its drafts' and the one before
    drafts     (S,) the last so many of its tokens are drafts
    tokens     (T,) token ids; SAMPLED: the one sampled last for the row; DRAFTED and less: its drafts
    positions  (T,)
    starts     (S + 1,) int32: where each begins in the batch
    sources    pages of what an encoder has read, of each row; the scheduler's own, as they are until it is called next;
               None: there is no encoder
    slots      of each group (T,): where tokens are written
    tables     of each group (rows, P) int32: the scheduler's own, as they are until it is called next
    admitted   indices (into S) of sequences that are in a step for the first time since they have their row: an encoder
               reads the sources of these
    begin_from (row, slot) of those of `admitted` that begin with the state of a prefix: it is copied before
    leave      (row, slot) of those whose state is copied afterwards, as that of a prefix
    preempted  numbers of requests that have lost their row
    finished   requests that were over before this step: their time was up
    """

    number: int
    requests: np.ndarray
    rows: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    drafts: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    slots: tuple[np.ndarray, ...]
    tables: tuple[np.ndarray, ...]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    finished: tuple[Finished, ...]
    sequences: tuple[LiveSequence, ...] = field(repr=False)
    begin_from: tuple[tuple[int, int], ...] = ()
    leave: tuple[tuple[int, int], ...] = ()
    sources: SourcePages | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Sequences in it. Nothing is run of a step without any, and nothing observed."""
        return len(self.sequences)

    @property
    def lengths(self) -> np.ndarray:
        """(S,) tokens of each so far, those in the batch included."""
        return self.firsts + self.counts

    @cached_property
    def images(self) -> tuple[PromptImage, ...]:
        """Those whose tokens are here, in order: each whole."""
        found: list[PromptImage] = []
        for i in np.flatnonzero([bool(s.request.images) for s in self.sequences]).tolist():
            first, stop = int(self.firsts[i]), int(self.firsts[i] + self.counts[i])
            found += [image for at, image in self.sequences[i].request.images if first <= at < stop]
        return tuple(found)

    @cached_property
    def feature_numbers(self) -> np.ndarray:
        """(T,) of each token, which of the features of `images` it stands for, these counted in order; -1: none."""
        found, number = np.full(len(self.tokens), -1, np.int64), 0
        for i in np.flatnonzero([bool(s.request.images) for s in self.sequences]).tolist():
            first, stop = int(self.firsts[i]), int(self.firsts[i] + self.counts[i])
            for at, image in self.sequences[i].request.images:
                if first <= at < stop:
                    begin = int(self.starts[i]) + at - first
                    found[begin : begin + image.tokens] = np.arange(number, number + image.tokens)
                    number += image.tokens
        return found

    @cached_property
    def image_spans(self) -> np.ndarray:
        """(T, 2) of each token of an image, the position of the image's first token and one past its last; zeros of
        others."""
        found = np.zeros((len(self.tokens), 2), np.int32)
        for i in np.flatnonzero([bool(s.request.images) for s in self.sequences]).tolist():
            first, stop = int(self.firsts[i]), int(self.firsts[i] + self.counts[i])
            for at, image in self.sequences[i].request.images:
                if first <= at < stop:
                    begin = int(self.starts[i]) + at - first
                    found[begin : begin + image.tokens] = at, at + image.tokens
        return found

    @cached_property
    def draws(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens that are drawn, in order: the sequence of the step that each is for, and how many tokens of
        that sequence stand between the one it is drawn after and the last one here."""
        drawing = np.flatnonzero(self.samples)
        each = 1 + self.drafts[drawing]
        owners = np.repeat(drawing, each)
        return owners, np.repeat(np.cumsum(each), each) - np.arange(1, len(owners) + 1)


@dataclass(frozen=True)
class Observed:
    """What became of a step: kept (S,), how many of the tokens drawn for each sequence are its next ones; an end token
    is kept. finished: requests that are over with it."""

    kept: list[int]
    finished: list[Finished]


class LiveSequence:
    """A request that waits or runs: its tokens, and where it stands."""

    def __init__(self, request: Request, spec: SchedulerSpec):
        options, room = request.options, spec.room
        self.request = request
        self.number = request.number
        self.rank = (-request.priority, request.number)
        self.prompt = len(request.computed)
        self.tokens = array("q", request.computed)
        self.most = room if options.tokens is None else self.prompt + options.tokens  # tokens at its end
        self.ends = frozenset(options.end_tokens)
        self.keys: list[bytes] = []  # of its full pages whose tokens are known
        self.known = 0  # pages of those that the pools know
        self.next_key = spec.page_size + spec.further  # tokens from which there is one more
        self.row = -1  # waits
        self.pending = 0  # tokens drawn but not observed when it was preempted
        self.cached: int | None = None  # tokens of the prompt that were there when it first ran
        self.drafted = 0  # drafts that were in steps
        self.accepted = 0  # of those, tokens of the sequence now
        self.images = [(at, at + image.tokens) for at, image in request.images]
        self.source = request.source_key
        self.scored_from = None if options.prompt_logprobs is None else options.scored_from  # until it is computed
        self.fresh = False  # has a row, but was in no step since
        self.begin_from = 0  # the slot with the state of its prefix, until it is in a step; 0: it begins anew
        self.leaves: list[int] = []  # tokens after which it leaves the state of a prefix behind
        self.ended = False

    def between_images(self, position: int) -> int:
        """The last position up to this one that is not inside an image."""
        at = bisect_right(self.images, position, key=lambda image: image[0]) - 1
        if at < 0 or position >= self.images[at][1]:
            return position
        return self.images[at][0]

    def image_digests(self, first: int, stop: int) -> bytes:
        """Of the images that have a token at one of these positions, and where each begins: a token of an image may be
        one of the text too."""
        images = [pair for pair in self.request.images if pair[0] < stop and pair[0] + pair[1].tokens > first]
        return ",".join(f"{each.digest} {each.tokens} {at - first}" for at, each in images).encode()


@dataclass(frozen=True)
class PromptPiece:
    """Tokens of a prompt, or of a sequence that is computed anew, that are in a step. samples: they are the last;
    taken: of the tokens that the step has room for."""

    sequence: LiveSequence
    first: int
    count: int
    samples: bool
    taken: int


class Scheduler:
    """State and decisions; see the module."""

    def __init__(self, spec: SchedulerSpec):
        rows = spec.most_sequences
        self.spec = spec
        self.pages = PageTables(spec.groups, rows, spec.longest, spec.page_size)
        self.sources = (
            None if spec.source is None else SourcePages(spec.source, rows, spec.most_of_source, spec.page_size)
        )
        self.states = PrefixStates(spec.states) if spec.states else None
        self._leaving: list[tuple[int, bytes]] = []  # in this step: row, and key of its last page
        self._live: dict[int, LiveSequence] = {}
        self._waiting: list[tuple[tuple[int, int], LiveSequence]] = []  # a heap; those ended are skipped
        self._deadlines: list[tuple[float, int]] = []  # a heap
        self._row_of: list[LiveSequence | None] = [None] * rows
        self._free_rows = list(range(rows))  # a heap
        self._prompts: list[tuple[tuple[int, int], LiveSequence]] = []  # running, prompt not yet computed; by rank
        self._owner = np.full(rows, -1, np.int64)  # request
        self._next = np.zeros(rows, np.int64)  # position of the next token to be computed
        self._left = np.zeros(rows, np.int64)  # tokens that may still be drawn
        self._pending = np.zeros(rows, np.int64)  # tokens drawn but not observed
        self._last = np.zeros(rows, np.int64)  # the token observed last
        self._decodes = np.zeros(rows, np.bool_)  # only the last token is to be computed
        self._waits = np.zeros(rows, np.bool_)  # until its last token is observed
        self._turn = np.zeros(rows, np.int64)  # number of the step from which the device has the last token
        self._ones = np.ones(rows, np.int64)
        self._zeros = np.zeros(rows, np.int64)
        self._true = np.ones(rows, np.bool_)
        self._starts = np.arange(rows + 1, dtype=np.int32)
        self._last_number = -1
        self._scheduled = 0
        self._observed = 0
        self._blocked: tuple[int, int] | None = None  # the request that did not fit, and the fewest pages since then

    def add(self, request: Request) -> None:
        """A request begins to wait. RequestDoesNotFit if it could never be served; ValueError if its number is not
        larger than those before."""
        if request.number <= self._last_number:
            raise ValueError(f"request {request.number}: numbers must grow, and the last was {self._last_number}")
        self.check(request)
        self._last_number = request.number
        sequence = LiveSequence(request, self.spec)
        self._live[sequence.number] = sequence
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.number))

    def check(self, request: Request) -> None:
        """RequestDoesNotFit if a request could never be served."""
        most = 1 if request.options.tokens is None else request.options.tokens
        if not request.prompt or len(request.computed) + most > self.spec.room:
            raise RequestDoesNotFit(request, self.spec.room)
        if self.spec.source is not None and not 1 <= request.source_length <= self.spec.source_room:
            raise SourceDoesNotFit(request.source_length, self.spec.source_room)
        largest = max((image.tokens for _, image in request.images), default=0)
        if largest > self.spec.image_room:
            raise ImageDoesNotFit(largest, self.spec.image_room)

    def cancel(self, number: int, reason: EndReason = "cancelled") -> Finished | None:
        """A request is over, at any time. None if it is already, or never was."""
        sequence = self._live.get(number)
        return None if sequence is None else self._end(sequence, reason)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - self.num_running

    @property
    def num_running(self) -> int:
        return self.spec.most_sequences - len(self._free_rows)

    @property
    def idle(self) -> bool:
        """Nobody waits or runs."""
        return not self._live

    def decoding(self) -> list[LiveSequence]:
        """Those who decode and whose tokens are all known, with room for more than one: drafts may follow."""
        rows = np.flatnonzero(self._decodes & (self._left > 1) & (self._pending == 0)).tolist()
        return [sequence for row in rows if (sequence := self._row_of[row]) is not None]

    def tokens_of(self, number: int) -> array[int]:
        """Tokens of a live request that are known: its prompt, and those made and observed."""
        return self._live[number].tokens

    def schedule(self, now: float = 0.0, drafts: Mapping[int, Sequence[int]] | None = None) -> Step:
        """The next step. `now`: the engine's clock, in seconds; `drafts` (late < in_flight): of requests, tokens that
        may follow their last one. ValueError if too many steps have not been observed."""
        if self._scheduled - self._observed > self.spec.late:
            raise ValueError(f"step {self._observed} must be observed before another is scheduled")
        if drafts and self.spec.late >= self.spec.in_flight:
            raise ValueError("drafts need late < in_flight: how many are accepted decides where the next step begins")
        finished = self._expire(now)
        preempted: list[int] = []
        rows = self._decoding(preempted)
        firsts = self._next[rows]
        pieces = self._pieces(self.spec.most_tokens - len(rows), admit=not preempted)
        budget = self.spec.most_tokens - len(rows) - sum(piece.taken for piece in pieces)
        extra = self._with_drafts(rows, drafts, budget) if drafts else {}
        step = self._assemble(rows, firsts, pieces, extra, (tuple(preempted), tuple(finished)))
        self._next[rows] += 1
        self._left[rows] -= 1
        self._pending[rows] += 1
        self._turn[rows] = self._scheduled + self.spec.in_flight
        for row, more in extra.items():
            self._next[row] += len(more)
        self._scheduled += len(step) > 0
        return step

    # ---- who decodes ----

    def _decoding(self, preempted: list[int]) -> np.ndarray:
        """Rows of those who decode in this step, each with a page for its next token. While there are too few pages,
        the last by rank gives its own back."""
        pages, size = self.pages, self.spec.page_size
        while True:
            rows = self._whose_turn()
            firsts = self._next[rows]
            pages.leave_windows(rows, firsts)
            short = rows[firsts >= pages.filled[rows] * size].tolist()
            if len(short) <= pages.available():
                break
            self._preempt(max(filter(None, self._row_of), key=lambda s: s.rank), preempted)
        for row in short:
            pages.extend(row, 1)
        return rows

    def _whose_turn(self) -> np.ndarray:
        """Rows of those who decode in this step."""
        decodes = self._decodes & (self._left > 0)
        decodes &= ~self._waits | (self._pending == 0)
        if self.spec.in_flight == 1:
            return np.flatnonzero(decodes)
        rows = np.flatnonzero(decodes & ((self._pending == 0) | (self._turn <= self._scheduled)))
        part = -(-np.count_nonzero(decodes) // self.spec.in_flight)
        return np.sort(rows[np.argsort(self._turn[rows], kind="stable")[:part]])

    def _with_drafts(self, rows: np.ndarray, drafts: Mapping[int, Sequence[int]], budget: int) -> dict[int, list[int]]:
        """By row, drafts for which there are tokens in the step, pages and room; each group of drafts is followed by
        one token that the model draws."""
        found: dict[int, list[int]] = {}
        pages, size = self.pages, self.spec.page_size
        for row in rows.tolist():
            given = drafts.get(int(self._owner[row]), ())
            first, filled = int(self._next[row]), int(pages.filled[row])
            places = (filled + pages.available()) * size - first - 1
            count = min(len(given), budget, int(self._left[row]) - 1, places)
            if count <= 0:
                continue
            more = pages_of(first + 1 + count, size) - filled
            if more > 0:
                pages.extend(row, more)
            budget -= count
            found[row] = [int(token) for token in given[:count]]
        return found

    # ---- prompts ----

    def _pieces(self, budget: int, admit: bool) -> list[PromptPiece]:
        """Of prompts, within a budget of tokens. Nobody is admitted to pages that others had to give back."""
        pieces: list[PromptPiece] = []
        running = [sequence for _, sequence in self._prompts]
        index, read = 0, 0  # tokens that an encoder reads
        while budget > 0:
            head = self._head() if admit else None
            if head is not None and (index == len(running) or head.rank < running[index].rank):
                if not self._admit(head):
                    admit = False
                    continue
                sequence = head
            elif index < len(running):
                sequence = running[index]
                index += 1
            else:
                break
            source = sequence.request.source_length if sequence.fresh else 0
            if read and read + source > SOURCE_TOKENS:
                break
            piece = self._piece(sequence, budget)
            if piece is not None:
                pieces.append(piece)
                budget -= piece.taken
                read += source
            if self._ends_at_image(sequence):
                break  # what is left of the budget would give pages that it needs to those who come after it
        return pieces

    def _ends_at_image(self, sequence: LiveSequence) -> bool:
        """Whether more of its prompt must wait, because an image has all of its tokens in one step."""
        following = int(self._next[sequence.row])
        return following < len(sequence.tokens) and any(first == following for first, _ in sequence.images)

    def _piece(self, sequence: LiveSequence, budget: int) -> PromptPiece | None:
        """The next piece of a prompt; None while others have its pages. There were enough when it was admitted: those
        who decode, or came before it by rank, have taken them since, and give them back when they end."""
        row, total, pages, size = sequence.row, len(sequence.tokens), self.pages, self.spec.page_size
        first = int(self._next[row])
        pages.leave_windows(np.array([row]), np.array([first]))
        places = (int(pages.filled[row]) + pages.available()) * size - first
        if places <= 0:
            return None
        whole = sequence.between_images(first + min(budget, total - first, places))
        stop = min((place for place in sequence.leaves if first < place < whole), default=whole)
        count = stop - first
        if count <= 0:
            return None
        if stop in sequence.leaves:
            self._leaving.append((row, self._keys(sequence, stop // size)[-1]))
        # what is computed in the next step, because a state is to be left before it, has its pages now, and its part of
        # this step's tokens unless it is the rest: nobody who comes after it may have either
        more = pages_of(whole, size) - int(pages.filled[row])
        if more > 0:
            pages.extend(row, more)
        self._next[row] = first + count
        self._know(sequence)
        samples = False
        if first + count == total:
            self._prompts.remove((sequence.rank, sequence))
            sequence.scored_from = None
            samples = bool(self._left[row] > 0)
            if samples:
                self._left[row] -= 1
                self._pending[row] += 1
                self._turn[row] = self._scheduled + self.spec.in_flight
                self._decodes[row] = True
        return PromptPiece(sequence, first, count, samples, count if whole == total else whole - first)

    def _head(self) -> LiveSequence | None:
        """Who is admitted next, if a row is free."""
        while self._waiting and self._waiting[0][1].ended:
            heapq.heappop(self._waiting)
        if not self._waiting or not self._free_rows or self._waiting[0][1].pending:
            return None
        return self._waiting[0][1]

    def _admit(self, sequence: LiveSequence) -> bool:
        """Give the head of those who wait a row and the known pages of its prefix, if there are pages for all of its
        tokens and the next one. If nobody runs, it need not have all at once."""
        alone = self.num_running == 0
        available = self.pages.available()
        if not alone and self._blocked is not None and self._blocked[0] == sequence.number:
            fewest = self._blocked[1]
            if available <= fewest:
                self._blocked = (sequence.number, available)
                return False
        before = len(sequence.tokens) - 1  # tokens that need not be computed, if they are there
        before = before if sequence.scored_from is None else min(before, sequence.scored_from - 1)
        before = min(before, max(0, len(sequence.tokens) - self.spec.further))
        every = self._keys(sequence, before // self.spec.page_size)
        keys = self._whole_images(sequence, every[: self.pages.longest_prefix(every)]) if self.spec.prefixes else []
        if not alone and not self._has_room(sequence, keys):
            self._blocked = (sequence.number, available)
            return False
        self._blocked = None
        heapq.heappop(self._waiting)
        row = heapq.heappop(self._free_rows)
        self.pages.attach(row, keys)
        if self.sources is not None:
            self.sources.take(row, sequence.request.source_length)
        sequence.row = row
        sequence.fresh = True
        if self.states is not None:
            sequence.begin_from = self.states.use(keys[-1]) if keys else 0
            sequence.leaves = self._places_to_leave(sequence, every, len(keys))
        sequence.known = len(keys)
        sequence.next_key = (len(keys) + 1) * self.spec.page_size + self.spec.further
        if sequence.cached is None:
            sequence.cached = min(len(keys) * self.spec.page_size, sequence.prompt)
        self._row_of[row] = sequence
        self._owner[row] = sequence.number
        self._next[row] = len(keys) * self.spec.page_size
        self._left[row] = sequence.most - len(sequence.tokens)
        self._pending[row] = 0
        self._last[row] = sequence.tokens[-1]
        self._decodes[row] = False
        self._waits[row] = sequence.request.options.grammar is not None
        insort(self._prompts, (sequence.rank, sequence))
        return True

    def _whole_images(self, sequence: LiveSequence, keys: list[bytes]) -> list[bytes]:
        """Keys of pages after which no image goes on, and that are known as a prefix, with their state."""
        size, count, states = self.spec.page_size, len(keys), self.states
        while count and (
            (states is not None and not states.has(keys[count - 1]))
            or sequence.between_images(count * size) < count * size
            or self.pages.longest_prefix(keys[:count]) < count
        ):
            count -= 1
        return keys[:count]

    def _places_to_leave(self, sequence: LiveSequence, keys: list[bytes], begins: int) -> list[int]:
        """Tokens of a sequence after which its state is one that others may begin from: those of all its full pages,
        and of as many as another sequence had too. begins: pages of the prefix that it begins with."""
        size, last = self.spec.page_size, (len(sequence.tokens) - 1) // self.spec.page_size
        common = 0 if self.states is None else self.states.computed(keys)
        places = [pages * size for pages in sorted({common, last}) if pages > begins]
        return [place for place in places if sequence.between_images(place) == place]

    def _has_room(self, sequence: LiveSequence, keys: list[bytes]) -> bool:
        """There are pages for all tokens of a sequence whose first pages have these keys, and for its source."""
        if self.sources is not None and not self.sources.has_room(sequence.request.source_length):
            return False
        tokens = len(sequence.tokens)
        together = min(tokens, self.spec.most_tokens)
        for g, (group, pool) in enumerate(zip(self.spec.groups, self.pages.pools)):
            shared = sum(pool.users[page] > 0 for page in self.pages.found(g, keys))
            if group.most_pages(tokens + 1, together, self.spec.page_size) - shared > pool.available:
                return False
        return True

    # ---- the step ----

    def _assemble(
        self,
        rows: np.ndarray,
        firsts: np.ndarray,
        pieces: list[PromptPiece],
        extra: dict[int, list[int]],
        before: tuple[tuple[int, ...], tuple[Finished, ...]],
    ) -> Step:
        """A step of those who decode, with their drafts, and of pieces of prompts; before it, some were preempted and
        some are over."""
        decoding = len(rows)
        tokens = np.where(self._pending[rows] > 0, SAMPLED, self._last[rows])
        counts, drafts, samples = self._ones[:decoding], self._zeros[:decoding], self._true[:decoding]
        positions, starts, token_rows = firsts, self._starts[: decoding + 1], rows
        if pieces or extra:
            runs = [tokens]
            if extra:
                runs = [np.array([token, *extra.get(row, ())]) for row, token in zip(rows.tolist(), tokens.tolist())]
            drafts = np.array([len(extra.get(row, ())) for row in rows.tolist()] + [0] * len(pieces), np.int64)
            for piece in pieces:
                some = piece.sequence.tokens[piece.first : piece.first + piece.count]
                runs.append(np.frombuffer(some, np.int64))
            tokens = np.concatenate(runs)
            rows = np.concatenate((rows, [piece.sequence.row for piece in pieces])).astype(np.int64)
            firsts = np.concatenate((firsts, [piece.first for piece in pieces])).astype(np.int64)
            samples = np.concatenate((samples, [piece.samples for piece in pieces])).astype(np.bool_)
            counts = 1 + drafts
            counts[decoding:] = [piece.count for piece in pieces]
            starts = np.zeros(len(rows) + 1, np.int32)
            np.cumsum(counts, out=starts[1:])
            positions = np.arange(len(tokens)) + np.repeat(firsts - starts[:-1], counts)
            token_rows = np.repeat(rows, counts)
        return Step(
            number=self._scheduled,
            requests=self._owner[rows],
            rows=rows,
            firsts=firsts,
            counts=counts,
            samples=samples,
            drafts=drafts,
            tokens=tokens,
            positions=positions,
            starts=starts,
            slots=self.pages.slots(token_rows, positions),
            tables=self.pages.tables,
            admitted=self._admitted(decoding, pieces),
            preempted=before[0],
            finished=before[1],
            sequences=tuple([self._row_of[row] for row in rows.tolist()]),
            begin_from=self._begin_from(pieces),
            leave=self._leave_states(),
            sources=self.sources,
        )

    def _admitted(self, decoding: int, pieces: list[PromptPiece]) -> tuple[int, ...]:
        """Places in the batch of those who run for the first time since they have their row."""
        places = tuple(decoding + i for i, piece in enumerate(pieces) if piece.sequence.fresh)
        for piece in pieces:
            piece.sequence.fresh = False
        return places

    def _begin_from(self, pieces: list[PromptPiece]) -> tuple[tuple[int, int], ...]:
        """Rows of those who begin with the state of a prefix, and its slots, which are free from the next step on."""
        found = [(piece.sequence.row, piece.sequence.begin_from) for piece in pieces if piece.sequence.begin_from]
        for piece in pieces:
            self._release_state(piece.sequence)
        return tuple(found)

    def _leave_states(self) -> tuple[tuple[int, int], ...]:
        """Rows whose state is kept after this step, and its slots. From the next step on others may begin there."""
        if self.states is None or not self._leaving:
            return ()
        slots = self.states.leave([key for _, key in self._leaving])
        found = {key: row for row, key in reversed(self._leaving)}
        self._leaving = []
        return tuple((found[key], slot) for key, slot in slots.items())

    def _release_state(self, sequence: LiveSequence) -> None:
        if self.states is not None and sequence.begin_from:
            self.states.pool.release(sequence.begin_from)
            sequence.begin_from = 0

    # ---- what became of it ----

    def observe(self, step: Step, tokens: np.ndarray | Sequence[int] | Sequence[Sequence[int]]) -> Observed:
        """Read the tokens of the step that was scheduled first of those not observed.

        tokens  (S,), or (S, K) with those accepted after drafts: of each sequence the drafts that were accepted and
                one more, then NO_TOKEN. What stands there of sequences that draw none is not read

        ValueError if it is another step's turn, or tokens are not as said.
        """
        if step.number != self._observed or not len(step):
            raise ValueError(f"step {step.number} is observed, but step {self._observed} comes next")
        drawn = np.asarray(tokens, np.int64)
        drawn = drawn[:, None] if drawn.ndim == 1 else drawn
        if len(drawn) != len(step) or (drawn[step.samples, :1] < 0).any():
            raise ValueError("tokens must have one token at least for each sequence that samples")
        self._observed += 1
        here = step.samples & (self._owner[step.rows] == step.requests)
        rows = step.rows[here]
        self._pending[rows] -= 1
        self._last[rows] = drawn[here, 0]
        kept, finished = [0] * len(step), []
        speculative = step.drafts.any()
        for i, (sequence, samples, token) in enumerate(
            zip(step.sequences, step.samples.tolist(), drawn[:, 0].tolist())
        ):
            if sequence.ended:
                continue
            reason: EndReason | None = None
            if not samples:
                reason = self._end_without_token(sequence, int(step.firsts[i] + step.counts[i]))
            elif speculative and step.drafts[i]:
                kept[i], reason = self._keep_accepted(sequence, step, i, drawn[i])
            else:
                kept[i] = 1
                sequence.pending -= sequence.row < 0
                reason = self._keep(sequence, token)
            if reason is not None:
                finished.append(self._end(sequence, reason))
        return Observed(kept, finished)

    def _keep(self, sequence: LiveSequence, token: int) -> EndReason | None:
        """One more token of a sequence; why it is its last."""
        sequence.tokens.append(token)
        length = len(sequence.tokens)
        if token in sequence.ends:
            return "stop"
        if length >= sequence.most:
            return "length"
        if length >= sequence.next_key and sequence.row >= 0:
            self._know(sequence)
        return None

    def _keep_accepted(
        self, sequence: LiveSequence, step: Step, index: int, drawn: np.ndarray
    ) -> tuple[int, EndReason | None]:
        """Drafts that were accepted, and the token after them: how many are kept, and why the last one is."""
        accepted = drawn[drawn != NO_TOKEN].tolist()
        begin, count = int(step.starts[index]) + 1, int(step.drafts[index])
        given = step.tokens[begin : begin + count].tolist()
        known = [token for token in given if token > DRAFTED]  # others only the device can compare
        if not 1 <= len(accepted) <= count + 1 or (known and accepted[:-1] != given[: len(accepted) - 1]):
            raise ValueError(f"tokens {accepted} are not accepted drafts of {given} and one more")
        row, first = sequence.row, int(step.firsts[index])
        sequence.drafted += count
        sequence.pending -= row < 0
        for kept, token in enumerate(accepted, 1):
            if row >= 0:
                self._next[row] = first + kept
            sequence.accepted += kept < len(accepted)
            reason = self._keep(sequence, token)
            if reason is not None:
                return kept, reason
        if row < 0:
            return len(accepted), None
        self._last[row] = accepted[-1]
        self._left[row] = sequence.most - len(sequence.tokens)
        self.pages.shrink(row, pages_of(first + len(accepted), self.spec.page_size))
        return len(accepted), None

    def _end_without_token(self, sequence: LiveSequence, computed: int) -> EndReason | None:
        """A request for no tokens is over when its prompt is computed."""
        return "length" if computed == len(sequence.tokens) == sequence.most else None

    # ---- sequences ----

    def _keys(self, sequence: LiveSequence, count: int) -> list[bytes]:
        """Keys of its first full pages."""
        keys, size, further = sequence.keys, self.spec.page_size, self.spec.further
        for n in range(len(keys), count):
            before = keys[-1] if keys else first_key(sequence.request.options.adapter, sequence.source)
            first, stop = n * size, (n + 1) * size + further
            images = sequence.image_digests(first, stop) if sequence.images else b""
            keys.append(page_key(before, sequence.tokens[first:stop].tobytes(), images))
        return keys[:count]

    def _know(self, sequence: LiveSequence) -> None:
        """Pages whose tokens are known and in a step already are known from now on."""
        row, size, further = sequence.row, self.spec.page_size, self.spec.further
        # the last depth of multi-token prediction is further - 1 positions behind
        computed = int(self._next[row]) - max(0, further - 1)
        full = max(0, min(len(sequence.tokens) - further, computed)) // size
        if full > sequence.known:
            keys = self._keys(sequence, full)
            for index in range(sequence.known, full):
                self.pages.know(row, index, keys[index])
                if self.states is not None:
                    self.states.add_computed(keys[index])
            sequence.known = full
            sequence.next_key = (full + 1) * size + further

    def _leave(self, sequence: LiveSequence) -> None:
        """A sequence gives back its row and its pages; those that are full stay known."""
        row = sequence.row
        self._know(sequence)
        self._release_state(sequence)
        self.pages.release(row)
        if self.sources is not None:
            self.sources.release(row)
        sequence.pending = int(self._pending[row])
        sequence.row = -1
        sequence.fresh = False
        self._row_of[row] = None
        self._owner[row] = -1
        self._decodes[row] = False
        heapq.heappush(self._free_rows, row)
        entry = (sequence.rank, sequence)
        if entry in self._prompts:
            self._prompts.remove(entry)

    def _preempt(self, sequence: LiveSequence, preempted: list[int]) -> None:
        self._leave(sequence)
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        preempted.append(sequence.number)

    def _end(self, sequence: LiveSequence, reason: EndReason) -> Finished:
        if sequence.row >= 0:
            self._leave(sequence)
        sequence.ended = True
        del self._live[sequence.number]
        cached, drafted, accepted = sequence.cached or 0, sequence.drafted, sequence.accepted
        return Finished(sequence.number, reason, cached, drafted=drafted, accepted=accepted)

    def _expire(self, now: float) -> list[Finished]:
        """Requests whose time is up."""
        finished = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            ended = self.cancel(number, "deadline")
            if ended is not None:
                finished.append(ended)
        return finished
