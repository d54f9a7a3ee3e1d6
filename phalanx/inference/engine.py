"""The engine: requests in, tokens out, on every rank of a layout.

Requests come to rank 0; all ranks make the same decisions. Each step begins with one message from rank 0, its new
requests and its clock, after which every replica's scheduler, a pure function of the messages, makes the same step on
all of its ranks.

    rank 0: submit, cancel ──▶ inbox ──message──▶ scheduler ──Step──▶ runner ──tokens, late──▶ events

The stages of a pipeline are busy with several steps at once, of different sequences (SchedulerSpec.in_flight).
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, astuple, field, replace
from typing import Any

import numpy as np
import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.sizes import size_text
from phalanx.comm.axis import Axis, Work
from phalanx.comm.host import host_axis
from phalanx.config.run import Run
from phalanx.inference.drafter import Drafts, NgramSpec, ngrams_of, predicted_of
from phalanx.inference.grammar import Constraint, GrammarCompiler
from phalanx.inference.load import InferenceModel, check_generates
from phalanx.inference.memory import (
    NO_DRAFTS,
    MemoryLimits,
    RankRoom,
    give_memory,
    give_states,
    keeping,
    kept_by,
    layer_groups,
    remembering,
    room_for_pages,
    row_bytes,
    state_bytes,
)
from phalanx.inference.pages import GroupSpec
from phalanx.inference.predictor import MtpSpec, check_modules, check_takes_drafts
from phalanx.inference.request import (
    EngineLoad,
    Event,
    Finished,
    Grammar,
    NewToken,
    Prompt,
    PromptImage,
    PromptScored,
    PromptSound,
    Request,
    RequestError,
    SamplingOptions,
    TokenScore,
)
from phalanx.inference.runner import Drawn, Runner
from phalanx.inference.scheduler import (
    ImageDoesNotFit,
    RequestDoesNotFit,
    Scheduler,
    SchedulerSpec,
    SourceDoesNotFit,
    Step,
)
from phalanx.inference.scores import ScoredPrompt
from phalanx.models.model_config import ModelConfig
from phalanx.ops.attention.paged import FP8
from phalanx.text.tokenizer_base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine makes room for.

    sequences   generated at once, in each replica
    tokens      computed in one step of a replica
    length      of a sequence at most, prompt and answer; None: the model's positions
    page_size   tokens in a page of a rank's memory; ranks of context parallelism share pages of cp times as many
    memory_gib  for what is remembered, on each rank; None: all that `sequences` of `length` can use, but at most 90 %
                of what is free on a GPU, and on a CPU a quarter of it for all ranks together
    pages       dtype of what is remembered: that of the model, or FP8
    capture     make all CUDA graphs of steps when the engine is made, so that no request waits for one later
    drafts      of tokens, which the model checks several at a time (speculative decoding); None: none
    prefix_states  states that recurrent layers keep of prompts' beginnings, so that a prompt with the same one goes on
                from there (inference/prefix_states.py): each takes the room of a sequence's. 0: a common beginning is
                computed for each prompt. Models with attention alone keep pages in any case
    late        1: the host reads a token a step late, so that the device never waits for it; 0: before its sequence
                goes on. None: 0 with drafts, else 1: how many are accepted decides where the next step begins

    ValueError for drafts with tokens that come late.
    """

    sequences: int = 256
    tokens: int = 8192
    length: int | None = None
    page_size: int = 16
    memory_gib: float | None = None
    pages: str = "model"
    capture: bool = False
    drafts: Drafts | None = None
    prefix_states: int = 0
    late: int | None = None

    def __post_init__(self) -> None:
        if self.drafts and self.late:
            raise ValueError(f"late={self.late}: must be 0 with drafts: the next step begins where they end")

    @property
    def steps_late(self) -> int:
        return (0 if self.drafts else 1) if self.late is None else self.late


@dataclass(frozen=True)
class DraftCounts:
    """Of requests that are over: tokens that were drafted, and how many of them the model drew too."""

    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        share = f" ({self.accepted / self.drafted:.0%})" if self.drafted else ""
        return f"{self.accepted:,} of {self.drafted:,} drafted tokens accepted{share}"


