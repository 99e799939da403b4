"""Usage: the tokens of one reply, counted as they arrive."""

from collections.abc import Sequence

import msgspec

from ipc.records.receipt import Receipt
from ipc.wire.pin_messages import PinAnswer


class Usage(msgspec.Struct):
    """Tokens of all prompts and of all choices.

    cached: prompt tokens whose keys and values were cached. reasoning: completion tokens of reasoning, counted by
    formats that separate it.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    pins: Sequence[PinAnswer] = ()  # to the pins of its prompts
    receipts: Sequence[Receipt] = ()  # of an answer that has ended, if they are asked for
    first_token_time: float = 0.0  # monotonic seconds, of an answer that is not streamed; 0 = unknown

    def pinned(self) -> dict[str, object]:
        """Return what is said of the prompt's pins; empty if it has none.

        pinned_tokens: that are kept. promised_tokens: that earlier pins promised; those that are not among the cached
        ones were lost. pin_refusal: why one was refused.
        """
        if not self.pins:
            return {}
        refusal = next((one.refusal for one in self.pins if one.refusal), None)
        return {
            "pinned_tokens": max(one.num_tokens for one in self.pins),
            "promised_tokens": max(one.num_promised for one in self.pins),
            **({} if refusal is None else {"pin_refusal": refusal}),
        }

    def proof(self) -> dict[str, object]:
        """Return the field `receipts` of an answer that has ended; nothing if it has none."""
        return {"receipts": self.receipts} if self.receipts else {}

    def openai(self) -> dict[str, object]:
        """Return the counts in the form of OpenAI's API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **self.pinned()},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
