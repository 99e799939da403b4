"""What the bodies of OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs say: prompts, parts of answers, usage."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

#: The ends of the paths whose requests ask for tokens. The path itself is not written: it may hold names and keys.
ROUTES = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
    "/api/chat",
    "/api/generate",
    "/completion",
    "/infill",
)
#: The parts of a body that make up the prompt, in the order in which chat templates write them.
_PROMPT = ("tools", "system", "instructions", "prompt", "input", "input_prefix", "messages", "input_suffix", "suffix")
#: Fields that are no text of a prompt.
_NO_TEXT = frozenset({"type", "id", "cache_control", "detail", "media_type", "mime_type"})
#: Fields with an image, a sound or a file.
_MEDIA = frozenset({"image_url", "images", "image_data", "input_audio", "audio", "file", "source"})
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
_MAX_DEPTH = 64
_INPUT = ("prompt_tokens", "input_tokens", "prompt_eval_count", "tokens_evaluated")
_OUTPUT = ("completion_tokens", "output_tokens", "eval_count", "tokens_predicted")
_CACHED = ("cached_tokens", "cache_read_input_tokens")


def route_of(path: bytes) -> str | None:
    """Return the end of a path that asks for tokens; None: it asks for something else."""
    text = path.partition(b"?")[0].decode("latin-1")
    return next((route for route in ROUTES if text.endswith(route)), None)


class Prompt(NamedTuple):
    """A request's body. data: the text of its prompt, or four bytes for each of its token ids."""

    data: bytes
    num_tokens: int | None  # None: it is text
    num_images: int
    num_choices: int
    max_tokens: int | None
    model: str
    is_stream: bool


def read_prompt(body: Any) -> Prompt:
    """Return what a decoded body asks for; a field of an unexpected type counts as absent."""
    body = body if isinstance(body, dict) else {}
    media: list[int] = []
    parts: list[bytes] = []
    num_tokens: int | None = None
    for name in _PROMPT:
        value = body.get(name)
        if _is_ids(value):
            parts.append(b"".join((one & 0xFFFFFFFF).to_bytes(4, "little") for one in value))
            num_tokens = (num_tokens or 0) + len(value)
        else:
            parts += [text.encode("utf-8", "surrogatepass") for text in _texts(value, media)]
    if "images" in body:
        media.append(1)
    options = body.get("options")
    given = [*(body.get(name) for name in _MAX_TOKENS), *(_of(options, "num_predict"),)]
    return Prompt(
        b"".join(parts),
        num_tokens,
        len(media),
        max(1, _count(body.get("n")) or 1),
        next((count for one in given if (count := _count(one))), None),
        str(body.get("model", ""))[:200],
        body.get("stream") is True or ("stream" not in body and "options" in body),
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _texts(value: Any, media: list[int], depth: int = 0) -> Iterator[str]:
    """Yield the texts of a part of a prompt in order, and count its media."""
    if isinstance(value, str):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, list):
        for one in value:
            yield from _texts(one, media, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, dict):
        for name, one in value.items():
            if name in _MEDIA and one:
                media.append(1)
            elif name not in _NO_TEXT:
                yield from _texts(one, media, depth + 1)


class Part(NamedTuple):
    """One event of a stream, or a whole answer. Counts: None = it does not say."""

    text: str
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


NO_PART = Part("", None, None, None)


def read_part(data: bytes) -> Part:
    """Return what an event or an answer says. Anything but a JSON object says nothing."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return NO_PART
    if not isinstance(body, dict):
        return NO_PART
    places = [body, body.get("message"), body.get("response")]
    counts = [place for one in places if isinstance(place := _of(one, "usage"), dict)]
    if body.get("done") or body.get("stop"):  # Ollama's and llama.cpp's last event
        counts.append(body)
    details = [
        one
        for place in counts
        for name in ("prompt_tokens_details", "input_tokens_details")
        if isinstance(one := place.get(name), dict)
    ]
    num_input, cached = _first(counts, _INPUT), _first([*counts, *details], _CACHED)
    if num_input is not None and any("cache_read_input_tokens" in place for place in counts):
        num_input += sum(_first(counts, (name,)) or 0 for name in _ANTHROPIC_CACHE)  # counted apart by Anthropic
    return Part("".join(_answer_texts(body)), num_input, cached, _first(counts, _OUTPUT))


_ANTHROPIC_CACHE = ("cache_read_input_tokens", "cache_creation_input_tokens")


def _answer_texts(body: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of an answer's text, of reasoning and calls too."""
    kind = body.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        if kind.endswith(".delta") and isinstance(body.get("delta"), str):
            yield body["delta"]
        return
    for choice in _dicts(body.get("choices")):
        yield from _strings(choice, ("text",))
        for place in (choice.get("delta"), choice.get("message")):
            yield from _message(place)
    if kind == "content_block_delta":
        yield from _strings(body.get("delta"), ("text", "thinking", "partial_json"))
    for block in (*_dicts(body.get("content")), *_dicts(body.get("output"))):
        yield from _strings(block, ("text", "thinking", "arguments"))
        for inner in _dicts(block.get("content")):
            yield from _strings(inner, ("text",))
    if kind is None:  # Ollama's and llama.cpp's
        yield from _strings(body, ("response", "content", "thinking"))
        yield from _message(body.get("message"))


def _message(message: Any) -> Iterator[str]:
    reasoning = ("reasoning_content",) if _of(message, "reasoning_content") else ("reasoning",)
    yield from _strings(message, ("content", *reasoning, "thinking"))
    for call in _dicts(_of(message, "tool_calls")):
        yield from _strings(call.get("function"), ("name", "arguments"))


def _strings(place: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if isinstance(value := _of(place, name), str):
            yield value


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _of(place: Any, name: str) -> Any:
    return place.get(name) if isinstance(place, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _first(places: list[dict[str, Any]], names: tuple[str, ...]) -> int | None:
    """Return the first count among these names; 0 is one."""
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                return value
    return None
