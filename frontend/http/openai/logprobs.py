"""Log probabilities in the forms of OpenAI's two APIs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from frontend.http.replies.answer_format import JsonList, raw_list
from frontend.results.outputs import Logprob, TokenLogprobs
from frontend.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity
_FEW = 16  # positions up to which JSON is made in one piece

#: A token and the log probabilities at its position; None for a prompt's first token, which has no prediction.
Position = tuple[int, TokenLogprobs | None]


class CompletionLogprobs(TypedDict):
    """The logprobs of a choice of /v1/completions, as columns. text_offset: characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionColumns(TypedDict):
    """CompletionLogprobs of many positions as JSON."""

    tokens: JsonList
    token_logprobs: JsonList
    top_logprobs: JsonList
    text_offset: JsonList


def columns_of(
    positions: Iterable[Position], tokenizer: Tokenizer | None, offset: int, *, as_ids: bool
) -> tuple[CompletionLogprobs | CompletionColumns, int]:
    """Return the columns of these positions, many of them as JSON, and the offset after them.

    offset, as_ids: see completion_logprobs().
    """
    columns = completion_logprobs(positions, tokenizer, offset, as_ids=as_ids)
    offset += sum(map(len, columns["tokens"]))
    if len(columns["tokens"]) <= _FEW:
        return columns, offset
    shown = CompletionColumns(
        tokens=raw_list(columns["tokens"]),
        token_logprobs=raw_list(columns["token_logprobs"]),
        top_logprobs=raw_list(columns["top_logprobs"]),
        text_offset=raw_list(columns["text_offset"]),
    )
    return shown, offset


def completion_logprobs(
    positions: Iterable[Position], tokenizer: Tokenizer | None, offset: int, *, as_ids: bool
) -> CompletionLogprobs:
    """Return the columns of these positions. offset: of the first. as_ids: write tokens as "token_id:<n>".

    Each top_logprobs also has the position's own token, with the same float as token_logprobs.
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
            top[name] = max(top.get(name, _LEAST), _value(logprob))  # two tokens may have the same text
        columns["top_logprobs"].append(top)
    return columns


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    tokenizer: Tokenizer | None,
    num_top: int,
    *,
    as_ids: bool,
    shows_ids: bool = False,
) -> dict[str, object]:
    """Return the logprobs of a choice of a chat. num_top: most likely tokens to show for each; -1 = all.

    shows_ids: each entry has its token's id too.
    """

    most = None if num_top < 0 else num_top

    def entry(token: int, logprob: Logprob) -> dict[str, object]:
        shown = _entry(token, logprob, tokenizer, as_ids)
        return {"id": token, **shown} if shows_ids else shown

    def content() -> Iterator[dict[str, object]]:
        for token, likely in zip(token_ids, positions, strict=True):
            best = sorted(likely.items(), key=lambda one: -one[1].logprob)[:most]
            top = [entry(each, logprob) for each, logprob in best]
            yield {**entry(token, likely[token]), "top_logprobs": top}

    return {"content": raw_list(content()) if len(token_ids) > _FEW else list(content())}


def prompt_logprobs(positions: Iterable[TokenLogprobs | None] | None) -> JsonList | None:
    """Return the prompt's log probabilities in vLLM's form: by token id, as text."""
    if positions is None:
        return None
    return raw_list(
        None if one is None else {str(token): _plain(each) for token, each in one.items()} for one in positions
    )


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
