"""/v1/models, /version and the tokenizer's routes."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from frontend.http.bodies import DetokenizeBody, TokenizeBody
from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import json_bytes, raw_list
from frontend.http.request import Request, Response
from frontend.http.service import Service
from frontend.text.tokenizer import Tokenizer
from ipc.version import VERSION

_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


async def list_models(service: Service, request: Request) -> Response:
    """List the model's names, in Anthropic's form for callers that send a version of its API."""
    if b"anthropic-version" in request.headers:
        return Response(json_bytes(_anthropic_list(service, service.names_for(request))))
    return Response(
        json_bytes({"object": "list", "data": [_card(service, name) for name in service.names_for(request)]})
    )


async def get_model(service: Service, request: Request) -> Response:
    """Describe one model."""
    name = service.check_model(request, request.target)
    card = _anthropic_card if b"anthropic-version" in request.headers else _card
    return Response(json_bytes(card(service, name)))


async def get_version(service: Service, request: Request) -> Response:
    """Return the server's version."""
    return Response(json_bytes({"version": VERSION}))


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text or of a chat."""
    body = request.decode(_tokenize)
    service.check_model(request, body.model)
    if body.content is not None and body.prompt is None:  # llama.cpp's names, and its default
        body.prompt, body.add_special_tokens = body.content, bool(body.add_special)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "send prompt or messages, one of them", param="prompt")
    tokenizer = service.tokenizer
    if body.parse_special is False and any(name in (body.prompt or "") for name in tokenizer.added_tokens):
        text = "parse_special=false is not supported for a text with the names of special tokens"
        raise HttpError(400, text, param="parse_special")

    def shown_tokens(ids: list[int]) -> Iterable[object]:
        return ({"id": one, "piece": _piece(tokenizer, one)} for one in ids) if body.with_pieces else ids

    def work() -> bytes:
        text, special = body.prompt, body.add_special_tokens is not False
        if text is None:
            continues = bool(body.continue_final_message)
            prompts = body.add_generation_prompt
            (rendered,) = service.engine.render_chats(
                [body.messages or []],
                chat_template=None,
                add_generation_prompt=not continues if prompts is None else prompts,
                continue_final_message=continues,
                tools=body.tools,
                kwargs=body.chat_template_kwargs,
                takes_files=False,
            )
            if not isinstance(rendered, str):
                raise HttpError(400, "tokens of images are not counted here: leave them out", param="messages")
            text = rendered
            special = bool(body.add_special_tokens)
        service.check_countable(text)
        ids = tokenizer.encode(text, add_special_tokens=special)
        names = raw_list(map(tokenizer.hf.id_to_token, ids)) if body.return_token_strs else None
        shown = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": raw_list(shown_tokens(ids))}
        return json_bytes({**shown, "token_strs": names})

    return Response(await service.run(request, work))


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return the text that a token stands for, or its bytes if they are no whole characters."""
    data = tokenizer.bytes_of(token)
    if data is None:
        return (tokenizer.hf.id_to_token(token) or "").replace("\u2581", " ")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special ones."""
    body = request.decode(_detokenize)
    service.check_model(request, body.model)
    tokenizer = service.tokenizer
    vocab_size = max(tokenizer.vocab_size, service.engine.client.welcome.vocab_size)  # may be padded
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
        raise HttpError(400, f"tokens must be ids of the vocabulary, below {vocab_size}", param="tokens")

    def work() -> bytes:
        text = msgspec.Raw(json_bytes(tokenizer.decode(body.tokens, skip_special_tokens=False)))
        return json_bytes({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's

    return Response(await service.run(request, work))


async def get_tokenizer_info(service: Service, request: Request) -> Response:
    """Describe the tokenizer: its special tokens and its chat template."""
    service.check_model(request, None)
    tokenizer = service.tokenizer
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.max_model_len,
        "chat_template": tokenizer.chat_template,
    }
    return Response(json_bytes(info))


def _anthropic_list(service: Service, names: Sequence[str]) -> dict[str, object]:
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": [_anthropic_card(service, name) for name in names], "has_more": False, **ends}


def _anthropic_card(service: Service, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _card(service: Service, name: str) -> dict[str, object]:
    is_adapter = name not in service.names
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "engine-core",
        "root": name if is_adapter else service.names[0],
        "parent": service.names[0] if is_adapter else None,
        "max_model_len": service.max_model_len,
        "capabilities": service.capabilities,
    }
