"""The oracle of the fake executor: its tokens, one request at a time."""

import numpy as np

from core.executors.fake import checksum, next_token


def fake_tokens(prompt: list[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return the first `count` tokens that the fake executor answers; seed: choice_seed() of the request and choice."""
    ids = list(prompt)
    for _ in range(count):
        total = np.array([checksum(np.array(ids, np.int64))])
        token = next_token(total, np.array([len(ids)], np.uint64), np.array([seed], np.uint64), vocab_size)
        ids.append(int(token[0]))
    return ids[len(prompt) :]
