"""try_text(): whether a grammar of JSON stands the first tokens of a text, which its first mask does not tell."""

from typing import TYPE_CHECKING

from core.grammars.compilation import why_failed
from ipc.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_STEPS = 48
#: What is written where it may be, the first of these: texts that open and close at once and so reach much of a schema.
_WANTED = ('"', ":", "0", "{", "[", "t", ",", "}", "]", "-", "n")


def try_text(tokenizer: "LLTokenizer", matcher: "LLMatcher") -> None:
    """Write the beginning of a text with a matcher, which is of no more use then.

    A state of the lexer or a row of the parser may be too large only behind some text. Errors: InvalidRequestError.
    """
    wanted = [tokens for one in _WANTED if len(tokens := tokenizer.tokenize_str(one)) == 1]
    for _ in range(_MAX_STEPS):
        if not matcher.is_stopped() and not matcher.is_error():
            mask = matcher.compute_bitmask()
        if matcher.is_error():
            text = f"the grammar of structured_outputs (json) cannot be used: {why_failed(matcher)}"
            raise InvalidRequestError(text.partition("\n")[0])
        if matcher.is_stopped():
            return
        if (forced := matcher.compute_ff_tokens()) and matcher.consume_tokens(forced):
            continue
        token = next((one for (one,) in wanted if mask[one // 8] >> one % 8 & 1), None)
        if token is None:
            token = next(
                (at * 8 + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1), None
            )
        if token is None:
            return
        matcher.consume_token(token)