@dataclass
class StepMessage:
    """What rank 0 tells all ranks before a step. requests: with the number of the replica that is to serve each.
    stop: there is no step any more."""

    now: float = 0.0
    requests: list[tuple[int, Request]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    stop: bool = False

    def text(self) -> str:
        return json.dumps([self.now, [[r, plain_request(q)] for r, q in self.requests], self.cancelled, self.stop])

    @staticmethod
    def of(text: str) -> StepMessage:
        now, requests, cancelled, stop = json.loads(text)
        return StepMessage(now, [(r, request_of(q)) for r, q in requests], cancelled, stop)


def plain_request(request: Request) -> dict[str, Any]:
    """As JSON takes it."""
    plain, sound = asdict(replace(request, images=(), sound=None)), request.sound
    images = [(at, {**vars(image), "data": b64encode(image.data).decode()}) for at, image in request.images]
    heard = None if sound is None else {**vars(sound), "data": b64encode(sound.data).decode()}
    return {**plain, "images": images, "sound": heard}


def request_of(plain: dict[str, Any]) -> Request:
    options = dict(plain["options"])
    options["bias"] = tuple((int(token), float(added)) for token, added in options["bias"])
    options |= {name: tuple(options[name]) for name in ("end_tokens", "not_first")}
    options["grammar"] = None if options["grammar"] is None else Grammar(**options["grammar"])
    images = tuple((at, image_of(image)) for at, image in plain["images"])
    tokens = {name: tuple(plain[name]) for name in ("prompt", "source")}
    heard = plain["sound"]
    sound = None if heard is None else PromptSound(**{**heard, "data": b64decode(heard["data"])})
    more = {"images": images, "sound": sound, "options": SamplingOptions(**options)}
    return Request(**{**plain, **tokens, **more})


def image_of(plain: dict[str, Any]) -> PromptImage:
    return PromptImage(**{**plain, "data": b64decode(plain["data"]), "size": tuple(plain["size"])})


SHORT = 2**12  # bytes of a message that go out at once


class Messages:
    """From rank 0 to all ranks, over the hosts."""

    def __init__(self, world: Axis, wait_s: float, unsent: int = 0):
        self._axis = host_axis(world, meet_s=wait_s, wait_s=wait_s)
        self._unsent = unsent
        self._posted: deque[Work] = deque()

    def broadcast(self, message: StepMessage | None) -> StepMessage:
        """Rank 0's message; other ranks give None. Rank 0 does not wait for the others, of which those with the last
        stages of a pipeline come later, but has no more than `unsent` messages on the way."""
        if self._axis.size == 1:
            return message or StepMessage()
        data = b"" if message is None else message.text().encode()
        first = torch.zeros(SHORT + 8, dtype=torch.uint8)
        if message is not None:
            head = len(data).to_bytes(8, "little") + data[:SHORT]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._pass_on(first)
        received = first.numpy().tobytes()
        size = int.from_bytes(received[:8], "little")
        if size <= SHORT:
            return StepMessage.of(received[8 : 8 + size].decode())
        whole = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        self._pass_on(whole)
        return StepMessage.of(whole.numpy().tobytes().decode())

    def _pass_on(self, x: torch.Tensor) -> None:
        if self._axis.index:
            self._axis.broadcast(x, source=0)
        else:
            self._posted.append(self._axis.post_broadcast(x, source=0))
            self.settle(self._unsent)

    def settle(self, left: int = 0) -> None:
        """On rank 0: wait until all messages but so many have gone out."""
        while len(self._posted) > left:
            self._posted.popleft().wait()

    def gather(self, text: str) -> list[str]:
        """Every rank's text."""
        return self._axis.all_gather_text(text)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self._axis.all_reduce(torch.tensor([int(flag)])).wait().item())


def check_pages(run: Run, pages: str, field: str = "pages") -> None:
    """ConfigError for pages that would give other logits than training's forward, where they are to be the same, and
    where there are none. field: what set their dtype."""
    if pages == "fp8" and not run.model.attends:
        rule = "must be that of the model: no layer has attention, and states are not stored in FP8"
        raise ConfigError([Problem(field, pages, rule, {"model.family": run.model.family}, ("model",))])
    if pages == "fp8" and run.train.batch_invariant:
        rule = "must be that of the model with train.batch_invariant, whose logits are those of training's forward"
        raise ConfigError([Problem(field, pages, rule, {"train.batch_invariant": True}, ("model",))])


def check_shares_text(model: InferenceModel) -> None:
    """ConfigError for ranks that would share an encoder's text: what it has read is whole on each."""
    config, cp = model.plan.run.model, model.mesh.cp.size
    if config.reads_beside and cp > 1:
        rule = "is not built for generation with an encoder, whose memory every rank of it would need whole"
        raise ConfigError([Problem("layout.cp", cp, rule, {"model.family": config.family}, (1,))])


