"""The web application: routes, and the gate that every request passes (its id, key and line in the log)."""

from __future__ import annotations

import re
import time
import traceback
import uuid
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.base.errors import shortened
from phalanx.base.log import pairs
from phalanx.server.chat import chat_completions
from phalanx.server.completions import completions
from phalanx.server.embeddings import embeddings
from phalanx.server.errors import ApiError
from phalanx.server.responses import GONE, read_body
from phalanx.server.schemas import DetokenizeBody, TokenizeBody, parse
from phalanx.server.service import Service, service_of
from phalanx.server.transcriptions import transcriptions

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
OPEN = ("/", "/health")  # what needs no key


def make_app(service: Service) -> ASGIApp:
    """All routes of one service."""
    routes = [Route(path, endpoint, methods=[method]) for path, (method, endpoint) in PATHS.items()]
    routes.append(Route("/v1/models/{name:path}", one_model))
    handlers: dict[Any, Callable[[Request, Any], Any]] = {
        ApiError: answer_error,
        HTTPException: answer_http_error,
        Exception: answer_unexpected,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    app.state.page = make_page()
    app.state.failed = lambda error: unexpected(service, error)
    return RequestGate(app, service)


class RequestGate:
    """Around all routes: gives the request an id, refuses foreign hosts and missing keys, writes a line when it is
    over. An exception that nobody expected becomes an answer with 500."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there is nothing to be done at start and end, and no other protocol
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        state: dict[str, Any] = scope.setdefault("state", {})
        began, status, started = time.monotonic(), GONE, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
                status, started = message["status"], True
            await send(message)

        try:
            refused = self._refused(scope)
            await (error_response(refused) if refused else self._app)(scope, receive, send_with_id)
        except Exception as error:  # one that comes after an answer has begun is in the log already
            if not started:
                await error_response(unexpected(self._service, error))(scope, receive, send_with_id)
        finally:
            self._note(scope, State(state), name, status, time.monotonic() - began)

    def _refused(self, scope: Scope) -> ApiError | None:
        headers, keys, hosts = Headers(scope=scope), self._service.keys, self._service.allowed_hosts
        host = headers.get("host", "")
        bare = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if hosts is not None and bare not in hosts:
            message = (
                f"this server is called {' or '.join(hosts)}, not {bare!r}: a web page of another name must not read "
                "from it. Start it with --api-keys to be reached by other names"
            )
            return ApiError(403, message, code="foreign_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return ApiError(403, f"web pages of {origin} may not use this server", code="foreign_origin")
        if keys is not None and scope["path"] not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not keys.allow(key.strip()):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None

    def _note(self, scope: Scope, state: State, name: str, status: int, seconds: float) -> None:
        path = scope["path"]
        self._service.metrics.requests.labels(path if path in PATHS else "other", str(status)).inc()
        if path in ("/health", "/metrics") and status == 200:
            return
        words: dict[str, Any] = {"request": name, "status": status, "seconds": f"{seconds:.3f}"}
        watch = getattr(state, "watch", None)
        if watch is not None:
            words |= {"prompt_tokens": watch.prompt_tokens, "tokens": watch.made}
            words |= {} if watch.first is None else {"first": f"{watch.first:.3f}"}
        if (user := getattr(state, "user", None)) is not None:
            words["user"] = quote(shortened(user))
        self._service.log.info(f"{scope['method']} {shortened(quote(path))} {pairs(**words)}")


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def answer_error(request: Request, error: ApiError) -> JSONResponse:
    return error_response(error)


async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Of paths and methods that there are not."""
    texts = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    answer = ApiError(error.status_code, texts.get(error.status_code, error.detail), code="not_found")
    answer.headers |= error.headers or {}
    return error_response(answer)


async def answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    return error_response(unexpected(service_of(request), error))


def unexpected(service: Service, error: Exception) -> ApiError:
    """A mistake of the server's: the log has it, the client only that it happened."""
    service.log.error("".join(traceback.format_exception(error)).rstrip())
    return ApiError(500, "the server failed at this request; its log has the reason", code="internal_error")


async def models(request: Request) -> JSONResponse:
    service = service_of(request)
    return JSONResponse({"object": "list", "data": [model_object(service, name) for name in service.model.names]})


async def one_model(request: Request) -> JSONResponse:
    service = service_of(request)
    name = request.path_params["name"]
    service.model.check_name(name)
    return JSONResponse(model_object(service, name))


def model_object(service: Service, name: str) -> dict[str, Any]:
    """parent: of a model that is another one with an adapter."""
    model = service.model
    parent = {} if name == model.name else {"parent": model.name}
    return {
        "id": name,
        **parent,
        "object": "model",
        "created": service.created,
        "owned_by": "phalanx",
        "max_model_len": model.positions,
        "text": model.tokenizer is not None and model.speech is None,
        "embeds": model.embeds is not None,
        "images": model.pictures is not None,
        "transcribes": model.speech is not None,
        "chat": model.template is not None and model.tokenizer is not None and model.speech is None,
    }


async def tokenize(request: Request) -> JSONResponse:
    """Tokens of a text, or of a chat as its template writes it."""
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(TokenizeBody, data)
    model = service.model
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages.", param="prompt", code="invalid_value")
    if body.messages is not None:
        _, read = await run_in_threadpool(model.chat, body.messages, body.tools, body.chat_template_kwargs or {})
        ids = list(read.tokens)
    else:
        tokenizer = model.need_tokenizer("prompt")
        ids = await run_in_threadpool(tokenizer.encode_with_special, body.prompt or "")
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.positions, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.texts.text(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> JSONResponse:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(DetokenizeBody, data)
    service.model.check_name(body.model)
    tokenizer = service.model.need_tokenizer("tokens")
    service.model.check_ids(body.tokens, "tokens")
    return JSONResponse({"prompt": await run_in_threadpool(tokenizer.decode, body.tokens)})


async def health(request: Request) -> JSONResponse:
    """200 while requests are taken: what a load balancer asks."""
    service_of(request).check_open()
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def page(request: Request) -> HTMLResponse:
    made: HTMLResponse = request.app.state.page
    return made


def make_page() -> HTMLResponse:
    """The chat page. A browser runs nothing in it but what stands in this file, and connects to this server alone."""
    text = files("phalanx.server").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (source(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


def source(text: str, tag: str) -> str:
    """The hash of the one script or style of the page, as a policy names it."""
    inside = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"


PATHS: dict[str, tuple[str, Callable[[Request], Any]]] = {
    "/": ("GET", page),
    "/v1/completions": ("POST", completions),
    "/v1/chat/completions": ("POST", chat_completions),
    "/v1/embeddings": ("POST", embeddings),
    "/v1/audio/transcriptions": ("POST", transcriptions),
    "/v1/models": ("GET", models),
    "/tokenize": ("POST", tokenize),
    "/detokenize": ("POST", detokenize),
    "/health": ("GET", health),
    "/metrics": ("GET", metrics),
}
