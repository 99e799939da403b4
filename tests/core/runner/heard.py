"""Heard: what an engine's clients are told, put together from its replies."""

from collections.abc import Sequence

import numpy as np

from core.inputs import EngineReply
from frontend.client.received_logprobs import ReceivedLogprobs, logprob_columns_of
from ipc.wire.messages import FinishReason, Outputs


class Heard:
    """What an engine's clients are told, by (request number, choice)."""

    def __init__(self, target: int, num_prompt_tokens: int) -> None:
        """target: number of the request whose log probabilities are kept. num_prompt_tokens: its own."""
        self._target = target
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finish: dict[tuple[int, int], FinishReason] = {}
        self.logprobs: dict[int, ReceivedLogprobs] = {}  # of the target, by choice
        self._num_prompt_tokens = num_prompt_tokens

    def take(self, replies: Sequence[tuple[int, EngineReply]]) -> None:
        for _, reply in replies:
            assert isinstance(reply, Outputs), reply
            numbers = np.frombuffer(reply.numbers, "<u4").tolist()
            choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
            tokens, counts = iter(np.frombuffer(reply.tokens, "<i4").tolist()), np.frombuffer(reply.counts, "<u2")
            for key, count, code in zip(
                zip(numbers, choices, strict=True), counts.tolist(), reply.finish or bytes(len(numbers)), strict=True
            ):
                self.tokens.setdefault(key, []).extend(next(tokens) for _ in range(count))
                if code:
                    self.finish[key] = FinishReason(code)
            if reply.logprobs is not None:
                for number, choice, position, logprobs in logprob_columns_of(reply.logprobs).split():
                    if number == self._target:
                        received = self.logprobs.setdefault(choice, ReceivedLogprobs(self._num_prompt_tokens))
                        received.add(position, logprobs)
