"""Prompts: read every form of prompt that a caller may give, and return token ids."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from frontend.images.image_prompts import ImagePrompts, ImageText
from frontend.text.prompt_forms import PromptInput
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, PromptTooLongError, UnsupportedParameterError
from ipc.log_lines import counted
from ipc.tables.arrays import Floats
from ipc.wire.feature_messages import FeatureLimits
from ipc.wire.placed_feature import PlacedFeature, placed_embeds

_MAX_CACHE_SALT_CHARS = 1024
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "second_from", "prompt_embeds", "multi_modal_data", "image_marks")
#: Keys of vLLM's prompts that this version cannot serve.
_UNSUPPORTED_KEYS = ("multi_modal_uuids", "mm_processor_kwargs", "encoder_prompt")
_DATA = "'multi_modal_data'"
_FORMS = "a str, a list of token ids, {'prompt': str} or {'prompt_token_ids': [...], 'cache_salt': ...}"


class Prompt(NamedTuple):
    """A prompt ready to be submitted."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    second_from: int = 0
    features: tuple[PlacedFeature, ...] = ()


class _Form(NamedTuple):
    """A prompt as its caller wrote it. Token ids as given; None: the text must be encoded."""

    text: str | None
    token_ids: Any = None
    cache_salt: str = ""
    second_from: int = 0
    embeds: Any = None
    images: tuple[Any, ...] = ()
    image_marks: list[int] | None = None


