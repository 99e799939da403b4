"""PoolingParams: the options of a request whose answer is vectors instead of tokens."""

import numbers
from collections.abc import Collection
from typing import Literal, get_args

import msgspec

from ipc.errors import InvalidRequestError

#: The tasks of requests to a model that pools. "token_...": a vector for each token of the prompt.
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
#: The task of requests that are answered with tokens.
GENERATE = "generate"
#: Most bytes of one request's vectors.
MAX_POOLED_BYTES = 16 << 20


class PoolingParams(msgspec.Struct, array_like=True):
    """The options of a pooling request; an array on the wire.

    Errors: InvalidRequestError for a value of the wrong type or range. task: None = the engine's default. dimensions:
    keep this many first numbers of each embedding, before it is normalised; None = all. use_activation: whether an
    embedding is normalised to length 1, or a classifier's logits become probabilities; None = as the model's files say.
    truncate_prompt_tokens: keep this many tokens at the prompt's end; -1 = as many as the model takes.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, *get_args(PoolingTask)):
            raise InvalidRequestError(f"task must be one of {', '.join(get_args(PoolingTask))}; got {self.task!r:.80}")
        if self.dimensions is not None:
            self.dimensions = _count("dimensions", self.dimensions)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise InvalidRequestError(f"use_activation must be True, False or None, got {self.use_activation!r:.80}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            self.truncate_prompt_tokens = _count("truncate_prompt_tokens", self.truncate_prompt_tokens)

    @property
    def n(self) -> int:
        """Return the number of choices: a pooling request has one answer."""
        return 1

    @property
    def max_tokens(self) -> None:
        """Return None: a pooling request has no output tokens to bound."""
        return None

    @property
    def reports_logprobs(self) -> bool:
        """Return False: a pooling request has no log probabilities."""
        return False


def generates(tasks: Collection[str]) -> bool:
    """Return whether an engine with these tasks accepts requests for tokens. An engine without tasks accepts only
    those.
    """
    return not tasks or GENERATE in tasks


def check_task(params: PoolingParams, tasks: dict[str, int], num_tokens: int) -> None:
    """Check a request against an engine's tasks.

    tasks: width of the vectors of each task. num_tokens: of the prompt. Errors: InvalidRequestError.
    """
    task = params.task
    if task not in tasks or task == GENERATE:
        able = ", ".join(one for one in tasks if one != GENERATE)
        remedy = f"it does {able}" if able else "start the engine with runner='pooling' for a model that pools"
        raise InvalidRequestError(f"this engine does not do the task {task!r}: {remedy}")
    width = tasks[task]
    if params.dimensions is not None and (not task.endswith("embed") or params.dimensions > width):
        limit = f"from 1 to {width}, the size of this model's embeddings" if task.endswith("embed") else "of embeddings"
        raise InvalidRequestError(f"dimensions={params.dimensions} with task {task!r}: dimensions are {limit}")
    num_vectors = num_tokens if task.startswith("token_") else 1
    if (size := 4 * num_vectors * (params.dimensions or width)) > MAX_POOLED_BYTES:
        raise InvalidRequestError(
            f"task {task!r} of {num_tokens} tokens gives {size} bytes of vectors, but an answer has at most "
            f"{MAX_POOLED_BYTES}: shorten the prompt, or ask for fewer dimensions"
        )


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= int(value) < 2**31:
        raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value!r:.80}")
    return int(value)
