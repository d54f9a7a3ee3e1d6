"""Random traces for the scheduler of generation, and a stub of a model that sees each mistake.

What the stub remembers of a token is a hash of all tokens up to it, in the slot the step names. It reads the pages of
the tables and compares: a wrong, missing or overwritten page shows at once. The token it draws is a function of what it
read, so a request's answer is known beforehand, whatever else runs (`answer`). With SchedulerSpec.further it remembers
beside that, in the same slots, a hash of the tokens up to so many after, as depths of multi-token prediction do. Some
prompts have images, whose tokens are all alike; some traces have an encoder, which reads a source for each request:
both are part of what is remembered. Some have layers that keep a state: a hash of all tokens so far, of each row, which
a sequence with a known prefix begins with.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from phalanx.inference import scheduler as scheduler_module
from phalanx.inference.pages import GroupSpec
from phalanx.inference.request import Finished, PromptImage, Request, SamplingOptions
from phalanx.inference.scheduler import NO_TOKEN, SAMPLED, Scheduler, SchedulerSpec, Step
from phalanx.sequence.paged import NO_PAGE

VOCABULARY = 16
IMAGE = 7
MANY = 1 << 40


def grown(before: int, token: int) -> int:
    """What is remembered of a token after others."""
    return hash((before, token, 12345)) % MANY


def drawn(remembered: int) -> int:
    return remembered % 10007 % VOCABULARY


def remembered_of(tokens: list[int] | tuple[int, ...], request: Request) -> list[int]:
    found, last = [], hash(request.source)
    seen = {at + n: int(image.digest, 16) for at, image in request.images for n in range(image.tokens)}
    for place, token in enumerate(tokens):
        last = grown(last, token + seen.get(place, 0))
        found.append(last)
    return found


def answer(request: Request, room: int) -> tuple[list[int], str]:
    """Tokens that a request makes if nobody disturbs it, and why it ends."""
    options = request.options
    most = room if options.tokens is None else len(request.prompt) + options.tokens
    tokens = list(request.prompt)
    last = remembered_of(tokens, request)[-1]
    while len(tokens) < most:
        tokens.append(drawn(last))
        if tokens[-1] in options.end_tokens:
            return tokens, "stop"
        last = grown(last, tokens[-1])
    return tokens, "length"


@dataclass(frozen=True)
class Trace:
    """What happens: arrivals (before a step), and requests cancelled (before a step, or between a step and its being
    observed). draft: so many tokens are proposed to each sequence, a part of them right."""

    spec: SchedulerSpec
    arrivals: tuple[tuple[int, Request], ...]
    cancels: tuple[tuple[int, bool, int], ...]
    draft: int
    seed: int


def draw_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    tight = rng.random() < 0.4  # long answers at once, and pages for little more than one
    size = rng.choice((1, 2, 3, 4, 8))
    longest = rng.randint(20 if tight else 2, 60)
    sequences = rng.randint(3 if tight else 1, 8)
    kinds = rng.choice(((None,), (None,), (1,), (None, 1), (None, 1, 1)))
    windows = [None if kind is None else rng.randint(1, longest + 3) for kind in kinds]
    spare = rng.choice((0.3, 1) if tight else (0, 0.3, 1, 2, 6))
    groups = []
    for window in windows:
        whole = -(-longest // size)
        least = whole if window is None else min(whole, (window + size - 2) // size + 1)
        if window is None and rng.random() < 0.3:
            least = rng.randint(2 if longest > size else 1, whole) if whole > 1 else 1
        groups.append(GroupSpec(window, 1 + least + int(spare * whole * rng.random())))
    draft = rng.choice((0, 0, 1, 3, 5))
    in_flight = rng.choice((1, 1, 1, 2, 4))
    late = rng.randint(0, in_flight - 1 if draft else in_flight)
    tokens = sequences + rng.choice((0, 1, rng.randint(0, 40)))
    spec = SchedulerSpec(
        most_sequences=sequences,
        most_tokens=tokens,
        longest=longest,
        page_size=size,
        groups=tuple(groups),
        late=late,
        in_flight=in_flight,
    )
    bases = [tuple(rng.choices(range(VOCABULARY), k=longest)) for _ in range(3)]
    arrivals, cancels = [], []
    step = 0
    for number in range(rng.randint(4 if tight else 1, 14)):
        step += 0 if tight else rng.choice((0, 0, 0, 1, rng.randint(0, 12)))
        request = draw_request(rng, number, bases, (spec.room, step, tight))
        if request is not None:
            arrivals.append((step, request))
            if rng.random() < 0.15:
                cancels.append((step + rng.randint(0, 25), rng.random() < 0.5, number))
    spec = replace(spec, further=rng.choice((0, 0, 1, 2)))
    spec, arrivals = with_streams(random.Random(MANY + seed), spec, arrivals)
    others = random.Random(2 * MANY + seed)
    if seed % 4 == 1 and not draft and not spec.further:  # drafts and states exclude each other
        few = others.choice((0, 3, 3))  # layers with states alone have no pages
        spec = replace(spec, states=others.choice((1, 2, 3, 8)), groups=spec.groups[:few])
    return Trace(spec, tuple(arrivals), tuple(cancels), draft, seed)


def with_streams(
    rng: random.Random, spec: SchedulerSpec, arrivals: list[tuple[int, Request]]
) -> tuple[SchedulerSpec, list[tuple[int, Request]]]:
    """In some traces requests have images, or an encoder reads something."""
    if rng.random() < 0.3:
        whole = -(-spec.longest // spec.page_size)
        spec = replace(spec, source=GroupSpec(None, 1 + whole + int(rng.random() * 2 * whole)))
    if rng.random() < 0.4 or spec.source is not None:
        arrivals = [(step, with_own(rng, request, spec)) for step, request in arrivals]
    return spec, arrivals


def with_own(rng: random.Random, request: Request, spec: SchedulerSpec) -> Request:
    """The request with images here and there, and a source."""
    prompt, images, at = list(request.prompt), list[tuple[int, PromptImage]](), 0
    while spec.image_room and rng.random() < 0.6:
        at += rng.randint(0, 6)
        tokens = rng.randint(1, min(7, spec.image_room))
        if at + tokens > len(prompt):
            break
        prompt[at : at + tokens] = [IMAGE] * tokens
        images.append((at, PromptImage(b"", "", rng.choice(("aa", "bb")), (1, tokens), tokens)))
        at += tokens
    source = () if spec.source is None else tuple(rng.choices((1, 2), k=rng.randint(1, spec.source_room)))
    return replace(request, prompt=tuple(prompt), images=tuple(images), source=source)


def draw_request(
    rng: random.Random, number: int, bases: list[tuple[int, ...]], place: tuple[int, int, bool]
) -> Request | None:
    room, step, tight = place
    tokens = rng.choice((None, rng.randint(1, room)) if tight else (None, 0, 1, rng.randint(1, 12)))
    most = room - (1 if tokens is None else tokens)
    if most < 1:
        return None
    length = rng.randint(1, most) if rng.random() < 0.5 else min(most, rng.randint(1, 6))
    same = rng.choice((0, length, rng.randint(0, length)))
    prompt = rng.choice(bases)[:same] + tuple(rng.choices(range(VOCABULARY), k=length - same))
    scored = rng.random() < 0.1
    options = SamplingOptions(
        tokens=tokens,
        end_tokens=rng.choice(((), (), (3,), (0, 9))),
        prompt_logprobs=0 if scored else None,
        scored_from=rng.randint(1, max(1, length - 1)) if scored else 1,
    )
    deadline = step + rng.random() * 40 if rng.random() < 0.1 else None
    return Request(number=number, prompt=prompt, options=options, priority=rng.choice((0, 0, 1, 2)), deadline=deadline)


class StubModel:
    """A device that runs steps when they are scheduled, and checks all that they say."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.spec = scheduler.spec
        self.memory = [np.full(g.num_pages * self.spec.page_size, -1, np.int64) for g in self.spec.groups]
        self.used = [[0] * g.num_pages for g in self.spec.groups]  # how often a page was taken
        self.written = [np.full(g.num_pages * self.spec.page_size, -1, np.int64) for g in self.spec.groups]
        self.full = next((g for g, group in enumerate(self.spec.groups) if group.window is None), None)
        self.of_depths = [-1] * (0 if self.full is None else len(self.memory[self.full]))
        self.of_sources = np.full(
            0 if self.spec.source is None else self.spec.source.num_pages * self.spec.page_size, -1
        )
        self.begins = [0] * self.spec.most_sequences
        self.states: list[int | None] = [None] * self.spec.most_sequences
        self.of_prefixes: list[int | None] = [None] * (1 + self.spec.states)
        self.last = [NO_TOKEN] * self.spec.most_sequences
        self.last_at = [0] * self.spec.most_sequences  # the step in which it was drawn
        for g, pool in enumerate(scheduler.pages.pools):
            pool.take = self.counted(g, pool.take)  # type: ignore[method-assign]

    def counted(self, group: int, take: Callable[[], int]) -> Callable[[], int]:
        def counting() -> int:
            page = take()
            self.used[group][page] += 1
            return page

        return counting

    def run(self, step: Step, known: list[set[tuple[int, int]]], told: dict[int, list[int]]) -> list[list[int]]:
        """What is drawn for each sequence, all draft tokens and one more judged. known: pages, each with how often it
        had been taken, that were known before the step was scheduled; told: right tokens of requests."""
        assert len(set(step.rows.tolist())) == len(step) and step.starts[-1] == len(step.tokens) == len(step.positions)
        tokens = step.tokens.tolist()
        for i, row in enumerate(step.rows.tolist()):
            begin, end = int(step.starts[i]), int(step.starts[i + 1])
            assert end - begin == step.counts[i] > 0
            assert step.positions[begin:end].tolist() == list(range(step.firsts[i], step.firsts[i] + step.counts[i]))
            assert SAMPLED not in tokens[begin + 1 : end]
            if tokens[begin] == SAMPLED:
                assert self.spec.late and i not in step.admitted
                assert step.number >= self.last_at[row] + self.spec.in_flight, "a token is not there yet"
                tokens[begin] = self.last[row]
        self.check_streams(step)
        self.begin_states(step)
        self.check_depths(step, told)
        written = self.write(step, tokens, known, told)
        self.write_states(step, written)
        made = self.read(step, tokens, written)
        self.write_depths(step, told, made)
        return made

    def begin_states(self, step: Step) -> None:
        for i in step.admitted:
            assert step.firsts[i] == 0 or not self.spec.states or step.rows[i] in dict(step.begin_from), "no state"
            self.states[step.rows[i]] = hash(step.sequences[i].request.source)
        for row, slot in step.begin_from:
            self.states[row] = self.of_prefixes[slot]

    def write_states(self, step: Step, written: list[list[int]]) -> None:
        """The state of each row is that of the tokens before its first one here."""
        if not self.spec.states:
            return
        for i, row in enumerate(step.rows.tolist()):
            first, before = int(step.firsts[i]), hash(step.sequences[i].request.source)
            assert self.states[row] == (written[i][first - 1] if first else before), "a state is of other tokens"
            self.states[row] = written[i][-1]
        assert len({slot for _, slot in step.leave}) == len(step.leave), "two states in one slot"
        for row, slot in step.leave:
            assert 1 <= slot <= self.spec.states
            self.of_prefixes[slot] = self.states[row]

    def check_streams(self, step: Step) -> None:
        """Images are whole, in the order of the step's tokens; sources are written when a sequence begins, and are
        there as long as it runs."""
        images, numbers = [], []
        for i, sequence in enumerate(step.sequences):
            first, end = int(step.firsts[i]), int(step.firsts[i] + step.counts[i])
            of_token = [-1] * (end - first)
            for at, image in sequence.request.images:
                assert end <= at or at + image.tokens <= first or first <= at < at + image.tokens <= end, "part of one"
                if first <= at < end:
                    of_token[at - first : at - first + image.tokens] = [len(images)] * image.tokens
                    images.append(image)
            numbers += of_token
        assert list(step.images) == images
        sizes = np.array([image.tokens for image in images], np.int64)
        starts = np.cumsum(sizes) - sizes
        owners = [
            -1 if number < 0 else int(np.searchsorted(starts, number, "right")) - 1 for number in step.feature_numbers
        ]
        assert owners == numbers, "a token stands for another image"
        if step.sources is None:
            return
        for i in step.admitted:
            slots = step.sources.slots(int(step.rows[i]))
            assert (slots >= self.spec.page_size).all() and len(set(slots.tolist())) == len(slots)
            self.of_sources[slots] = step.sequences[i].request.source
        for row, sequence in zip(step.rows.tolist(), step.sequences):
            found = self.of_sources[step.sources.slots(row)].tolist()
            assert found == list(sequence.request.source), "a source is another one"

    def slots_of_depths(self, step: Step, index: int, first: int, end: int) -> list[int]:
        """Of positions first .. end - 1 of a sequence of the step, in the group that keeps everything."""
        at, size = np.arange(first, end), self.spec.page_size
        return (step.tables[self.full][step.rows[index], at // size].astype(np.int64) * size + at % size).tolist()

    def check_depths(self, step: Step, told: dict[int, list[int]]) -> None:
        """What depths find of a sequence is of its own tokens, those after each included. Of sequences that begin here
        somebody may have it in this step: those are looked at in the next."""
        further = self.spec.further
        for i, row in enumerate(step.rows.tolist()):
            if i in step.admitted:
                self.begins[row] = int(step.firsts[i])
            elif further and self.full is not None:
                end = max(0, int(step.firsts[i]) + 1 - further)
                found = [self.of_depths[slot] for slot in self.slots_of_depths(step, i, 0, end)]
                wanted = remembered_of(told[int(step.requests[i])], step.sequences[i].request)
                assert found == wanted[further : end + further], "tokens after a page are others"

    def write_depths(self, step: Step, told: dict[int, list[int]], made: list[list[int]]) -> None:
        further = self.spec.further
        for i, row in enumerate(step.rows.tolist() if further and self.full is not None else ()):
            tokens = told[int(step.requests[i])] + made[i]
            here = int(step.counts[i] - step.drafts[i]) + max(0, len(made[i]) - 1)
            stop = min(int(step.firsts[i]) + here + 1, len(tokens)) - further
            begin = max(self.begins[row], int(step.firsts[i]) + 1 - further)
            remembered = remembered_of(tokens, step.sequences[i].request)
            for position, slot in zip(range(begin, stop), self.slots_of_depths(step, i, begin, max(begin, stop))):
                self.of_depths[slot] = remembered[position + further]

    def write(
        self, step: Step, tokens: list[int], known: list[set[tuple[int, int]]], told: dict[int, list[int]]
    ) -> list[list[int]]:
        """What is remembered of each sequence, from its first token on."""
        size = self.spec.page_size
        for g, slots in enumerate(step.slots):
            assert len(set(slots.tolist())) == len(step.tokens), "two tokens in one slot"
            for slot in slots.tolist():
                page = slot // size
                assert page != NO_PAGE and (page, self.used[g][page]) not in known[g], "a shared page is written"
                assert self.written[g][slot] != self.used[g][page], "a slot is written twice"
                self.written[g][slot] = self.used[g][page]
        all_remembered = []
        for i, number in enumerate(step.requests.tolist()):
            begin, end = int(step.starts[i]), int(step.starts[i + 1])
            sure = end - int(step.drafts[i])
            right = told[number]
            first = int(step.firsts[i])
            assert tokens[begin:sure] == right[first : first + sure - begin], "tokens are not those of the sequence"
            remembered = remembered_of(right[:first] + tokens[begin:end], step.sequences[i].request)
            for g, slots in enumerate(step.slots):
                self.memory[g][slots[begin:end]] = remembered[first:]
            all_remembered.append(remembered)
        return all_remembered

    def read(self, step: Step, tokens: list[int], written: list[list[int]]) -> list[list[int]]:
        size, all_drawn = self.spec.page_size, []
        for i, row in enumerate(step.rows.tolist()):
            first, end = int(step.firsts[i]), int(step.firsts[i] + step.counts[i])
            for group, table, memory in zip(self.spec.groups, step.tables, self.memory):
                begin = 0 if group.window is None else max(0, first - group.window + 1)
                positions = np.arange(begin, end)
                pages = table[row, positions // size].astype(np.int64)
                assert (pages != NO_PAGE).all(), "a page that is read is not there"
                assert memory[pages * size + positions % size].tolist() == written[i][begin:], "a wrong page is read"
            accepted = []
            if step.samples[i]:
                drafts = int(step.drafts[i])
                given = tokens[int(step.starts[i + 1]) - drafts : int(step.starts[i + 1])]
                for j in range(drafts + 1):
                    accepted.append(drawn(written[i][end - 1 - drafts + j]))
                    if j < drafts and accepted[-1] != given[j]:
                        self.reject(step, i, drafts - j)
                        break
                self.last[row] = accepted[-1]
                self.last_at[row] = step.number
            else:
                assert not step.drafts[i]
            all_drawn.append(accepted)
        return all_drawn

    def reject(self, step: Step, index: int, count: int) -> None:
        """The last so many slots of a sequence are free again."""
        end = int(step.starts[index + 1])
        for g, slots in enumerate(step.slots):
            self.written[g][slots[end - count : end]] = -1


class Run:
    """A trace, run to its end; each law is checked at each step. AssertionError says which is broken."""

    def __init__(self, trace: Trace, module: ModuleType = scheduler_module):
        self.trace = trace
        self.spec = trace.spec
        self.scheduler: Scheduler = module.Scheduler(trace.spec)
        self.model = StubModel(self.scheduler)
        self.rng = random.Random(trace.seed)
        self.answers = {r.number: answer(r, self.spec.room) for _, r in trace.arrivals}
        self.requests = {r.number: r for _, r in trace.arrivals}
        self.tokens: dict[int, list[int]] = {}  # that the device has made
        self.observed: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}  # places of prompts that were computed while they first ran
        self.finished: dict[int, Finished] = {}
        self.first_seen: dict[int, int] = {}
        self.decoding: dict[int, int] = {}  # and since when they wait
        self.journal: list[Any] = []
        self.counts = {"preempted": 0, "cached": 0, "drafts": 0, "steps": 0, "surplus": 0}

    def run(self) -> Run:
        arrivals = list(self.trace.arrivals)
        cancels = list(self.trace.cancels)
        flying: list[tuple[Step, list[list[int]]]] = []
        bound = 40 + sum(4 * (len(t) + 20) for t, _ in self.answers.values()) * 4
        now = 0
        while arrivals or not self.scheduler.idle or flying:
            while arrivals and arrivals[0][0] <= now:
                request = arrivals.pop(0)[1]
                self.scheduler.add(request)
                self.tokens[request.number] = list(request.prompt)
                self.observed[request.number] = []
            self.cancel(cancels, now, False)
            step, result = self.schedule(now)
            if len(step):
                flying.append((step, result))
            self.cancel(cancels, now, True)
            progress = bool(len(step) or flying or step.finished)
            if flying and (len(flying) > self.spec.late or not len(step)):
                self.observe(*flying.pop(0))
            self.check_pages()
            now += 1
            assert progress or arrivals or self.scheduler.idle or cancels, "nobody goes on"
            assert now < bound + (self.trace.arrivals[-1][0] if self.trace.arrivals else 0), "somebody starves"
        assert set(self.finished) == set(self.requests)
        self.check_pages()
        assert all(not any(pool.users) for pool in self.scheduler.pages.pools)
        if self.scheduler.states is not None:
            self.scheduler.states.pool.check()
            assert not any(self.scheduler.states.pool.users)
        self.counts["steps"] = now
        return self

    def schedule(self, now: int) -> tuple[Step, list[list[int]]]:
        pools = self.scheduler.pages.pools
        known = [
            {(page, self.model.used[g][page]) for page in range(pool.num_pages) if pool.is_known(page)}
            for g, pool in enumerate(pools)
        ]
        live = [self.scheduler._live[n] for n in self.tokens if n not in self.finished]
        waiting = {sequence.number for sequence in live if sequence.row < 0 or sequence.fresh}
        step = self.scheduler.schedule(float(now), self.drafts())
        for ended in step.finished:
            self.end(ended, "deadline")
        for number in self.tokens:
            deadline = self.requests[number].deadline
            assert deadline is None or deadline > now or number in self.finished, "a deadline is over"
        self.check_pages()
        self.check_step(step, waiting)
        result = self.model.run(step, known, self.tokens)
        for number, samples, accepted in zip(step.requests.tolist(), step.samples.tolist(), result):
            if samples:
                self.tokens[number] += accepted
        self.journal.append([(a.tolist()) for a in (step.requests, step.rows, step.tokens, *step.slots)])
        return step, [list(accepted) for accepted in result]

    def drafts(self) -> dict[int, list[int]] | None:
        """Right ones, and then wrong ones."""
        if not self.trace.draft:
            return None
        found = {}
        for number in self.decoding:
            if self.rng.random() < 0.8:
                right = self.answers[number][0][len(self.tokens[number]) :][: self.rng.randint(0, self.trace.draft)]
                wrong = [self.rng.randrange(VOCABULARY) for _ in range(self.trace.draft - len(right))]
                found[number] = right + wrong
        return found

    def check_step(self, step: Step, waiting: set[int]) -> None:
        spec = self.spec
        assert len(step.tokens) <= spec.most_tokens and len(step) <= spec.most_sequences
        self.counts["preempted"] += len(step.preempted)
        self.counts["drafts"] += int(step.drafts.sum())
        admitted = {int(step.requests[i]) for i in step.admitted}
        assert admitted <= waiting
        rank = {n: (-r.priority, n) for n, r in self.requests.items()}
        left = waiting - admitted - set(self.finished)
        if admitted and left:
            assert max(rank[n] for n in admitted) < min(rank[n] for n in left), "somebody was passed over"
        here = set(step.requests.tolist())
        for number in step.preempted:
            self.decoding.pop(number, None)
        for number in self.decoding:
            made = len(self.tokens[number])
            if number not in here and made < len(self.answers[number][0]):
                self.decoding[number] += 1
                assert self.decoding[number] < (1 if spec.in_flight == 1 else 2 * spec.in_flight), "a sequence waits"
        for number in step.preempted:
            assert number not in here
            if number not in self.first_seen:
                continue
            if here:
                assert min(rank[n] for n in here) < rank[number], "only those after it were computed"
        for i, number in enumerate(step.requests.tolist()):
            self.first_seen.setdefault(number, int(step.firsts[i]))
            if step.samples[i]:
                self.decoding[number] = 0

    def check_pages(self) -> None:
        """Conservation: users of a page are the rows whose tables have it."""
        pages = self.scheduler.pages
        running = {s.row: s for s in self.scheduler._live.values() if s.row >= 0}
        sources = self.scheduler.sources
        if sources is not None:
            sources.pool.check()
            users = np.bincount(sources.table.ravel(), minlength=sources.pool.num_pages)
            assert users[1:].tolist() == sources.pool.users[1:], "users of a source's pages are not those of the tables"
            lengths = [len(running[r].request.source) if r in running else 0 for r in range(self.spec.most_sequences)]
            assert lengths == sources.lengths.tolist()
        for g, (pool, table) in enumerate(zip(pages.pools, pages.tables)):
            pool.check()
            users = np.bincount(table.ravel(), minlength=pool.num_pages)
            users[NO_PAGE] = 0
            assert users.tolist() == pool.users, "users of pages are not those of the tables"
            for row in range(self.spec.most_sequences):
                first, filled = int(pages.first[g][row]), int(pages.filled[row])
                there = (table[row] != NO_PAGE).tolist()
                assert there == [first <= i < filled for i in range(len(there))]
                if row not in running:
                    assert not filled
                    continue
                computed = int(self.scheduler._next[row])
                most = computed
                if any(sequence is self.scheduler._row_of[row] for _, sequence in self.scheduler._prompts):
                    # what a step had room for, if a state is to be left before its end
                    most = len(self.scheduler._row_of[row].tokens) if self.spec.states else computed
                size = self.spec.page_size
                assert -(-computed // size) <= filled <= -(-most // size), "pages without tokens"
                window = self.spec.groups[g].window
                if window is None:
                    assert first == 0

    def observe(self, step: Step, result: list[list[int]]) -> None:
        width = max(map(len, result), default=1) or 1
        block = np.array([accepted + [NO_TOKEN] * (width - len(accepted)) for accepted in result])
        live = {n for n in self.tokens if n not in self.finished}
        seen = self.scheduler.observe(step, block if width > 1 else block[:, 0])
        for number, kept, accepted in zip(step.requests.tolist(), seen.kept, result):
            assert kept <= len(accepted)
            assert kept == 0 or number in live
            self.counts["surplus"] += len(accepted) - kept
            self.observed[number] += accepted[:kept]
        for ended in seen.finished:
            self.end(ended, None)

    def end(self, ended: Finished, reason: str | None) -> None:
        number, request = ended.request, self.requests[ended.request]
        assert number not in self.finished
        self.finished[number] = ended
        self.decoding.pop(number, None)
        right, why = self.answers[number]
        made = list(request.prompt) + self.observed[number]
        assert made == right[: len(made)]
        if reason is None:
            assert ended.reason == why and made == right, "the answer is another one"
        else:
            assert ended.reason == reason
        assert ended.cached == min(self.first_seen.get(number, 0), len(request.prompt))
        assert ended.cached < len(request.prompt)
        assert request.options.prompt_logprobs is None or ended.cached < request.options.scored_from
        self.counts["cached"] += ended.cached

    def cancel(self, cancels: list[tuple[int, bool, int]], now: int, flying: bool) -> None:
        for entry in [c for c in cancels if c[0] <= now and c[1] == flying and c[2] in self.tokens]:
            cancels.remove(entry)
            ended = self.scheduler.cancel(entry[2])
            assert (ended is None) == (entry[2] in self.finished)
            if ended is not None:
                self.end(ended, "cancelled")
