"""/v1/embeddings and Ollama's /api/embed and /api/embeddings: the handlers, and the form of their answers."""

import base64
import time
from functools import partial
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

    input: Any = None
    model: str | None = None
    encoding_format: str | None = None  # float (the default) or base64
    dimensions: int | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None  # see LLM.encode()
    use_activation: bool | None = None  # whether vectors have length 1; None = as the model's files say
    normalize: bool | None = None  # an older name of it
    embed_dtype: str | None = None  # for base64: float32 (the default) or float16
    endianness: str | None = None  # for base64: native, little (the default) or big
    user: Any = None

    # Refused by name.
    truncation_side: Any = None
    messages: Any = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /api/embed. truncate: whether a text that is too long is cut, as in Ollama; None = true."""

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


_DTYPES: dict[str | None, str] = {None: "f4", "float32": "f4", "float16": "f2"}
_ORDERS: dict[str | None, str] = {None: "<", "native": "<", "little": "<", "big": ">"}  # x86 is little-endian
_FEW = 16  # most vectors written in the event loop
_decoder = msgspec.json.Decoder(EmbeddingBody)
_old_decoder = msgspec.json.Decoder(OllamaOldBody)
_ollama_decoder = msgspec.json.Decoder(OllamaEmbedBody)


async def create_embeddings(service: Service, request: Request) -> Response:
    """Embed one text or many."""
    body = request.decode(_decoder)
    name = service.check_model(request, body.model)
    if body.encoding_format not in (None, "float", "base64"):
        text = f"encoding_format must be float or base64, got {body.encoding_format!r:.40}"
        raise HttpError(400, text, param="encoding_format")
    dtype = _dtype_of(body)
    if body.input in (None, "", []):
        raise HttpError(400, "input is missing: send a text, texts, token ids or lists of token ids", param="input")
    prompts: list[PromptInput] = split_prompts(body.input)
    params = PoolingParams(
        dimensions=body.dimensions,
        use_activation=body.normalize if body.use_activation is None else body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    outputs = await pool(service, request, prompts, params, "embed", body.priority or 0, body.prompt_name)
    shown = partial(_encoded, dtype=dtype) if body.encoding_format == "base64" else _numbers
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


def _encoded(output: PoolingRequestOutput, dtype: np.dtype[Any]) -> str:
    """Return the numbers in base64, the form that OpenAI's clients request."""
    return base64.b64encode(output.outputs.data.astype(dtype, copy=False).tobytes()).decode()


def _dtype_of(body: EmbeddingBody) -> np.dtype[Any]:
    """Return the type of the numbers in base64. Errors: HttpError 400 that names the field, including refused ones."""
    if body.messages is not None:
        raise HttpError(400, "messages are not supported: send the text of the chat as input", param="messages")
    if body.truncation_side not in (None, "left"):
        text = "truncation_side is not supported: truncate_prompt_tokens keeps the tokens at the prompt's end"
        raise HttpError(400, text, param="truncation_side")
    width, order = _DTYPES.get(body.embed_dtype), _ORDERS.get(body.endianness)
    if width is None:
        text = f"embed_dtype must be float32 or float16, got {body.embed_dtype!r:.40}"
        raise HttpError(400, text, param="embed_dtype")
    if order is None:
        text = f"endianness must be native, little or big, got {body.endianness!r:.40}"
        raise HttpError(400, text, param="endianness")
    return np.dtype(order + width)


def _num_tokens(outputs: list[PoolingRequestOutput]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
