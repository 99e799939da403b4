"""The routes of a server with many models: its lists of models in each API, and Ollama's calls that change them."""

import math
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.many.created import read_create
from frontend.http.many.many_models import ManyModels, may_manage
from frontend.http.many.messages import Card, Progress
from frontend.http.many.residents import Place
from frontend.http.many.waiting import Asked, read_asked
from frontend.http.ollama import ollama
from frontend.http.replies.answer_format import json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.request import Request, Response
from frontend.http.route import Route
from frontend.http.routes import ROUTES

_TAG = ":latest"
_NDJSON = b"application/x-ndjson"


async def list_models(many: ManyModels, request: Request) -> Response:
    """List all models and their adapters, in Anthropic's form for callers that send a version of its API."""
    listed = many.listed_for(request)
    if b"anthropic-version" in request.headers:
        ends = {"first_id": listed[0][0] if listed else None, "last_id": listed[-1][0] if listed else None}
        return Response(json_bytes({"data": [_anthropic(many, *one) for one in listed], "has_more": False, **ends}))
    return Response(json_bytes({"object": "list", "data": [_openai(many, *one) for one in listed]}))


async def get_model(many: ManyModels, request: Request) -> Response:
    """Describe one model, or one adapter."""
    model = many.find(request, request.target)
    name = request.target if (request.target, model) in many.listed_for(request) else model
    form = _anthropic if b"anthropic-version" in request.headers else _openai
    return Response(json_bytes(form(many, name, model)))


async def list_tags(many: ManyModels, request: Request) -> Response:
    """List all models and their adapters in Ollama's form."""
    return Response(json_bytes({"models": [_ollama(many, *one) for one in many.listed_for(request)]}))


async def list_running(many: ManyModels, request: Request) -> Response:
    """List the models in memory, and when they leave it."""
    now, wall, found = time.monotonic(), time.time(), list[Json]()
    for name in many.names_for(request):
        one, card = many.residents.by_name[name], many.cards[name]
        if one.place is Place.OUT:
            continue
        kept_s = one.kept_s if math.isinf(one.expires_at) else one.expires_at - now
        ends = "9999-12-31T00:00:00Z" if math.isinf(kept_s) else _time(wall + max(0.0, kept_s))
        more = {"expires_at": ends, "size": card.num_bytes, "size_vram": 0, "state": one.place.value}
        found.append({**_ollama(many, name, name), **more, "context_length": card.max_model_len or 0})
    return Response(json_bytes({"models": found}))


async def show(many: ManyModels, request: Request) -> Response:
    """Describe a model, without loading it."""
    name = many.find(request, (await read_asked(request)).model_name)
    card, service = many.cards[name], many.service_of(name)
    if service is not None:
        return await ollama.show(service, request)
    length, family = card.max_model_len or 0, card.architecture or "engine-core"
    lengths = {"general.context_length": length, f"{family}.context_length": length}
    answer = {
        "details": _ollama(many, name, name)["details"],
        "modified_at": _time(card.modified),
        "model_info": {"general.architecture": family, "general.basename": name, **lengths},
        "capabilities": card.capabilities,
    }
    return Response(json_bytes(answer))


async def chat(many: ManyModels, request: Request) -> Reply | Response:
    """Answer a chat of Ollama's API, or load or unload a model."""
    asked = await read_asked(request)
    if not asked.messages and (answer := _unloaded(many, request, asked, {"message": _NO_MESSAGE})) is not None:
        return answer
    service = request.service = await many.service_for(request)
    await service.check_size(request)
    await service.adapters.catch_up()
    return await ollama.chat(service, request)


async def generate(many: ManyModels, request: Request) -> Reply | Response:
    """Answer a prompt of Ollama's API, or load or unload a model."""
    asked = await read_asked(request)
    if not asked.prompt and (answer := _unloaded(many, request, asked, {"response": ""})) is not None:
        return answer
    service = request.service = await many.service_for(request)
    await service.check_size(request)
    await service.adapters.catch_up()
    return await ollama.generate(service, request)


async def pull(many: ManyModels, request: Request) -> Response:
    """Download a model, or update the cached copy, and serve it."""
    return await _change(many, request, "pull")


async def delete(many: ManyModels, request: Request) -> Response:
    """Remove a model, and its files if they are in the Hub's cache."""
    return await _change(many, request, "delete")


async def copy(many: ManyModels, request: Request) -> Response:
    """Serve a model under another name too."""
    body = request.decode(_copy_decoder)
    source = many.find(request, body.source)
    return await _answered(many, request, many.link.change("copy", _plain(body.destination), source), is_streamed=False)


