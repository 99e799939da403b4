"""/v1/embeddings and Ollama's /api/embed and /api/embeddings: the handlers, and the form of their answers."""

import base64
import time
from typing import Any

import msgspec
import numpy as np

from frontend.http.errors import HttpError
from frontend.http.pooling import pool
from frontend.http.replies.answer_format import json_bytes, raw_list
from frontend.http.request import Request, Response
from frontend.http.service import Service
from frontend.results.pooling_outputs import PoolingRequestOutput
from frontend.text.prompt_forms import PromptInput
from frontend.text.prompts import split_prompts
from ipc.params.pooling_params import PoolingParams


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of /v1/embeddings. input: a text, texts, token ids or lists of token ids."""

    input: Any
    model: str | None = None
    encoding_format: str | None = None  # float (the default) or base64
    dimensions: int | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None  # see LLM.encode()
    user: Any = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /api/embed. truncate: whether a text that is too long is cut, as Ollama does; None = true."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Any = None
    keep_alive: Any = None


class OllamaOldBody(msgspec.Struct, kw_only=True):
    """The body of /api/embeddings, which embeds one text."""

    model: str
    prompt: str
    options: Any = None
    keep_alive: Any = None


_FEW = 16  # vectors, which are written in the event loop
_decoder = msgspec.json.Decoder(EmbeddingBody)
_old_decoder = msgspec.json.Decoder(OllamaOldBody)
_ollama_decoder = msgspec.json.Decoder(OllamaEmbedBody)


async def create_embeddings(service: Service, request: Request) -> Response:
    """Embed one text or many."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    if body.encoding_format not in (None, "float", "base64"):
        text = f"encoding_format is float or base64, got {body.encoding_format!r:.40}"
        raise HttpError(400, text, param="encoding_format")
    if body.input in (None, "", []):
        raise HttpError(400, "input is missing: send a text, texts, token ids or lists of token ids", param="input")
    prompts: list[PromptInput] = split_prompts(body.input)
    params = PoolingParams(dimensions=body.dimensions, truncate_prompt_tokens=body.truncate_prompt_tokens)
    outputs = await pool(service, request, prompts, params, "embed", body.priority or 0, body.prompt_name)
    shown = _encoded if body.encoding_format == "base64" else _numbers
    count = _num_tokens(outputs)
    usage = {"prompt_tokens": count, "total_tokens": count}

    def work() -> bytes:
        data = raw_list(
            {"object": "embedding", "index": index, "embedding": shown(output)} for index, output in enumerate(outputs)
        )
        return json_bytes({"object": "list", "data": data, "model": name, "usage": usage})

    return Response(await service.run(request, work, is_long=len(outputs) > _FEW))


async def embed(service: Service, request: Request) -> Response:
    """Embed one text or many, for Ollama's programs."""
    body, begin = request.decode(_ollama_decoder), time.monotonic_ns()
    name = service.check_model(request, body.model.removesuffix(":latest"))
    texts = [body.input] if isinstance(body.input, str) else body.input
    params = PoolingParams(dimensions=body.dimensions, truncate_prompt_tokens=None if body.truncate is False else -1)
    outputs = await pool(service, request, list(texts), params, "embed") if texts else []
    took = time.monotonic_ns() - begin

    def work() -> bytes:
        answer = {"model": name, "embeddings": raw_list(map(_numbers, outputs)), "total_duration": took}
        return json_bytes({**answer, "load_duration": 0, "prompt_eval_count": _num_tokens(outputs)})

    return Response(await service.run(request, work, is_long=len(outputs) > _FEW))


async def embed_one(service: Service, request: Request) -> Response:
    """Embed one text, for Ollama's older programs."""
    body = request.decode(_old_decoder)
    service.check_model(request, body.model.removesuffix(":latest"))
    outputs = await pool(service, request, [body.prompt], PoolingParams(truncate_prompt_tokens=-1), "embed")
    return Response(json_bytes({"embedding": _numbers(outputs[0])}))


def _numbers(output: PoolingRequestOutput) -> list[float]:
    numbers: list[float] = output.outputs.data.tolist()
    return numbers


def _encoded(output: PoolingRequestOutput) -> str:
    """Return the numbers as float32, little-endian, in base64: OpenAI's form, which its clients ask for."""
    return base64.b64encode(output.outputs.data.astype(np.dtype("<f4"), copy=False).tobytes()).decode()


def _num_tokens(outputs: list[PoolingRequestOutput]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
