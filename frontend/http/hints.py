"""hint(): what a caller may have meant by a path that is not a route here, or the alternative."""

from collections.abc import Container

#: Paths of llama.cpp's, vLLM's, TGI's and SGLang's servers, without /v1 -> the route here.
OTHER_PATHS = {
    "generate": "/v1/completions",
    "generate_stream": "/v1/completions",
    "chat": "/v1/chat/completions",
    "invocations": "/v1/chat/completions",
    "embedding": "/v1/embeddings",
    "embed": "/v1/embeddings",
    "reranking": "/v1/rerank",
    "info": "/v1/models",
    "get_model_info": "/v1/models",
    "server_info": "/version",
    "get_server_info": "/version",
    "docs": "/openapi.json",
    "redoc": "/openapi.json",
    "healthz": "/health",
    "health_generate": "/health",
}
_STORES_NOTHING = "this is not stored here: send the whole history to /v1/responses or /v1/chat/completions"
_OWNERS = "the engine's owner does this with `engine-core control`, not over HTTP"
_ADAPTERS = "the engine's owner loads adapters with `engine-core control`, not over HTTP"
_TEXT_ONLY = "this server answers with text"
#: First words of paths without a counterpart here, without /v1 -> the alternative.
ABSENT = {
    "audio": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "moderations": "there is no model for moderation",
    "uploads": "send a file as a whole to /v1/files",
    "messages/batches": "send its requests to /v1/batches, or use `engine-core batch`",
    "assistants": _STORES_NOTHING,
    "threads": _STORES_NOTHING,
    "vector_stores": _STORES_NOTHING,
    "fine_tuning": "models are not trained here",
    "realtime": "there are no WebSockets: stream /v1/chat/completions",
    "api/blobs": "models are downloaded with `engine-core pull`, not over HTTP",
    "load_lora_adapter": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "lora-adapters": _ADAPTERS,
    "abort_request": "to abort a request, close its connection",
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping", "pause", "resume", "reset_prefix_cache"), _OWNERS),
}


def hint(path: str, routes: Container[str]) -> str:
    """Return the end of the message for a path that is not in `routes`; may be empty.

    Callers use base URLs without /v1, with it twice, after a prefix of another service, or ending in "/"; and other
    servers use other names.
    """
    parts = [part for part in path.split("/") if part]
    while len(parts) > 1 and parts[0] in ("v1", "v2"):
        parts.pop(0)
    found = _meant(parts, routes)
    absent = next((ABSENT[words] for words in ("/".join(parts[:2]), "/".join(parts[:1])) if words in ABSENT), "")
    if absent and not found:
        return f"; {absent}"
    found = found or next((one for begin in range(1, len(parts)) if (one := _meant(parts[begin:], routes))), "")
    return f"; there is {found}" if found else ""


def _meant(parts: list[str], routes: Container[str]) -> str:
    """Return the route that the parts name, with or without /v1, here or at another server; "" for none."""
    rest = "/".join(parts)
    if rest in OTHER_PATHS:
        return OTHER_PATHS[rest]
    return next((one for one in (f"/v1/{rest}", f"/{rest}") if one in routes), "")
