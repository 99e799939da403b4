"""Validation: the engine's checks of a request before the scheduler receives it."""

from struct import unpack

import msgspec
import numpy as np

from ipc.errors import InvalidRequestError
from ipc.log_lines import counted
from ipc.params.pooling_params import check_task, generates
from ipc.params.sampling_params import SamplingParams, check_num_logprobs
from ipc.wire.messages import DECODE_ERRORS, AddRequest, Submission
from ipc.wire.pin_messages import check_pins
from ipc.wire.pooling_messages import AddPooling

MAX_CACHE_SALT_CHARS = 1024
MAX_TENANT_BYTES = 64
#: The most numbers, of 8 bytes each, that a request's prompt_logprobs may return.
MAX_PROMPT_LOGPROBS = 1 << 22
#: For up to this many token ids, a loop is faster than an array, especially with cold code.
_FEW_IDS = 64
_MAX_DEADLINE_MS = 2**40  # 35 years; in nanoseconds it still fits an int64


class _RequestHead(msgspec.Struct, frozen=True, array_like=True, tag=AddRequest.__struct_config__.tag):
    """The first field of an AddRequest, to identify one that cannot be decoded."""

    number: int


class _PoolingHead(msgspec.Struct, frozen=True, array_like=True, tag=AddPooling.__struct_config__.tag):
    """The first field of an AddPooling; see _RequestHead."""

    number: int


_head_decoder: msgspec.msgpack.Decoder[_RequestHead | _PoolingHead] = msgspec.msgpack.Decoder(
    _RequestHead | _PoolingHead
)


def decode_request_number(data: bytes | memoryview) -> int | None:
    """Return the number in a request whose remainder could not be decoded, or None if there is none."""
    try:
        return _head_decoder.decode(data).number
    except DECODE_ERRORS:
        return None


def validate_request(
    message: Submission,
    *,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int,
    tasks: dict[str, int] | None = None,
) -> None:
    """Check a request. Errors: InvalidRequestError that states what is wrong and what would be right.

    tasks: see Welcome; None = only generation. A pooling prompt may fill max_model_len; other prompts must leave room
    for an output token.
    """
    _check_range("number", message.number, 0, 2**32 - 1)
    _check_range("priority", message.priority, -(2**31), 2**31 - 1)
    _check_range("deadline_ms", message.deadline_ms, 0, _MAX_DEADLINE_MS)
    if len(message.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(message.cache_salt)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed"
        )
    check_tenant(message.tenant)
    num_prompt = _check_token_ids("the prompt", message.prompt_token_ids, vocab_size)
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty: it needs at least one token")
    if isinstance(message, AddPooling):
        check_task(message.params, tasks or {}, num_prompt)
        _check_range("second_from", message.second_from, 0, num_prompt - 1)
        if num_prompt > max_model_len:
            raise InvalidRequestError(
                f"the prompt has {counted(num_prompt, 'token')}, but max_model_len is {max_model_len}: shorten it, or "
                "use truncate_prompt_tokens"
            )
        return
    _check_generation(message, num_prompt, vocab_size, max_model_len, max_logprobs, tasks or {})


def check_tenant(tenant: str) -> None:
    """Check the name of a tenant. Errors: InvalidRequestError."""
    if (size := len(tenant.encode())) > MAX_TENANT_BYTES:
        raise InvalidRequestError(f"tenant has {size} bytes; at most {MAX_TENANT_BYTES} are allowed")


def _check_generation(
    message: AddRequest, num_prompt: int, vocab_size: int, max_model_len: int, max_logprobs: int, tasks: dict[str, int]
) -> None:
    """Check what applies only to requests for tokens."""
    if not generates(tasks):
        raise InvalidRequestError(f"this engine does not generate tokens; its tasks are {', '.join(tasks)}")
    _check_range("seed", message.seed, 0, 2**64 - 1)
    _check_params(message.params, vocab_size)
    check_num_logprobs(message.params, vocab_size=vocab_size, max_logprobs=max_logprobs)
    if num_prompt >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {counted(num_prompt, 'token')} and max_model_len is {max_model_len}, which leaves no room "
            f"for an output token: shorten it by at least {num_prompt + 1 - max_model_len}"
        )
    _check_prompt_logprobs(message.params.prompt_logprobs, num_prompt, vocab_size)
    check_pins(message.pins, num_prompt)
    if message.params.use_beam_search and any(message.delivered):
        raise InvalidRequestError("delivered must be empty for a beam search, which delivers all tokens at its end")
    if len(message.delivered) > message.params.n:
        raise InvalidRequestError(
            f"delivered has tokens for {counted(len(message.delivered), 'choice')}, but n={message.params.n}"
        )
    delivered = [
        _check_token_ids(f"delivered[{choice}]", token_ids, vocab_size)
        for choice, token_ids in enumerate(message.delivered)
    ]
    if len(delivered) == message.params.n:  # otherwise some choice has no tokens yet
        _check_delivered(num_prompt, min(delivered), message.params.max_tokens, max_model_len)


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check what SamplingParams cannot check without knowing the vocabulary."""
    if not (params.bad_words or params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids):
        return
    if params.bad_words and not params.bad_words_token_ids:
        raise InvalidRequestError("bad_words are text, but the engine only uses token ids: send bad_words_token_ids")
    for name, ids in (
        ("logit_bias", list(params.logit_bias or ())),
        ("allowed_token_ids", params.allowed_token_ids or []),
        ("bad_words_token_ids", [token for word in params.bad_words_token_ids or () for token in word]),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(
                f"token {max(ids)} of {name} is not in the vocabulary: ids go from 0 to {vocab_size - 1}"
            )


def _check_prompt_logprobs(wanted: int | None, num_prompt: int, vocab_size: int) -> None:
    """Limit the size of a prompt's logprobs independently of max_logprobs, because all of them are one answer."""
    each = vocab_size if wanted == -1 else min(wanted or 0, vocab_size)
    if num_prompt * each > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs={wanted} needs {each} numbers for each of {counted(num_prompt, 'prompt token')}, but "
            f"only {MAX_PROMPT_LOGPROBS} are allowed: request at most {MAX_PROMPT_LOGPROBS // num_prompt} of the most "
            f"likely tokens, or shorten the prompt to {counted(MAX_PROMPT_LOGPROBS // each, 'token')}"
        )


def _check_delivered(num_prompt: int, num_delivered: int, max_tokens: int | None, max_model_len: int) -> None:
    """Check the number of delivered tokens.

    It is no error if all of the request's tokens were delivered: the client may only have lost the message with the
    end.
    """
    room = max_model_len - num_prompt if max_tokens is None else min(max_tokens, max_model_len - num_prompt)
    if num_delivered > room:
        raise InvalidRequestError(f"delivered has {counted(num_delivered, 'token')}, but the request ends after {room}")


def _check_token_ids(name: str, data: bytes, vocab_size: int) -> int:
    """Return the number of tokens in an int32 column, whose ids must all be in [0, vocab_size)."""
    if len(data) % 4:
        raise InvalidRequestError(f"{name} has {len(data)} bytes, which is not a whole number of int32 token ids")
    count = len(data) // 4
    if count <= _FEW_IDS and max(unpack(f"<{count}I", data), default=0) < vocab_size:
        return count
    ids = np.frombuffer(data, "<i4")
    if len(ids) and int(ids.view("<u4").max()) >= vocab_size:  # a negative id is a large uint32
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise InvalidRequestError(
            f"token {int(ids[at])} at index {at} of {name} is not in the vocabulary: ids go from 0 to {vocab_size - 1}"
        )
    return len(ids)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low} to {high}, got {value}")
