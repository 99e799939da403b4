"""The requests of a check: random prompts, some with a common prefix, greedy and sampled; the same at each call."""

from typing import NamedTuple

import numpy as np

from core.execution.executor import ModelInfo
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest

_LONGEST = 60  # tokens of a prompt
_SHARED = 24  # tokens of the common prefix of half of them
_MOST_OUTPUT = 10


class Plan(NamedTuple):
    """A request of the check."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int

    def message(self, number: int) -> AddRequest:
        """Return the request under this number."""
        return AddRequest(number, np.array(self.prompt, "<i4").tobytes(), self.params, seed=self.seed)


def make_requests(info: ModelInfo, count: int, seed: int = 0) -> list[Plan]:
    """Return `count` requests for a model of at least 80 tokens. Every third asks for log probabilities."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, info.vocab_size, _SHARED).tolist()
    plans = []
    for number in range(count):
        own = rng.integers(0, info.vocab_size, int(rng.integers(1, _LONGEST - _SHARED))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(2, _MOST_OUTPUT + 1)),
            ignore_eos=True,
            temperature=0.8 if number % 2 else 0.0,
            logprobs=2 if number % 3 == 0 else None,
            prompt_logprobs=1 if number % 9 == 0 else None,
            detokenize=False,
        )
        plans.append(Plan(tuple([*shared, *own] if number % 4 > 1 else own), params, int(rng.integers(0, 2**63))))
    return plans
