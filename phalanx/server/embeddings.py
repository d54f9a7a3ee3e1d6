"""POST /v1/embeddings: embeddings, in the format of OpenAI's API."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.inference.request import Embedded, Finished, SamplingOptions
from phalanx.server.engine_thread import Answers, SequenceJob
from phalanx.server.errors import ApiError, not_finished
from phalanx.server.metrics import Stopwatch
from phalanx.server.responses import GONE, read_body, unless_gone
from phalanx.server.schemas import EmbeddingBody, parse
from phalanx.server.served import ServedEmbedder, ServedModel
from phalanx.server.service import Service, note, service_of


async def embeddings(request: Request) -> Response:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds)
    body = parse(EmbeddingBody, data)
    service.model.check_name(body.model)
    embeds = service.model.need_embedder()
    if body.dimensions is not None and body.dimensions > embeds.width:
        message = f"dimensions: must be at most {embeds.width}, the width of the model's embeddings."
        raise ApiError(400, message, param="dimensions", code="invalid_value")
    texts = await run_in_threadpool(texts_of, service.model, embeds, body.input)
    jobs = [SequenceJob(ids, SamplingOptions(tokens=0)) for ids in texts]
    answers = await service.start(jobs, "input", "texts of input")
    watch = Stopwatch(service.metrics, sum(map(len, texts)))
    note(request, watch, body.user)
    whole = await unless_gone(request.receive, whole_answer(service, body, answers, watch))
    return Response(status_code=GONE) if whole is None else JSONResponse(whole)


def texts_of(model: ServedModel, embeds: ServedEmbedder, given: str | list[Any]) -> list[tuple[int, ...]]:
    """The ids of each text. Ids are taken as they are; a text begins and ends as in training. ApiError for one that is
    empty or too long."""
    several = isinstance(given, list) and not isinstance(given[0], int)
    found = []
    for number, each in enumerate(given if several else [given]):
        field = f"input[{number}]" if several else "input"
        if isinstance(each, str):
            if embeds.marks is None:
                model.need_tokenizer(field)
            ids = tuple(embeds.marks.encode(each)) if each and embeds.marks is not None else ()
        else:
            model.check_ids(each, field)
            ids = tuple(each)
        if not 0 < len(ids) <= model.positions:
            rule = "must not be empty" if not ids else f"has {len(ids)} tokens, and at most {model.positions} are read"
            raise ApiError(400, f"{field}: {rule}.", param="input", code="invalid_value")
        found.append(ids)
    return found


async def whole_answer(service: Service, body: EmbeddingBody, answers: Answers, watch: Stopwatch) -> dict[str, Any]:
    began = time.monotonic()
    vectors: dict[int, NDArray[np.float32]] = {}
    try:
        async for index, event in answers:
            watch.note(index, event)
            if isinstance(event, Embedded):
                vectors[index] = event.vector
            elif isinstance(event, Finished) and event.reason != "stop":
                raise not_finished(event.reason, event.error)
    finally:
        answers.cancel()
        watch.end()
    service.over(began)
    made = [
        {"object": "embedding", "index": i, "embedding": shown(service.model, vectors[i], body)}
        for i in range(len(vectors))
    ]
    tokens = {"prompt_tokens": watch.prompt_tokens, "total_tokens": watch.prompt_tokens}
    return {"object": "list", "data": made, "model": body.model or service.model.name, "usage": tokens}


def shown(model: ServedModel, vector: NDArray[np.float32], body: EmbeddingBody) -> str | list[float]:
    """The first `dimensions` features, as numbers, or as the base64 of little-endian fp32."""
    found = vector[: body.dimensions]
    if body.dimensions is not None and model.need_embedder().normalized:
        found = found / max(float(np.linalg.norm(found)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(found.astype("<f4").tobytes()).decode()
    numbers: list[float] = found.tolist()
    return numbers
