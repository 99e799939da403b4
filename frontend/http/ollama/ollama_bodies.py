"""The bodies of Ollama's API, and its options as our fields."""

from typing import Any

import msgspec

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.left_out import Note
from ipc.params.json_schemas import close_objects
from ipc.params.sampling_params import NUMBERS

#: Option -> our field: every number of SamplingParams under its names in Ollama and here.
_NAMES = {name: one.name for one in NUMBERS.values() for name in (one.name, *one.parameter.names)} | {"stop": "stop"}
#: Options of the machine and of loading a model, which this server's operator decides.
_OWNERS = (
    *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "numa"),
    *("vocab_only", "f16_kv", "logits_all", "embedding_only", "penalize_newline"),
)
#: Options of another sampler, used if "mirostat" is 1 or 2.
_INERT = ("mirostat_eta", "mirostat_tau")
#: Options of samplers that are not supported -> the value that turns them off, and what to do instead.
_REFUSED = {
    "mirostat": (0, "use top_p, top_k or min_p"),
    "tfs_z": (1, "llama.cpp removed it too; use typical_p, top_p or min_p"),
}


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields of both of Ollama's requests."""

    model: str
    stream: bool | None = None  # None = true
    options: Json | None = None
    format: Any = None
    keep_alive: Any = None  # nothing is unloaded here
    think: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    receipt: bool | None = None  # docs/receipts.md


class OllamaChatBody(OllamaBody, kw_only=True):
    """The body of /api/chat."""

    messages: list[Json] | None = None
    tools: list[Json] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None  # the tokens of the conversation so far, from an earlier answer


def with_parts(message: Json) -> Json:
    """Return a message with its images (in Ollama, base64 next to the text) as parts before the text."""
    images = message.get("images")
    if not images or not isinstance(images, list):
        return message
    urls = [f"data:image/png;base64,{image}" for image in images]  # the kind is read from the bytes
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    if text := message.get("content"):
        parts.append({"type": "text", "text": text})
    return {**{name: value for name, value in message.items() if name != "images"}, "content": parts}


def sampling_fields(body: OllamaBody, max_model_len: int, note: Note) -> Json:
    """Return the options as fields of SamplingFields.

    note: called for options without effect: unknown ones, and a num_ctx above max_model_len. As in Ollama, such a
    context means the largest possible one; no prompt is cut, so one that does not fit is refused.
    Errors: HttpError 400.
    """
    found: Json = {"stream": body.stream is not False}
    if body.receipt is not None:
        found["receipt"] = body.receipt
    if body.format not in (None, ""):
        if body.format != "json" and not isinstance(body.format, dict):
            raise HttpError(400, 'format must be "json" or a JSON schema', param="format")
        # llama.cpp, which Ollama runs, writes only the properties that the schema names.
        schema = {"type": "json_schema", "json_schema": {"schema": close_objects(body.format)}}
        found["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    for name, value in (body.options or {}).items():
        if value is None:
            continue
        if name == "num_ctx":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise HttpError(400, f"num_ctx must be a number of tokens, got {value!r:.40}", param="num_ctx")
            if value > max_model_len:
                note(f"num_ctx above this server's context of {max_model_len} tokens, which is used instead")
        elif name in _REFUSED:
            off, instead = _REFUSED[name]
            if value != off:
                raise HttpError(400, f"the option {name} is not supported: {instead}", param=name)
        elif name in _NAMES:
            found[_NAMES[name]] = value
        elif name in _INERT:
            note(f"the option {name}, which has no effect")
        elif name not in _OWNERS:
            note(f"the option {name!r:.60}, which is unknown here")
    if found.get("max_tokens") in (-1, -2):
        del found["max_tokens"]
    return found
