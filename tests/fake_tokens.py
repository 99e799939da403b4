"""The oracle of the fake executor: its tokens, one request at a time, in Python's integers."""

_MASK, _GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _term(token: int, position: int) -> int:
    return _mix((token + 1) * _GOLDEN + _mix(position + 1))


def fake_tokens(prompt: list[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return the first `count` tokens that the fake executor answers; seed: choice_seed() of the request and choice."""
    total = sum(_term(token, position) for position, token in enumerate(prompt))
    tokens, mixed_seed = list[int](), _mix(seed)
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(_mix(total + position * _GOLDEN + mixed_seed) % vocab_size)
        total += _term(tokens[-1], position)
    return tokens
