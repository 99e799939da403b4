"""ThoughtTokens: how many tokens of one choice are reasoning, including its marks.

The number depends on the tokens alone, not on how they were grouped into pieces of a stream.
"""

from collections.abc import Sequence

from frontend.calls.scanner import Scanner
from frontend.http.replies.usage import Usage
from frontend.session import PreparedRequest
from frontend.text.prompt_context import prompt_context
from frontend.text.token_positions import TokenPositions
from frontend.text.tokenizer import Tokenizer


class ThoughtTokens:
    """See the module's docstring. scanner: reads the text of the same tokens and reports the position of reasoning."""

    def __init__(self, scanner: Scanner, positions: TokenPositions) -> None:
        self._thoughts = scanner.thoughts
        self._positions = positions
        self._num_closed = self._num_counted = 0  # thoughts that have ended, and their tokens

    def take(self, token_ids: Sequence[int]) -> None:
        """Take further tokens."""
        self._positions.take(token_ids)

    def count(self) -> int:
        """Return the number of tokens of reasoning so far.

        An unfinished thought includes all tokens since its start.
        """
        place = self._positions
        for thought in self._thoughts[self._num_closed :]:
            begin = place.tokens_for(thought.begin)
            if thought.end is None:
                return self._num_counted + place.num_tokens - begin
            self._num_counted += place.tokens_for(thought.end) - begin
            self._num_closed += 1
        return self._num_counted


def note_thoughts(counters: Sequence[ThoughtTokens], usage: Usage) -> None:
    """Add the tokens of reasoning of all choices so far to the usage."""
    usage.reasoning_tokens = sum(one.count() for one in counters)


def thought_tokens(request: PreparedRequest, scanners: Sequence[Scanner], tokenizer: Tokenizer) -> list[ThoughtTokens]:
    """Return the counter of each choice."""
    skips = request.params.skip_special_tokens
    context = prompt_context(tokenizer, request.prompt.token_ids, skips)
    return [ThoughtTokens(one, TokenPositions(tokenizer, skips, context)) for one in scanners]
