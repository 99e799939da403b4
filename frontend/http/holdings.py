"""Holdings: the memory that unfinished answers may take, estimated from their requests."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from frontend.http.errors import HttpError, retry_after
from frontend.text.prompts import Prompt
from ipc.params.sampling_params import SamplingParams

#: Bytes for all unfinished answers. A single one may take more, and then runs alone.
MAX_BYTES = 256 << 20
#: Measured bytes: of a choice with its request; of a token of a prompt; of a position with log probabilities; of each
#: of these as received, and as text.
CHOICE_BYTES, TOKEN_BYTES, _POSITION, _LOGPROB, _SHOWN = 4096, 40, 400, 8, 80
_NUMBER = 28  # of a vector: float32, and as text
#: Tokens counted for an answer without max_tokens.
_USUAL_TOKENS = 4096
#: Most log probabilities of one answer. As text, 500,000 are 40 MB.
MAX_LOGPROBS = 1 << 19


class Holdings:
    """The sum of the memory of one server's unfinished answers."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def check(self, num_bytes: int, own: int = 0) -> None:
        """Check that there is memory for an answer. own: what was taken for it before. Errors: HttpError 503."""
        if self._num_bytes > own and self._num_bytes + num_bytes > MAX_BYTES:
            raise HttpError(503, "unfinished answers take all the memory", headers=retry_after(1000))

    def take(self, num_bytes: int, own: int = 0) -> Callable[[], None]:
        """Take memory for an answer; return a function that gives it back. own, errors: as in check()."""
        self.check(num_bytes, own)
        self._num_bytes += num_bytes

        def give_back() -> None:
            self._num_bytes -= num_bytes

        return give_back


class Held(NamedTuple):
    """What was taken for the images and embeddings of a request's prompts."""

    num_bytes: int
    give_back: Callable[[], None]


def features_bytes(prompts: Iterable[Prompt]) -> int:
    """Return the bytes of all images of these prompts, as squares, and of their embeddings."""
    return sum(len(one.feature.data) for prompt in prompts for one in prompt.features)


def vectors_bytes(num_texts: int, num_tokens: int, num_numbers: int) -> int:
    """Return the memory of the vectors of some texts. num_tokens, num_numbers: of all texts."""
    return num_texts * CHOICE_BYTES + num_tokens * TOKEN_BYTES + num_numbers * _NUMBER


class Cost(NamedTuple):
    """The size of the answer to a request."""

    num_bytes: int = 0
    num_logprobs: int = 0


def cost_of(num_prompt: int, params: SamplingParams, room: int, vocab_size: int, *, is_streamed: bool) -> Cost:
    """Return the size of the answer to a request. num_prompt: tokens. room: tokens that fit after them."""
    num_tokens = params.n * min(room, params.max_tokens or _USUAL_TOKENS)
    total = params.n * CHOICE_BYTES + num_prompt * TOKEN_BYTES
    count = 0
    for asked, positions in ((params.prompt_logprobs, num_prompt), (params.logprobs, num_tokens)):
        if asked is not None:
            each = 1 + (vocab_size if asked < 0 else asked)
            count += positions * each
            total += positions * (_POSITION + each * (_LOGPROB + (0 if is_streamed else _SHOWN)))
    return Cost(total, count)


def sum_of(costs: Iterable[Cost]) -> int:
    """Return the bytes of an answer to several requests. Errors: HttpError 400 for more than MAX_LOGPROBS."""
    num_bytes = num_logprobs = 0
    for cost in costs:
        num_bytes += cost.num_bytes
        num_logprobs += cost.num_logprobs
    if num_logprobs > MAX_LOGPROBS:
        text = f"the answer may have {num_logprobs} log probabilities; at most {MAX_LOGPROBS} are allowed"
        raise HttpError(400, f"{text}: ask for fewer of them, fewer prompts or fewer tokens", param="logprobs")
    return num_bytes
