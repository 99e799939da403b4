"""try_text(): checks that a JSON grammar accepts the first tokens of a text, which its first mask does not show."""

from typing import TYPE_CHECKING

from core.grammars.compilation import why_failed
from ipc.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_STEPS = 48
#: What is written, the first of these that is allowed: texts that open and close quickly and so reach much of a schema.
_WANTED = ('"', ":", "0", "{", "[", "t", ",", "}", "]", "-", "n")


def try_text(tokenizer: "LLTokenizer", matcher: "LLMatcher") -> None:
    """Write the start of a text with a matcher, which cannot be used afterwards.

    A lexer state or a parser row may only become too large after some text. Errors: InvalidRequestError.
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