async def create(many: ManyModels, request: Request) -> Response:
    """Create a model from another one, with parameters, a system message, a template or an adapter of its own."""
    _check_right(request)
    asked = await read_asked(request)
    source, options = read_create(request.body)
    if source.removesuffix(_TAG) in many.cards:
        source = source.removesuffix(_TAG)
    steps = many.link.change("create", _plain(asked.model_name or ""), source, **options)
    return await _answered(many, request, steps, is_streamed=asked.stream is not False)


def many_routes() -> tuple[Route, ...]:
    """Return the routing table of a server with many models."""
    own = {(method, path): handler for method, path, handler in _OWN}
    of_all = ("/", "/page/{name}", "/openapi.json", "/version", "/api/version", "/health", "/ping", "/live", "/ready")
    keeps = {("GET", path) for path in of_all}
    routes = list[Route]()
    for row in ROUTES:
        if (handler := own.get((row.method, row.path))) is not None:
            row = row._replace(handler=handler, is_of_server=True)
        elif (row.method, row.path) in keeps:
            row = row._replace(is_of_server=True)
        routes.append(row)
    return tuple(routes)


_OWN: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/", get_model),
    ("GET", "/api/tags", list_tags),
    ("GET", "/api/ps", list_running),
    ("POST", "/api/show", show),
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("POST", "/api/pull", pull),
    ("DELETE", "/api/delete", delete),
    ("POST", "/api/copy", copy),
    ("POST", "/api/create", create),
)
_NO_MESSAGE = {"role": "assistant", "content": ""}


class _CopyBody(msgspec.Struct):
    source: str
    destination: str


_copy_decoder = msgspec.json.Decoder(_CopyBody)


def _unloaded(many: ManyModels, request: Request, asked: Asked, content: Json) -> Response | None:
    """Unload a model, if a request without a prompt has keep_alive 0; return the answer, None for another request."""
    if asked.kept_s() != 0.0:
        return None
    _check_right(request)
    name = many.find(request, asked.model_name)
    many.unload(name)
    done = {"done": True, "done_reason": "unload"}
    return Response(json_bytes({"model": name, "created_at": _time(time.time()), **content, **done}))


def _check_right(request: Request) -> None:
    if not may_manage(request):
        raise HttpError(403, "the key may not change models: its line in the keys file needs manage=1")


def _plain(name: str) -> str:
    if not name:
        raise HttpError(400, "name the model", param="model")
    return name.removesuffix(_TAG)


async def _change(many: ManyModels, request: Request, kind: str) -> Response:
    _check_right(request)
    asked = await read_asked(request)
    name = _plain(asked.model_name or "")
    if kind == "delete":
        name = many.find(request, name)
    is_streamed = kind == "pull" and asked.stream is not False
    return await _answered(many, request, many.link.change(kind, name), is_streamed=is_streamed)


async def _answered(
    many: ManyModels, request: Request, steps: AsyncIterator[Progress], *, is_streamed: bool
) -> Response:
    """Return the end of a change. Of a stream, the lines before it are written as they arrive."""
    _check_right(request)
    step = await anext(steps)
    if is_streamed and not step.is_final:
        request.exchange.begin([(b"content-type", _NDJSON), *request.answer_headers])
        request.exchange.wrap_whole = lambda body: body.rstrip(b"\n") + b"\n"
    while not step.is_final:
        if is_streamed:
            request.exchange.write(json_bytes(step.line) + b"\n")
        step = await anext(steps)
    if step.error:
        raise HttpError(400, step.error)
    return Response(json_bytes(step.line) + b"\n", content_type=_NDJSON)


def _openai(many: ManyModels, name: str, model: str) -> Json:
    """Return OpenAI's description. model: the one that has the name, or the adapter of this name."""
    card, state = many.cards[model], many.residents.by_name[model].place.value
    service = many.service_of(model)
    return {
        "id": name,
        "object": "model",
        "created": int(card.modified),
        "owned_by": "engine-core",
        "root": name,
        "parent": None if name == model else model,
        "max_model_len": card.max_model_len,
        "capabilities": card.capabilities if service is None else service.capabilities,
        "state": state if not card.problem else "unavailable",
        "num_bytes": card.num_bytes,
    }


def _anthropic(many: ManyModels, name: str, model: str) -> Json:
    return {"type": "model", "id": name, "display_name": name, "created_at": _time(many.cards[model].modified)}


def _ollama(many: ManyModels, name: str, model: str) -> Json:
    card: Card = many.cards[model]
    shown = name if ":" in name else f"{name}{_TAG}"
    return {
        "name": shown,
        "model": shown,
        "modified_at": _time(card.modified),
        "size": card.weight_bytes,
        "digest": "",
        "details": {
            "parent_model": "" if name == model else model,
            "format": card.format,
            "family": card.architecture,
            "families": [card.architecture] if card.architecture else [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