def check_drafts(model: InferenceModel, drafts: Drafts | None) -> None:
    """ConfigError for drafts that the model does not make here."""
    if isinstance(drafts, NgramSpec):
        check_takes_drafts(model.plan.run.model, f"ngram:{drafts.tokens}", "drafts")
    if not isinstance(drafts, MtpSpec):
        return
    check_modules(model.plan, drafts, "drafts")
    if model.trains:
        rule = "must not be made by a model that trains: its samples are few"
        raise ConfigError([Problem("drafts", "mtp", rule, {}, ("ngram:4",))])


def check_prefix_states(config: ModelConfig, states: int, field: str = "prefix_states") -> None:
    """ConfigError where no layer keeps a state. field: what set their number."""
    if states and not config.scans:
        rule = "has no effect without layers that keep a state: of attention, pages of prefixes are kept in any case"
        raise ConfigError([Problem(field, states, rule, {"model.family": config.family}, (0,))])


class Engine:
    """Made on all ranks together. Rank 0's caller submits, cancels and steps, from one thread or several; all other
    ranks `follow`."""

    def __init__(
        self,
        model: InferenceModel,
        options: EngineOptions | None = None,
        wait_s: float = 600.0,
        messages: Messages | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        """messages: those of an engine before this one; None: ranks meet to make them, and wait for each other so many
        seconds. tokenizer: the model's, for requests with a grammar."""
        options = options or EngineOptions()
        check_generates(model.plan.run.model)
        check_pages(model.plan.run, options.pages)
        check_drafts(model, options.drafts)
        check_shares_text(model)
        check_prefix_states(model.plan.run.model, options.prefix_states)
        self.model, self.options = model, options
        mesh, positions = model.mesh, model.plan.run.model.max_position_embeddings
        length = min(options.length or positions, positions)
        tokens = max(options.tokens, options.sequences)
        if model.pictures is not None:  # an image is in one step, beside those who decode
            tokens = max(tokens, options.sequences + min(length, model.pictures.most_tokens))
        rows = None if model.sound is None else model.sound.rows
        self.limits = MemoryLimits(
            options.sequences,
            tokens,
            length,
            options.page_size * mesh.cp.size,
            mesh.cp.size,
            rows,
            options.prefix_states,
        )
        self.groups, source = self._remember(options)
        spec = SchedulerSpec(
            most_sequences=options.sequences,
            most_tokens=tokens,
            longest=length,
            page_size=self.limits.page_size,
            groups=self.groups,
            late=mesh.pp.size - 1 + options.steps_late,
            in_flight=mesh.pp.size,
            further=self._depths,
            source=source,
            source_longest=rows,
            prefixes=options.prefix_states > 0 or not model.plan.run.model.scans,
            states=options.prefix_states,
        )
        self.scheduler = Scheduler(spec)
        self.runner = Runner(model, self.limits, len(self.groups), options.drafts)
        if options.capture:
            self.runner.graphs.capture()
        self._messages = messages or Messages(mesh.world, wait_s, mesh.pp.size)
        self._lock = threading.Lock()
        self._inbox = StepMessage()
        self._numbers = 0
        self._other_loads: list[EngineLoad] = [self._own_load()] * (mesh.dp.size - 1)  # rank 0: replicas are alike
        self._open: dict[int, tuple[int, int]] = {}  # rank 0: of requests that are not over, replica and tokens
        self._load = [0] * mesh.dp.size  # rank 0: tokens of those, by replica
        self.draft_counts = DraftCounts()  # rank 0: of all replicas
        vocab_size = model.plan.run.model.vocab_size
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size)
        self._constraints: dict[int, Constraint] = {}
        self._prompts: dict[int, ScoredPrompt] = {}
        self._behind: deque[tuple[Step, Drawn]] = deque()  # steps whose tokens were not yet read
        self._paused = False
        self._together = model.in_step

    def _remember(self, options: EngineOptions) -> tuple[tuple[GroupSpec, ...], GroupSpec | None]:
        """Give layers their pages: the same number on all ranks. The groups of those that remember sequences, and that
        of those that remember sources."""
        mesh, limits, plan = self.model.mesh, self.limits, self.model.plan
        layers = remembering(self.model.blocks, self._depths)
        dtype = FP8 if options.pages == "fp8" else self.model.dtype
        groups = layer_groups(layers, kept_by(plan, self._depths), dtype, limits.own_page_size)
        gib, states = options.memory_gib, keeping(self.model.blocks)
        of_states = state_bytes(states, self.model.dtype)
        if gib is None:
            draws, drafts = self.model.draws, options.drafts
            drafted = drafts.room(plan, draws) if isinstance(drafts, MtpSpec) else NO_DRAFTS
            kept = row_bytes(limits, plan.run.model.vocab_size if draws else 0, drafted, of_states)
            free = room_for_pages(mesh.device, mesh.world.size) - kept
        else:
            free = gib * 2**30 - limits.states * of_states
        own = RankRoom.of(groups, limits, of_states, int(free))
        fit = torch.tensor([*own.pages, own.sequences], device=mesh.world.device)
        *pages, sequences = mesh.world.all_reduce(fit, op="min").wait().tolist()
        own = replace(own, pages=tuple(pages), sequences=sequences)
        own.check(limits, options.length is not None, {"room": size_text(max(0, int(free)))})
        give_memory(layers, groups, pages, limits.own_page_size, dtype, mesh)
        give_states(states, limits, self.model.dtype, mesh)
        found = [(group.kept.source, GroupSpec(group.window, count)) for group, count in zip(groups, pages)]
        sources = [group for source, group in found if source]
        return tuple(group for source, group in found if not source), sources[0] if sources else None

    @property
    def _depths(self) -> int:
        """Modules of multi-token prediction that draft."""
        drafts = self.options.drafts
        return drafts.depths(self.model.plan.run.model) if isinstance(drafts, MtpSpec) else 0

    def _drafts(self) -> dict[int, list[int]]:
        """For the next step, by request."""
        drafts = self.options.drafts
        if drafts is None:
            return {}
        if isinstance(drafts, MtpSpec):
            return predicted_of(self.scheduler, drafts.width(self.model.plan.run.model))
        return ngrams_of(self.scheduler, drafts)

    # ---- what rank 0 is asked ----

    @property
    def positions(self) -> int:
        """Most tokens of a sequence, its prompt included."""
        return self.scheduler.spec.room

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of those that requests may have."""
        served = self.model.adapters
        return () if served is None else tuple(served.folders)

    @property
    def idle(self) -> bool:
        """On rank 0: nothing is asked that is not answered."""
        with self._lock:
            return not self._open

    def load(self) -> EngineLoad:
        """On rank 0: of all replicas, after the last step; those who wait include what no step has taken in yet."""
        loads = [self._own_load(), *self._other_loads]
        running = sum(load.running for load in loads)
        waiting = max(0, len(self.open_requests) - running)
        used, pages = sum(load.pages_used for load in loads), sum(load.pages for load in loads)
        return EngineLoad(running, waiting, used, pages, self.draft_counts.drafted, self.draft_counts.accepted)

    @property
    def open_requests(self) -> list[int]:
        """On rank 0: numbers of the requests that are not over."""
        with self._lock:
            return list(self._open)

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads prompts, so that answers do not go on from them."""
        return self.model.plan.run.model.decoder_start is not None

    def submit(
        self,
        prompt: Sequence[int] | Prompt,
        options: SamplingOptions | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Its number. prompt: what an encoder reads, if there is one (with a recording, how the text of it begins).
        deadline: on time.monotonic()'s clock.
        RequestError for what cannot be served."""
        asked = self.check(prompt, options or SamplingOptions())
        tokens = len(asked.prompt) + asked.source_length
        with self._lock:
            request = replace(asked, number=self._numbers, priority=priority, deadline=deadline)
            self._numbers += 1
            replica = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[replica] += tokens
            self._open[request.number] = replica, tokens
            self._inbox.requests.append((replica, request))
        return request.number

    def _asked(self, prompt: Sequence[int] | Prompt, options: SamplingOptions) -> Request:
        """The request for an answer to a prompt, without its number."""
        given = prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))
        start, pictures, sound = self.model.plan.run.model.decoder_start, self.model.pictures, self.model.sound
        if given.sound is not None and sound is None:
            raise RequestError("audio", given.sound.name, f"is not heard by {self.model.plan.run.model.family}")
        if sound is not None:
            if given.sound is None:
                rule = 'must come with a recording: phalanx generate --prompts FILE, with lines {"audio": "a.flac"}'
                raise RequestError("prompt", f"{len(given.tokens)} tokens", rule)
            return Request(number=0, prompt=given.tokens, sound=given.sound, options=options)
        if given.images and pictures is None:
            rule = f"are not read by {self.model.plan.run.model.family}"
            raise RequestError("images", [image.name for image in given.images], rule)
        if start is not None:
            if options.prompt_logprobs is not None:
                rule = "must be none: an encoder reads the prompt, and does not predict its tokens"
                raise RequestError("prompt_logprobs", options.prompt_logprobs, rule)
            return Request(number=0, prompt=(start,), source=given.tokens, options=options)
        images = () if pictures is None else pictures.placed(given)
        return Request(number=0, prompt=given.tokens, images=images, options=options)

    def check(self, prompt: Sequence[int] | Prompt, options: SamplingOptions) -> Request:
        """The request, without its number. RequestError if it could never be served."""
        request = self._asked(prompt, options)
        request.check_tokens(self.model.plan.run.model.vocab_size)
        if options.grammar is not None:
            self._check_grammar(options.grammar, options)
        if options.adapter is not None and options.adapter not in self.adapters:
            has = f"the engine has {', '.join(self.adapters)}" if self.adapters else "the engine has none"
            raise RequestError("adapter", options.adapter, f"must be the name of an adapter; {has}")
        try:
            self.scheduler.check(request)
        except RequestDoesNotFit as error:
            raise RequestError("prompt", f"{error.prompt} tokens", str(error)) from error
        except SourceDoesNotFit as error:
            raise RequestError("prompt", f"{error.tokens} tokens", str(error)) from error
        except ImageDoesNotFit as error:
            raise RequestError("images", f"{error.tokens} tokens", str(error)) from error
        return request

    def _check_grammar(self, grammar: Grammar, options: SamplingOptions) -> None:
        if self.grammars is None:
            raise RequestError("grammar", grammar.kind, "needs the model's tokenizer, and its folder holds none")
        if not options.end_tokens:
            raise RequestError("grammar", grammar.kind, "needs end tokens: with one of them the text ends")
        if options.least_tokens:
            raise RequestError("least_tokens", options.least_tokens, "must be 0 with a grammar, which says when to end")
        self.grammars.compile(grammar)

    def cancel(self, number: int) -> None:
        """A request is no longer wanted; it ends with the next step, unless it is over by then."""
        with self._lock:
            if number in self._open:
                self._inbox.cancelled.append(number)

    # ---- steps ----

    def step(self) -> list[Event]:
        """One step of every replica; collective. The events of all of them on rank 0, elsewhere those of its own."""
        message = self._messages.broadcast(self._outbox())
        if message.stop:
            self._messages.settle()
            self.runner.settle()
            self._paused = True
            return []
        events = self._take_in(message)
        step = self.scheduler.schedule(message.now, self._drafts())
        events += step.finished
        self._forget(events)  # of those that are over nothing more is heard
        drawn = None
        if self._messages.any(len(step) > 0) if self._together else len(step):
            drawn = self.runner.run(step, self._prompts, self._constraints)
        if drawn is not None and len(step):
            self._behind.append((step, drawn))
        if self._behind and (len(self._behind) > self.scheduler.spec.late or not len(step)):
            events += self._observe(*self._behind.popleft())
        return self._heard(events)

    def follow(self) -> None:
        """Ranks other than 0: steps until rank 0 pauses."""
        self._paused = False
        while not self._paused:
            self.step()

    def pause(self) -> None:
        """Rank 0: the others need not wait for a further step; they go on when they `follow` again."""
        if self.model.mesh.world.size > 1:
            with self._lock:
                self._inbox.stop = True
            self.step()

    def close(self) -> None:
        """Rank 0: give up what is under way."""
        for number in self.open_requests:
            self.cancel(number)
        while not self.idle:
            self.step()
        self.pause()

    def _outbox(self) -> StepMessage | None:
        if self.model.mesh.rank:
            return None
        with self._lock:
            message, self._inbox = self._inbox, StepMessage()
        return replace(message, now=time.monotonic())

    def _take_in(self, message: StepMessage) -> list[Event]:
        events: list[Event] = []
        for replica, request in message.requests:
            if replica == self.model.mesh.dp.index:
                self.scheduler.add(request)
                options = request.options
                if options.prompt_logprobs is not None:
                    prompt = self._prompts[request.number] = ScoredPrompt(request)
                    if prompt.complete:  # of one token, which has no score
                        events.append(PromptScored(request.number, tuple(prompt.scores)))
                        del self._prompts[request.number]
                if options.grammar is not None and self.grammars is not None:
                    begun = self.grammars.begin(options.grammar, options.end_tokens)
                    self._constraints[request.number] = begun
        for number in message.cancelled:
            ended = self.scheduler.cancel(number)
            events += [] if ended is None else [ended]
        return events

    def _observe(self, step: Step, drawn: Drawn) -> list[Event]:
        """What the step made: waits for the device."""
        result = drawn.read()
        events: list[Event] = []
        for number, position, score in result.prompts:
            prompt = self._prompts.get(number)
            if prompt is not None and prompt.add(position, score):
                events.append(PromptScored(number, tuple(prompt.scores)))
                del self._prompts[number]
        events += self._end_broken(step, result.tokens)
        observed = self.scheduler.observe(step, result.tokens)
        for i, kept in enumerate(observed.kept):
            number, scores = int(step.requests[i]), result.scores[i]
            constraint, wanted = self._constraints.get(number), step.sequences[i].request.options.logprobs
            for place, token in enumerate(result.tokens[i, :kept].tolist()):
                if constraint is not None:
                    constraint.add(token)
                asked = None if wanted is None else scores[place].among(wanted)
                events.append(NewToken(number, token, asked))
        return events + observed.finished

    def _end_broken(self, step: Step, tokens: np.ndarray) -> list[Event]:
        """End the requests of which no token could be drawn: their logits were not finite, or their grammar allows
        none."""
        ended: list[Event] = []
        for i in np.flatnonzero(step.samples & (tokens[:, 0] < 0)).tolist():
            tokens[i, 0] = 0
            number = int(step.requests[i])
            constraint = self._constraints.get(number)
            problem = None if constraint is None else constraint.problem
            over = self.scheduler.cancel(number, "error")
            if over is not None:
                ended.append(replace(over, error=problem or "the model's logits are not finite"))
        return ended

    def _heard(self, events: list[Event]) -> list[Event]:
        """On rank 0 with those of all replicas, and its own books kept."""
        mesh = self.model.mesh
        if mesh.dp.size > 1:
            leads = mesh.at.tp == mesh.at.pp == mesh.at.cp == 0 and mesh.rank > 0
            mine = [plain_event(e) for e in events], astuple(self._own_load())
            received = self._messages.gather(json.dumps(mine) if leads else "")
            if mesh.rank == 0:
                others = [json.loads(text) for text in received[1:] if text]
                events += [event_of(plain) for plains, _ in others for plain in plains]
                self._other_loads = [EngineLoad(*load) for _, load in others]
        if mesh.rank == 0:
            self._keep_books(events)
        self._forget(events)
        return events

    def _forget(self, events: Sequence[Event]) -> None:
        """What is kept for requests that are over."""
        for event in events:
            if isinstance(event, Finished):
                self._prompts.pop(event.request, None)
                self._constraints.pop(event.request, None)

    def _own_load(self) -> EngineLoad:
        """Of this replica."""
        sources = self.scheduler.sources
        pools = self.scheduler.pages.pools if sources is None else [*self.scheduler.pages.pools, sources.pool]
        pages = sum(pool.num_pages for pool in pools)
        used = pages - sum(pool.available + 1 for pool in pools)
        return EngineLoad(self.scheduler.num_running, self.scheduler.num_waiting, used, pages)

    def _keep_books(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                if isinstance(event, Finished) and event.request in self._open:
                    replica, tokens = self._open.pop(event.request)
                    self._load[replica] -= tokens
                    old = self.draft_counts
                    self.draft_counts = DraftCounts(old.drafted + event.drafted, old.accepted + event.accepted)


EVENTS: dict[str, type] = {"token": NewToken, "scored": PromptScored, "finished": Finished}


def plain_event(event: Event) -> list[Any]:
    """As JSON takes it."""
    kind = next(name for name, made in EVENTS.items() if isinstance(event, made))
    return [kind, asdict(event)]


def event_of(plain: list[Any]) -> Event:
    kind, values = plain
    if kind == "token" and values["score"] is not None:
        values["score"] = score_of(values["score"])
    if kind == "scored":
        values["scores"] = tuple(None if score is None else score_of(score) for score in values["scores"])
    made: Event = EVENTS[kind](**values)
    return made


def score_of(plain: dict[str, Any]) -> TokenScore:
    return TokenScore(plain["token"], plain["logprob"], tuple((int(t), float(p)) for t, p in plain["likeliest"]))
