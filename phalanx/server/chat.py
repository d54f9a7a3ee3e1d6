"""POST /v1/chat/completions: an answer in a chat, with reasoning and calls of tools."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.inference.request import TokenScore
from phalanx.server.choices import ChoiceText, PlacedToken
from phalanx.server.engine_thread import Answers, SequenceJob
from phalanx.server.errors import ApiError
from phalanx.server.metrics import Stopwatch
from phalanx.server.responses import GONE, EventStream, read_body, unless_gone
from phalanx.server.schemas import ChatBody, NamedTool, Tool, parse
from phalanx.server.served import ServedModel, seed_of
from phalanx.server.service import Service, finish_reason, note, service_of, steps, usage
from phalanx.text.chat_reply import Reply, ReplyReader, Said, Thought, ToolCall


@dataclass
class ChatChoice:
    """One answer: its text, how it is read, and what has been read."""

    text: ChoiceText
    reader: ReplyReader
    tokens: list[PlacedToken] = field(default_factory=list)  # not shown yet
    ids: list[int] = field(default_factory=list)  # the same of ids
    calls: int = 0


@dataclass
class ChatTask:
    """A request that is ready for the engine."""

    body: ChatBody
    prompt: tuple[int, ...]
    jobs: list[SequenceJob]
    choices: list[ChatChoice]


async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(ChatBody, data)
    service.model.check_name(body.model)
    task = await run_in_threadpool(make_ready, service.model, body)
    answers = await service.start(task.jobs)
    watch = Stopwatch(service.metrics, len(task.prompt))
    note(request, watch, body.user)
    if body.stream:
        chunks = chat_chunks(service, task, answers, watch)
        return EventStream(chunks, service.limits.write_seconds, request.app.state.failed)
    whole = await unless_gone(request.receive, whole_answer(service, task, answers, watch))
    return Response(status_code=GONE) if whole is None else JSONResponse(whole)


def make_ready(model: ServedModel, body: ChatBody) -> ChatTask:
    """Tokens, options and checks of a request. ApiError for what cannot be served."""
    tools = offered_tools(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs, true")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "need stream")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad("max_tokens", "is max_completion_tokens by an older name; give one of them")
    if body.response_format is not None and body.response_format.type != "text":
        raise bad(
            "response_format",
            f"{body.response_format.type} needs an engine that keeps to a grammar, and this one does not; "
            "ask for JSON in a message and check the answer",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    prompt = model.chat(body.messages, tools, variables)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tokens = model.room(
        prompt.ids, asked, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    )
    likeliest = (body.top_logprobs or 0) if body.logprobs else None
    special = model.tokenizer.special_tokens if model.tokenizer else {}
    shown = [special[name] for name in model.reply_format.special_names() if name in special]
    task = ChatTask(body, prompt.ids, [], [])
    seed = seed_of(body)
    for sample in range(body.n or 1):
        options = replace(model.sampling(body, tokens, sample, seed), logprobs=likeliest)
        task.jobs.append(SequenceJob(prompt.ids, options))
        text = ChoiceText(model.tokenizer, body.stop or (), options.end_tokens, shown=shown)
        reader = ReplyReader(model.reply_format, tools is not None, prompt.text)
        task.choices.append(ChatChoice(text, reader))
    return task


def offered_tools(body: ChatBody) -> list[Tool] | None:
    """The tools that the model is shown. None: none."""
    choice = body.tool_choice
    if choice is not None and choice != "none" and not body.tools:
        raise bad("tool_choice", "needs tools")
    if choice == "required" or isinstance(choice, NamedTool):
        raise bad(
            "tool_choice",
            "cannot force a call: the engine does not keep to a grammar; use auto, and say so in a message",
        )
    return body.tools if body.tools and choice != "none" else None


def bad(field: str, rule: str) -> ApiError:
    return ApiError(400, f"{field}: {rule}.", param=field, code="invalid_value")


async def replies(task: ChatTask, answers: Answers, watch: Stopwatch) -> AsyncIterator[tuple[int, list[Reply], bool]]:
    """What is known of each choice, piece by piece: its index, the pieces, whether it is over."""
    async for step in steps(answers, [choice.text for choice in task.choices], watch):
        choice = task.choices[step.index]
        choice.tokens += step.increment.tokens
        choice.ids += step.increment.ids
        found = choice.reader.add(step.increment.text)
        if step.done:
            found += choice.reader.end()
        done = step.done
        if task.body.parallel_tool_calls is False:
            calls = [at for at, reply in enumerate(found) if isinstance(reply, ToolCall)]
            if calls:
                found, done = found[: calls[0] + 1], True
                answers.cancel(step.index)
                choice.text.end("stop")
        choice.calls += sum(isinstance(reply, ToolCall) for reply in found)
        yield step.index, found, done


async def whole_answer(service: Service, task: ChatTask, answers: Answers, watch: Stopwatch) -> dict[str, Any]:
    began = time.monotonic()
    found: list[list[Reply]] = [[] for _ in task.jobs]
    async for index, more, _ in replies(task, answers, watch):
        found[index] += more
    service.over(began)
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(task.choices):
        made: dict[str, Any] = {"index": index, "message": message_of(found[index])}
        made["logprobs"] = shown_logprobs(service.model, task, choice.tokens)
        if task.body.return_token_ids:
            made["token_ids"] = choice.ids
        choices.append({**made, "finish_reason": chat_finish_reason(choice)})
    return {**head(service, "chat.completion"), "choices": choices, "usage": usage(watch)}


def message_of(found: Sequence[Reply]) -> dict[str, Any]:
    """The whole message."""
    text = "".join(reply.text for reply in found if isinstance(reply, Said))
    thought = "".join(reply.text for reply in found if isinstance(reply, Thought))
    calls = [reply for reply in found if isinstance(reply, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought.rstrip("\n")
    if calls:
        message["tool_calls"] = [call_object(call) for call in calls]
    return message


async def chat_chunks(
    service: Service, task: ChatTask, answers: Answers, watch: Stopwatch
) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream: the role, pieces, the reason of the end, and the usage if it is asked for."""
    began = time.monotonic()
    about = head(service, "chat.completion.chunk")
    with_usage = bool(task.body.stream_options and task.body.stream_options.include_usage)
    more = {"usage": None} if with_usage else {}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = task.choices[index]
        made: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        made["logprobs"] = shown_logprobs(service.model, task, choice.tokens) if choice.tokens else None
        if task.body.return_token_ids:
            made["token_ids"] = choice.ids
        choice.tokens, choice.ids = [], []
        return {**about, "choices": [made], **more}

    for index in range(len(task.jobs)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    numbers = [0] * len(task.jobs)
    async for index, found, done in replies(task, answers, watch):
        for reply in found:
            if isinstance(reply, ToolCall):
                call = {"index": numbers[index], **call_object(reply)}
                numbers[index] += 1
                yield chunk(index, {"tool_calls": [call]})
            elif isinstance(reply, Thought):
                yield chunk(index, {"reasoning_content": reply.text})
            else:
                yield chunk(index, {"content": reply.text})
        if done:
            yield chunk(index, {}, chat_finish_reason(task.choices[index]))
    service.over(began)
    if with_usage:
        yield {**about, "choices": [], "usage": usage(watch)}


def head(service: Service, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": service.model.name,
    }


def call_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def chat_finish_reason(choice: ChatChoice) -> str:
    reason = finish_reason(choice.text)
    return "tool_calls" if choice.calls and reason == "stop" else reason


def shown_logprobs(model: ServedModel, task: ChatTask, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
    if not task.body.logprobs:
        return None
    likeliest = task.body.top_logprobs or 0
    content = [chat_logprob(model, placed.score, likeliest) for placed in tokens if placed.score is not None]
    return {"content": content, "refusal": None}


def chat_logprob(model: ServedModel, score: TokenScore, likeliest: int) -> dict[str, Any]:
    top = [named_logprob(model, token, logprob) for token, logprob in score.likeliest[:likeliest]]
    return {**named_logprob(model, score.token, score.logprob), "top_logprobs": top}


def named_logprob(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    return {"token": model.texts.text(token), "logprob": logprob, "bytes": model.texts.bytes_of(token)}
