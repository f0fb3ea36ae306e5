# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: a vector of each text, of unit length, computed between the steps of others."""

import base64
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request, Response
from pydantic import Field

from sparse_bitnet.generation.request import Generation, GenerationRequest
from sparse_bitnet.generation.scheduler import ThreadedScheduler
from sparse_bitnet.serve.answer import (
    Answering,
    cancelled_when_gone,
    failure,
    json_response,
    name_ignored,
)
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel, prompt_tokens
from sparse_bitnet.serve.replies import json_blocks
from sparse_bitnet.serve.schema import WHOLE, TokenIds, TolerantBody, listed, parse_body

_MOST_NUMBERS = 1 << 22
"""In one answer."""
Inputs = Annotated[list[str | TokenIds], Field(min_length=1, max_length=2048, fail_fast=True)]


class EmbeddingsBody(TolerantBody):
    """POST /v1/embeddings"""

    input: str | TokenIds | Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """This many numbers from the front, of unit length again."""


async def embeddings(
    answering: Answering,
    model: ServedModel,
    scheduler: ThreadedScheduler,
    raw: bytes,
    request: Request,
) -> Response:
    """Raises `ApiError` for a body that is no valid one, asks for too much, or cannot be answered."""
    outputs, deliver = answering.outputs()

    def read() -> tuple[EmbeddingsBody, list[GenerationRequest]]:
        body = parse_body(EmbeddingsBody, raw)
        return body, [
            GenerationRequest(
                prompt=prompt, max_tokens=0, pooling=model.pooling, deliver=partial(deliver, index)
            )
            for index, prompt in enumerate(_prompts(body, model, scheduler.capacity))
        ]

    body, requests = await answering.beside(request, raw, read)
    generations: list[Generation] = []
    request.scope["generations"] = generations
    # So many at once as can run: what others ask meanwhile comes between them.
    wave = scheduler.max_running
    async with cancelled_when_gone(request, scheduler, generations):
        for start in range(0, len(requests), wave):
            if generations and generations[0].cancel_asked:
                raise ApiError(499, "cancelled")
            generations += answering.submit(requests[start : start + wave])
            for _ in requests[start : start + wave]:
                index, output = await outputs.get()
                if output.finish != "stop":
                    raise failure(generations[index])
    tokens = sum(len(one.prompt) for one in requests)
    content = {
        "object": "list",
        "data": _entries(body, generations),
        "model": model.name,
        "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), tokens),
    }
    response = await json_response(json_blocks(content))
    name_ignored(response, body.ignored)
    return response


def _prompts(body: EmbeddingsBody, model: ServedModel, most: int) -> list[list[int]]:
    model.check_name(body.model)
    if model.pooling is None:
        raise ApiError(400, f"the model {model.name!r} gives no embeddings", code="no_embeddings")
    inputs, size = listed(body.input), body.dimensions or model.hidden_size
    if size > model.hidden_size:
        message = f"dimensions {size}: the model's vectors have {model.hidden_size}"
        raise ApiError(400, message, param="dimensions")
    if len(inputs) * size > _MOST_NUMBERS:
        raise ApiError(
            400,
            f"{len(inputs)} vectors of {size} numbers: this server gives {_MOST_NUMBERS:,} numbers at "
            "once; send fewer inputs",
            param="input",
        )
    return [prompt_tokens(given, model, most, "input") for given in inputs]


def _entries(body: EmbeddingsBody, generations: list[Generation]) -> Iterator[dict[str, Any]]:
    for index, generation in enumerate(generations):
        assert generation.embedding is not None
        vector = generation.embedding[: body.dimensions].astype("<f4")
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        embedding: Any = map(float, vector)
        if body.encoding_format == "base64":
            embedding = base64.b64encode(vector.tobytes()).decode()
        yield {"object": "embedding", "index": index, "embedding": embedding}
