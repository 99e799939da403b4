"""Usage: the tokens of one reply, counted as they arrive."""

import msgspec


class Usage(msgspec.Struct):
    """Tokens of all prompts and of all choices.

    cached: prompt tokens whose keys and values were cached. reasoning: completion tokens of reasoning, counted by
    formats that separate it.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_time: float = 0.0  # monotonic seconds, of an answer that is not streamed; 0 = unknown

    def openai(self) -> dict[str, object]:
        """Return the counts in the form of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
