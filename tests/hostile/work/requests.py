"""Requests of one caller that once stopped, starved or swelled the HTTP server for all others."""

from typing import Any, NamedTuple


class Harm(NamedTuple):
    """A request, and the statuses that may answer it. A factor makes it larger: bytes of its body grow by it."""

    name: str
    path: str
    body: dict[str, Any]
    statuses: tuple[int, ...]


def harms(factor: int = 1) -> list[Harm]:
    """The requests for the demo model's tokenizer and a context of 4,096. factor: 8 = bodies of up to 8 MB."""
    text = "lorem ipsum dolor " * (50_000 * factor)
    digits = "1234567890" * (90_000 * factor)
    longest = min(6, 2 * factor)  # prompts of 84,000 log probabilities
    return [
        Harm("tokenize words", "/tokenize", {"prompt": text}, (400,)),
        Harm("tokenize digits", "/tokenize", {"prompt": digits}, (400,)),
        Harm("tokenize the longest text", "/tokenize", {"prompt": "12" * 150_000, "return_token_strs": True}, (200,)),
        Harm("tokenize many messages", "/tokenize", {"messages": [_message("x " * 20)] * 4096}, (200,)),
        Harm("count tokens", "/v1/messages/count_tokens", {"model": "demo", "messages": [_message(text)]}, (400,)),
        Harm("detokenize", "/detokenize", {"tokens": list(range(40_000)) * 6}, (200,)),
        Harm("detokenize too many", "/detokenize", {"tokens": [5] * (330_000 * factor)}, (400,)),
        Harm("a prompt that cannot fit", "/v1/completions", {"prompt": digits, "max_tokens": 1}, (400,)),
        Harm("a chat that cannot fit", "/v1/chat/completions", {"messages": [_message(text)]}, (400,)),
        Harm("prompts x n", "/v1/completions", _draws([[1]] * 2048, n=128), (400,)),
        Harm("2,048 prompts", "/v1/completions", _draws([[1]] * 2048, n=2), (200, 503)),
        Harm("2,048 prompts, streamed", "/v1/completions", _draws([[1]] * 2048, n=2, stream=True), (200, 503)),
        Harm("echo and log probabilities", "/v1/completions", _logprobs([[5] * 4000] * 64, 20), (400,)),
        Harm("the longest echo", "/v1/completions", _logprobs([[5] * 4000] * longest, 20), (200, 503)),
        Harm(
            "the longest echo, streamed",
            "/v1/completions",
            _logprobs([[5] * 4000] * longest, 20, stream=True),
            (200, 503),
        ),
        Harm("log probabilities of a prompt", "/v1/completions", _prompt_logprobs([5] * 4000), (200, 503)),
        Harm("lists in a list", "/v1/completions", {"prompt": [[1]] * (190_000 * factor)}, (400,)),
        Harm("fields", "/v1/chat/completions", {"messages": [{}] * (230_000 * factor)}, (400,)),
        Harm(
            "logit_bias",
            "/v1/completions",
            {"prompt": [1], "logit_bias": dict.fromkeys(map(str, range(9**5)), 1)},
            (400,),
        ),
    ]


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _draws(prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompts, "max_tokens": 1, "temperature": 1, **fields}


def _logprobs(prompts: list[list[int]], count: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": count, **fields}


def _prompt_logprobs(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20}
