"""Log probabilities in the forms of OpenAI's two APIs."""

from collections.abc import Sequence
from typing import TypedDict

from frontend.results.outputs import Logprob, TokenLogprobs
from frontend.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity

#: A token and the log probabilities at its position; None for a prompt's first token, which has no prediction.
Position = tuple[int, TokenLogprobs | None]


class CompletionLogprobs(TypedDict):
    """The logprobs of a choice of /v1/completions, as columns. text_offset: characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def completion_logprobs(
    positions: Sequence[Position], tokenizer: Tokenizer | None, offset: int, *, as_ids: bool
) -> CompletionLogprobs:
    """Return the columns of these positions. offset: of the first. as_ids: write tokens as "token_id:<n>".

    Each top_logprobs has the position's own token too, with the very float of token_logprobs.
    """
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, likely in positions:
        text = _text(token, None if likely is None else likely[token], tokenizer, as_ids)
        columns["tokens"].append(text)
        columns["text_offset"].append(offset)
        offset += len(text)
        if likely is None:
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
            continue
        columns["token_logprobs"].append(_value(likely[token]))
        top: dict[str, float] = {}
        for each, logprob in likely.items():
            name = _text(each, logprob, tokenizer, as_ids)
            top[name] = max(top.get(name, _LEAST), _value(logprob))  # two tokens may have one text
        columns["top_logprobs"].append(top)
    return columns


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    tokenizer: Tokenizer | None,
    num_top: int,
    *,
    as_ids: bool,
) -> dict[str, object]:
    """Return the logprobs of a choice of a chat. num_top: likely tokens to show beside each."""
    content = []
    for token, likely in zip(token_ids, positions, strict=True):
        best = sorted(likely.items(), key=lambda one: -one[1].logprob)[:num_top]
        top = [_entry(each, logprob, tokenizer, as_ids) for each, logprob in best]
        content.append({**_entry(token, likely[token], tokenizer, as_ids), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(positions: Sequence[TokenLogprobs | None] | None) -> list[dict[str, object] | None] | None:
    """Return the prompt's log probabilities in vLLM's form: by token id, as text."""
    if positions is None:
        return None
    return [None if one is None else {str(token): _plain(each) for token, each in one.items()} for one in positions]


def _plain(logprob: Logprob) -> dict[str, object]:
    return {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _entry(token: int, logprob: Logprob, tokenizer: Tokenizer | None, as_ids: bool) -> dict[str, object]:
    text = _text(token, logprob, tokenizer, as_ids)
    data = tokenizer.bytes_of(token) if tokenizer is not None and not as_ids else None
    return {"token": text, "logprob": _value(logprob), "bytes": list(text.encode() if data is None else data)}


def _text(token: int, logprob: Logprob | None, tokenizer: Tokenizer | None, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token}"
    if logprob is not None:
        return logprob.decoded_token or ""
    return "" if tokenizer is None else tokenizer.decode_batch([[token]])[0]


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
