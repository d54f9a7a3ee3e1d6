"""POST /v1/completions: continues texts and token ids, and scores prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import field, replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.base.dataclass import dataclass
from phalanx.inference.request import TokenScore
from phalanx.server.choices import ChoiceText, Increment, PlacedToken
from phalanx.server.engine_thread import Answers, SequenceJob
from phalanx.server.errors import ApiError
from phalanx.server.metrics import Stopwatch
from phalanx.server.responses import GONE, EventStream, read_body, unless_gone
from phalanx.server.schemas import CompletionBody, parse
from phalanx.server.served import Found, ServedModel, seed_of
from phalanx.server.service import Service, TextStep, finish_reason, job_of, note, service_of, steps, usage
from phalanx.text.pieces import Pieces

DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class EchoedPrompt:
    """A prompt as text, and where each token begins in it."""

    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)


@dataclass
class CompletionTask:
    """A request that is ready for the engine: sequences of prompt 0, then of prompt 1, ..."""

    body: CompletionBody
    prompts: list[tuple[int, ...]]
    echoes: list[EchoedPrompt]
    jobs: list[SequenceJob]
    choices: list[ChoiceText]
    samples: int  # of each prompt
    passages: Found = field(default_factory=list)


async def completions(request: Request) -> Response:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(CompletionBody, data)
    service.model.check_name(body.model)
    service.model.need_generation()
    task = await run_in_threadpool(make_ready, service.model, body)
    answers = await service.start(task.jobs)
    watch = Stopwatch(service.metrics, sum(map(len, task.prompts)))
    note(request, watch, body.user)
    if body.stream:
        chunks = completion_chunks(service, task, answers, watch)
        return EventStream(chunks, service.limits.write_seconds, request.app.state.failed)
    whole = await unless_gone(request.receive, whole_completion(service, task, answers, watch))
    return Response(status_code=GONE) if whole is None else JSONResponse(whole)


def make_ready(model: ServedModel, body: CompletionBody) -> CompletionTask:
    """Tokens, options and checks of a request. ApiError for what cannot be served."""
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise ApiError(400, f"best_of: must be at least n, {n}, not {best_of}.", param="best_of", code="invalid_value")
    if best_of > n and body.stream:
        raise ApiError(
            400,
            "best_of: cannot be larger than n in a stream; leave out stream.",
            param="best_of",
            code="invalid_value",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: need stream.", param="stream_options", code="invalid_value")
    if body.stop:
        model.need_tokenizer("stop")
    if body.echo and model.encodes:
        rule = "an encoder reads the prompt, and the answer does not go on from it"
        raise ApiError(400, f"echo: {rule}.", param="echo", code="invalid_value")
    given, passages = model.with_passages(body.prompt)
    prompts = model.prompts(given)
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    scored = body.logprobs if body.logprobs is not None else 0 if best_of > n else None
    task = CompletionTask(body, prompts, [], [], [], best_of, passages)
    seed = seed_of(body)
    for prompt in prompts:
        model.room(prompt, tokens, "max_tokens")
        echo = echoed(model, prompt) if body.echo else EchoedPrompt()
        task.echoes.append(echo)
        for sample in range(best_of):
            options = model.sampling(body, tokens, sample, seed)
            prompt_scored = body.logprobs if body.echo else None
            options = replace(options, logprobs=scored, prompt_logprobs=prompt_scored)
            task.jobs.append(job_of(body, prompt, options))
            context = () if model.encodes else prompt
            choice = ChoiceText(model.tokenizer, body.stop or (), options.end_tokens, context=context)
            choice.offset = len(echo.text)
            choice.shows_end = body.logprobs is not None
            task.choices.append(choice)
    return task


def echoed(model: ServedModel, prompt: Sequence[int]) -> EchoedPrompt:
    """Special tokens are seen. The bytes of a character that the prompt ends in come with the rest of it."""
    if model.tokenizer is None:
        return EchoedPrompt("", [PlacedToken(token, None, 0) for token in prompt])
    pieces = Pieces(model.tokenizer, shown=model.tokenizer.special_tokens.values())
    echo, length, texts = EchoedPrompt(), 0, []
    for token in prompt:
        echo.tokens.append(PlacedToken(token, None, length))
        texts.append(pieces.add(token))
        length += len(texts[-1])
    echo.text = "".join(texts)
    return echo


async def whole_completion(
    service: Service, task: CompletionTask, answers: Answers, watch: Stopwatch
) -> dict[str, Any]:
    began = time.monotonic()
    parts: list[list[TextStep]] = [[] for _ in task.jobs]
    async for step in steps(answers, task.choices, watch):
        parts[step.index].append(step)
    service.over(began)
    n = task.body.n or 1
    choices: list[dict[str, Any]] = []
    for number in range(len(task.prompts)):
        samples = range(number * task.samples, (number + 1) * task.samples)
        best = sorted(samples, key=lambda i: -mean_logprob(task.choices[i]))[:n] if task.samples > n else samples
        for index in best:
            total = Increment()
            scores = None
            for step in parts[index]:
                total.text += step.increment.text
                total.tokens += step.increment.tokens
                total.ids += step.increment.ids
                scores = step.scores or scores
            echo = with_scores(task.echoes[number], scores) if task.body.echo else None
            made = completion_choice(service.model, task, len(choices), total, echo)
            choices.append({**made, "finish_reason": finish_reason(task.choices[index])})
    more = {"passages": task.passages} if task.passages else {}
    return {**head(task.body.model or service.model.name), "choices": choices, "usage": usage(watch), **more}


def mean_logprob(choice: ChoiceText) -> float:
    return choice.logprob / max(1, choice.made)


async def completion_chunks(
    service: Service, task: CompletionTask, answers: Answers, watch: Stopwatch
) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream. A prompt that is echoed comes first, with its scores if they are asked for."""
    began = time.monotonic()
    about = head(task.body.model or service.model.name)
    with_usage = bool(task.body.stream_options and task.body.stream_options.include_usage)
    more = {"usage": None} if with_usage else {}
    scored = task.body.echo and task.body.logprobs is not None

    def chunk(index: int, increment: Increment, echo: EchoedPrompt | None, reason: str | None) -> dict[str, Any]:
        made = completion_choice(service.model, task, index, increment, echo)
        return {**about, "choices": [{**made, "finish_reason": reason}], **more}

    if task.passages:
        yield {**about, "choices": [], "passages": task.passages, **more}
    if task.body.echo and not scored:
        for index in range(len(task.jobs)):
            yield chunk(index, Increment(), task.echoes[index // task.samples], None)
    async for step in steps(answers, task.choices, watch):
        reason = finish_reason(task.choices[step.index]) if step.done else None
        echo = None
        if step.scores is not None:
            echo = with_scores(task.echoes[step.index // task.samples], step.scores)
        visible = (
            step.increment.text or step.increment.tokens or (step.increment.ids and shows_ids(service.model, task))
        )
        if visible or echo or reason:
            yield chunk(step.index, step.increment, echo, reason)
    service.over(began)
    if with_usage:
        yield {**about, "choices": [], "usage": usage(watch)}


def head(name: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }


def shows_ids(model: ServedModel, task: CompletionTask) -> bool:
    return bool(task.body.return_token_ids) or model.tokenizer is None


def with_scores(echo: EchoedPrompt, scores: Sequence[TokenScore | None] | None) -> EchoedPrompt:
    """The echoed prompt with the log-probabilities of its tokens."""
    if scores is None:
        return echo
    placed = [replace(token, score=score) for token, score in zip(echo.tokens, scores, strict=True)]
    return EchoedPrompt(echo.text, placed)


def completion_choice(
    model: ServedModel, task: CompletionTask, index: int, made: Increment, echo: EchoedPrompt | None
) -> dict[str, Any]:
    """A choice, or what a chunk adds to it."""
    tokens = (echo.tokens if echo else []) + made.tokens
    choice: dict[str, Any] = {"index": index, "text": (echo.text if echo else "") + made.text}
    choice["logprobs"] = None if task.body.logprobs is None else logprobs_of(model, tokens, task.body.logprobs)
    if shows_ids(model, task):
        choice["token_ids"] = made.ids
        if echo:
            choice["prompt_token_ids"] = [placed.token for placed in echo.tokens]
    return choice


def logprobs_of(model: ServedModel, tokens: Sequence[PlacedToken], likeliest: int) -> dict[str, Any]:
    """As OpenAI's completions give them: lists as long as the tokens, None for a prompt's first."""
    top: list[dict[str, float] | None] = []
    for placed in tokens:
        score = placed.score
        if score is None:
            top.append(None)
            continue
        best: dict[str, float] = {}
        for token, logprob in score.likeliest[:likeliest]:
            best.setdefault(model.texts.text(token), logprob)
        best.setdefault(model.texts.text(score.token), score.logprob)
        top.append(best)
    return {
        "tokens": [model.texts.text(placed.token) for placed in tokens],
        "token_logprobs": [placed.score.logprob if placed.score else None for placed in tokens],
        "top_logprobs": top if likeliest else None,
        "text_offset": [placed.offset for placed in tokens],
    }