def text_of(prompt: PromptInput) -> str:
    """Return the text of a prompt that is a str, or a dict with one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    assert isinstance(text, str), f"a prompt without a text: {prompt!r:.80}"
    return text


def text_and_ids(prompt: PromptInput) -> tuple[str | None, list[int]]:
    """Return the text and the token ids of a prompt as its caller wrote it; what he left out is None and []."""
    form = _read_form(prompt, "the prompt")
    return form.text, [] if form.token_ids is None else [int(one) for one in form.token_ids]


def split_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return one prompt or many as a list. A str, a dict and a list of ints are one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"prompts must be one or a list of: {_FORMS}; got {type(prompts).__name__}")
    if prompts and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def read_prompts(
    prompts: Sequence[PromptInput],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
    add_special_tokens: bool = True,
    truncation: Sequence[int | None] | None = None,
    num_output_tokens: int = 1,
    keeps_beginnings: bool = False,
    features: FeatureLimits | None = None,
    images: ImagePrompts | None = None,
) -> list[Prompt]:
    """Return the prompts, tokenized and checked. All texts are tokenized together, in parallel.

    vocab_size: size of the model's vocabulary. max_model_len: tokens of prompt and output together. truncation: for
    each prompt, how many of its last tokens are kept; None = all, -1 = as many as fit. num_output_tokens: room to leave
    for an output. keeps_beginnings: truncation keeps the first tokens and the very last one, which closes the text for
    an encoder. features: the engine's limits for features; None = it takes none. images: the model's processor of
    images; None = it takes none. Errors: InvalidRequestError that states which prompt is wrong, how, and what would be
    right.
    """
    most = max_model_len - num_output_tokens
    names = [_name(index, len(prompts)) for index in range(len(prompts))]
    forms = [_read_form(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    _check_texts(forms, tokenizer, truncation, names, most, max_model_len)
    tiles = [_read_images(form, name, images, features, most) for form, name in zip(forms, names, strict=True)]
    encoded = _encoded(forms, tiles, tokenizer, add_special_tokens)
    read = []
    for index, (form, of_images, name) in enumerate(zip(forms, tiles, names, strict=True)):
        placed: list[PlacedFeature] = []
        if form.embeds is not None:
            placed = read_prompt_embeds(form.embeds, name, features)
            ids = [0] * sum(one.use.num_rows for one in placed)
        else:
            ids = next(encoded) if form.token_ids is None else _read_token_ids(form.token_ids, name)
        _check_vocabulary(ids, name, vocab_size)
        if of_images is not None:
            placed = of_images.place(ids)
        keep = truncation[index] if truncation is not None else None
        if keep is not None:
            ids = _truncated(ids, keep if keep > 0 else most, keeps_beginnings)
        _check_length(ids, name, most, max_model_len, len(prompts))
        if form.second_from and num_output_tokens:
            raise InvalidRequestError(f"{name}: 'second_from' is for pooling requests only")
        read.append(Prompt(form.text, ids, form.cache_salt, min(form.second_from, len(ids) - 1), tuple(placed)))
    return read


def _encoded(
    forms: Sequence[_Form],
    tiles: Sequence[ImageText | None],
    tokenizer: Tokenizer | None,
    add_special_tokens: bool,
) -> Iterator[list[int]]:
    """Return the token ids of those prompts that are texts."""
    texts = [
        form.text if of_images is None else of_images.text
        for form, of_images in zip(forms, tiles, strict=True)
        if form.text is not None and form.token_ids is None and form.embeds is None
    ]
    if texts and tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer: give token ids, {'prompt_token_ids': [...]}")
    return iter(tokenizer.encode_batch(texts, add_special_tokens) if tokenizer is not None and texts else ())


def _check_length(ids: list[int], name: str, most: int, max_model_len: int, num_prompts: int) -> None:
    if not ids:
        which = "" if num_prompts == 1 else f" ({name})"
        raise InvalidRequestError(f"the prompt cannot be empty{which}; a prompt needs at least one token")
    if len(ids) > most:
        raise _too_long(f"{name} has {counted(len(ids), 'token')}; at most {most} fit", max_model_len)


def _check_texts(
    forms: Sequence[_Form],
    tokenizer: Tokenizer | None,
    truncation: Sequence[int | None] | None,
    names: Sequence[str],
    most: int,
    max_model_len: int,
) -> None:
    """Refuse texts that cannot fit and must not be cut. Errors: PromptTooLongError, UnsupportedParameterError."""
    for index, (form, name) in enumerate(zip(forms, names, strict=True)):
        is_cut = truncation is not None and truncation[index] is not None
        if is_cut and (form.images or form.embeds is not None):
            raise UnsupportedParameterError(
                f"{name}: truncate_prompt_tokens cannot be used for a prompt with embeddings or images"
            )
        if tokenizer is not None and form.token_ids is None and not is_cut:
            check_text_fits(tokenizer, form.text, most, max_model_len, name)


def check_text_fits(
    tokenizer: Tokenizer, text: str | None, most: int, max_model_len: int, name: str = "the prompt"
) -> None:
    """Refuse a text of more bytes than `most` tokens can have, without reading it. Errors: PromptTooLongError."""
    if not isinstance(text, str) or len(text) <= most or (fewest := tokenizer.bound.fewest_tokens(text)) <= most:
        return
    has = f"{name} has {len(text)} characters, {counted(fewest, 'token')} or more"
    raise _too_long(f"{has}; at most {most} fit", max_model_len)


def _too_long(excess: str, max_model_len: int) -> PromptTooLongError:
    error = PromptTooLongError(
        f"{excess}: the maximum context length is {counted(max_model_len, 'token')}, prompt and output together "
        f"(max_model_len={max_model_len})"
    )
    error.excess = excess
    return error


def _read_images(
    form: _Form, name: str, images: ImagePrompts | None, features: FeatureLimits | None, most_tokens: int
) -> ImageText | None:
    """Return the text of a prompt with images, and their pixels; None for a prompt without images."""
    if not form.images:
        return None
    if images is None:
        raise no_images(name)
    assert form.text is not None, form
    most = None if features is None else features.max_bytes
    return images.read(form.text, form.images, name, form.image_marks, most, most_tokens=most_tokens)


def no_images(name: str) -> UnsupportedParameterError:
    """Return the error for images that the engine does not take. name: of the prompt."""
    return UnsupportedParameterError(
        f"{name}: this engine takes no images: its model has none, or its folder has no image processor that this "
        "version knows"
    )


def _truncated(ids: list[int], keep: int, keeps_beginnings: bool) -> list[int]:
    """Return this many of the tokens: the last ones, or the first ones and the very last."""
    if len(ids) <= keep:
        return ids
    return ids[: keep - 1] + ids[-1:] if keeps_beginnings else ids[-keep:]


def _read_form(prompt: PromptInput, name: str) -> _Form:
    if isinstance(prompt, str):
        return _Form(prompt)
    if not isinstance(prompt, Mapping):
        if prompt is None:
            raise InvalidRequestError(f"{name} must be {_FORMS}; got None")
        return _Form(None, prompt)
    for key, value in prompt.items():
        if key in _UNSUPPORTED_KEYS and value is not None:
            raise UnsupportedParameterError(f"{name}: {key!r} is not supported by this version; a prompt is {_FORMS}")
        if key not in _KEYS and key not in _UNSUPPORTED_KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidRequestError(f"{name}: unknown key {key!r}; {hint}a prompt is {_FORMS}")
    text, token_ids, cache_salt, second_from, embeds, data, marks = (prompt.get(key) for key in _KEYS)
    for key, value in (("prompt", text), ("cache_salt", cache_salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name}: {key!r} must be a str, got {type(value).__name__}")
    if text is None and token_ids is None and embeds is None:
        raise InvalidRequestError(f"{name}: 'prompt' or 'prompt_token_ids' is missing; a prompt is {_FORMS}")
    if embeds is not None and (token_ids is not None or data is not None):
        raise InvalidRequestError(f"{name}: 'prompt_embeds' must be a whole prompt: leave out token ids and images")
    _check_cache_salt(cache_salt or "", name)  # type: ignore[arg-type]
    if second_from is not None and (type(second_from) is not int or second_from < 0):
        raise InvalidRequestError(f"{name}: 'second_from' must be an int of at least 0, got {second_from!r:.80}")
    images = _images_of(data, name)
    if images and (text is None or token_ids is not None):
        raise InvalidRequestError(f"{name}: images need a prompt that is text: {{'prompt': ..., {_DATA}: ...}}")
    image_marks = None if marks is None else _read_image_marks(marks, name)
    return _Form(text, token_ids, cache_salt or "", second_from or 0, embeds, images, image_marks)  # type: ignore[arg-type]


def _images_of(data: Any, name: str) -> tuple[Any, ...]:
    """Return the images of multi_modal_data."""
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise InvalidRequestError(f"{name}: {_DATA} must be {{'image': ...}}, got {type(data).__name__}")
    if others := [str(key) for key, value in data.items() if key != "image" and value is not None]:
        raise UnsupportedParameterError(f"{name}: {_DATA} has {', '.join(others)}: this version reads only images")
    given = data.get("image")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _read_image_marks(marks: object, name: str) -> list[int]:
    ids = _read_token_ids(marks, name) if isinstance(marks, Sequence) and not isinstance(marks, str) else [-1]
    if ids != sorted(set(ids)) or (ids and ids[0] < 0):
        raise InvalidRequestError(f"{name}: 'image_marks' must be ascending ints of at least 0; got {marks!r:.80}")
    return ids


def _check_cache_salt(salt: str, name: str) -> None:
    if len(salt) > _MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"{name}: 'cache_salt' has {len(salt)} characters; at most {_MAX_CACHE_SALT_CHARS} are allowed"
        )
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise InvalidRequestError(f"{name}: 'cache_salt' must be valid Unicode; {salt!r:.80} has a lone surrogate")


def _read_token_ids(token_ids: object, name: str) -> list[int]:
    if isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 and token_ids.dtype.kind in "iu":
        ids: list[int] = token_ids.tolist()
    elif isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray)):
        ids = list(token_ids)
    else:
        raise InvalidRequestError(f"{name} must be {_FORMS}; got {type(token_ids).__name__}")
    kinds = set(map(type, ids))
    if kinds - {int}:
        wrong = [kind for kind in kinds if not issubclass(kind, (int, np.integer)) or kind is bool]
        if wrong:
            index = next(index for index, token in enumerate(ids) if type(token) in wrong)
            raise InvalidRequestError(f"{name}: token ids must be ints; at index {index} is {ids[index]!r:.80}")
        ids = [int(token) for token in ids]
    return ids


def _check_vocabulary(ids: list[int], name: str, vocab_size: int) -> None:
    """Raise InvalidRequestError for an id outside the vocabulary. A text can have one: a tokenizer may have more
    tokens.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{name}: token id {ids[index]} at index {index} is out of vocabulary; known are 0 to {vocab_size - 1}"
        )


