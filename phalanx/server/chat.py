"""POST /v1/chat/completions: an answer in a chat, with reasoning and tool calls."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import field, replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.base.dataclass import dataclass
from phalanx.inference.request import Grammar, Prompt, TokenScore
from phalanx.server.choices import ChoiceText, PlacedToken
from phalanx.server.engine_thread import Answers, SequenceJob
from phalanx.server.errors import ApiError
from phalanx.server.forced_calls import call_grammar
from phalanx.server.metrics import Stopwatch
from phalanx.server.responses import GONE, EventStream, read_body, unless_gone
from phalanx.server.schemas import ChatBody, NamedTool, ResponseFormat, Tool, parse
from phalanx.server.served import Found, ServedModel, seed_of
from phalanx.server.service import Service, finish_reason, job_of, note, service_of, steps, usage
from phalanx.text.chat_reply import Reply, ReplyReader, Said, Thought, ToolCall
from phalanx.text.chat_template import ChatPrompt


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
    prompt: Prompt
    jobs: list[SequenceJob]
    choices: list[ChatChoice]
    passages: Found = field(default_factory=list)


async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(ChatBody, data)
    service.model.check_name(body.model)
    service.model.need_generation()
    task = await run_in_threadpool(make_ready, service.model, body)
    answers = await service.start(task.jobs)
    watch = Stopwatch(service.metrics, len(task.prompt.tokens))
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
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    messages, passages = model.chat_with_passages(body.messages)
    prompt, read = model.chat(messages, tools, variables)
    grammar = grammar_of(model, body, tools, prompt)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tokens = model.room(
        read.tokens, asked, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    )
    likeliest = (body.top_logprobs or 0) if body.logprobs else None
    special = model.tokenizer.special_tokens if model.tokenizer else {}
    shown = [special[name] for name in model.reply_format.special_names() if name in special]
    task = ChatTask(body, read, [], [], passages)
    seed = seed_of(body)
    for sample in range(body.n or 1):
        options = replace(model.sampling(body, tokens, sample, seed), logprobs=likeliest, grammar=grammar)
        task.jobs.append(job_of(body, read if read.images else read.tokens, options))
        text = ChoiceText(model.tokenizer, body.stop or (), options.end_tokens, shown=shown)
        reader = ReplyReader(model.reply_format, tools is not None, prompt.text)
        task.choices.append(ChatChoice(text, reader))
    return task


def grammar_of(model: ServedModel, body: ChatBody, tools: list[Tool] | None, prompt: ChatPrompt) -> Grammar | None:
    """What the answer keeps to: response_format, or a call that tool_choice demands. ApiError where it could not be an
    answer of this template."""
    form = body.response_format
    chosen = tools is not None and (body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool))
    if form is not None and form.type != "text":
        if tools:
            raise bad("response_format", f"{form.type} leaves no room for calls of tools; set tool_choice to none")
        field, grammar = "response_format", format_grammar(form)
    elif tools is not None and chosen:
        field, grammar = "tool_choice", demanded_call(model, body, tools)
    else:
        return None
    if model.reply_format.channels or ReplyReader(model.reply_format, False, prompt.text).thinking:
        raise bad(field, "leaves no room for the reasoning that this chat's template begins")
    if body.ignore_eos or body.min_tokens:
        raise bad(field, "says when the answer ends; leave out ignore_eos and min_tokens")
    model.check_grammar(grammar, field)
    return grammar


def format_grammar(form: ResponseFormat) -> Grammar:
    if form.type == "json_object":
        return Grammar("json_object")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise bad("response_format.json_schema.schema", "is missing")
    return Grammar("json_schema", json.dumps(form.json_schema.schema_))


def demanded_call(model: ServedModel, body: ChatBody, tools: list[Tool]) -> Grammar:
    """One call: of the tool that tool_choice names, or of any."""
    choice = body.tool_choice
    those = [each for each in tools if not isinstance(choice, NamedTool) or each.function.name == choice.function.name]
    special = model.tokenizer.special_tokens if model.tokenizer else {}
    source = model.template.source if model.template else ""
    grammar = call_grammar(model.reply_format.calls, source, those, special)
    if grammar is None:
        raise bad("tool_choice", "cannot force a call in the form that this chat template teaches; use auto")
    return grammar


def offered_tools(body: ChatBody) -> list[Tool] | None:
    """The tools that the model is shown. None: none."""
    choice = body.tool_choice
    if choice is not None and choice != "none" and not body.tools:
        raise bad("tool_choice", "needs tools")
    names = [tool.function.name for tool in body.tools or ()]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad("tool_choice", f"names {choice.function.name}, and the tools are {', '.join(names)}")
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
                found = found[: calls[0] + 1]
                if not done:
                    answers.cancel(step.index)
                    choice.text.end("stop")
                    watch.stopped()
                done = True
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
    about = head(task.body.model or service.model.name, "chat.completion")
    beside = {"passages": task.passages[0]} if task.passages else {}
    return {**about, "choices": choices, "usage": usage(watch), **beside}


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
    about = head(task.body.model or service.model.name, "chat.completion.chunk")
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

    if task.passages:
        yield {**about, "choices": [], "passages": task.passages[0], **more}
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


def head(name: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
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