def _name(index: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {index} of {count}"


# Prompts given as embeddings: the rows that replace the tokens of a prompt, checked.


def read_prompt_embeds(value: Any, name: str, limits: FeatureLimits | None) -> list[PlacedFeature]:
    """Return the features of a prompt that consists of embeddings.

    value: [tokens, hidden], an array of NumPy's or a tensor of torch's, of floats. Errors: InvalidRequestError;
    UnsupportedParameterError if the engine takes none.
    """
    if limits is None:
        raise UnsupportedParameterError(
            f"{name}: this engine does not take 'prompt_embeds': they need a decoder implemented here on the C "
            "kernels or a GPU, without a draft model or a router"
        )
    rows = _as_floats(value, name)
    if rows.ndim != 2 or rows.shape[1] != limits.width or not len(rows):
        raise InvalidRequestError(
            f"{name}: 'prompt_embeds' must have the shape [tokens, {limits.width}], at least one token; got "
            f"{list(rows.shape)}"
        )
    if not np.isfinite(rows).all():
        raise InvalidRequestError(f"{name}: 'prompt_embeds' must be finite numbers")
    if rows.nbytes > limits.max_bytes:
        raise InvalidRequestError(
            f"{name}: 'prompt_embeds' take {rows.nbytes} bytes; at most {limits.max_bytes} are allowed"
        )
    return placed_embeds(rows)


def _as_floats(value: Any, name: str) -> Floats:
    if hasattr(value, "detach"):  # a tensor of torch's; NumPy has no bfloat16
        value = value.detach().float().cpu().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidRequestError(f"{name}: 'prompt_embeds' must be an array or a tensor of floats; got {kind}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(value, np.float32)
