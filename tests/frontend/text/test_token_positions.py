"""TokenPositions against the text of each beginning of the tokens, for vocabularies of bytes and of all other kinds."""

import random

import pytest

from frontend.text.detokenizer import token_stream
from frontend.text.token_positions import TokenPositions
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text.test_detokenizer import demo, kinds  # noqa: F401 - fixtures


@pytest.mark.parametrize("kind", ["demo", "llama", "sentencepiece"])
def test_positions_do_not_depend_on_the_pieces(kinds: dict[str, Tokenizer], kind: str) -> None:  # noqa: F811
    tokenizer, chance = kinds[kind], random.Random(3)
    size = tokenizer.vocab_size
    for case in range(12):
        ids = [chance.randrange(size) for _ in range(chance.choice((1, 5, 63, 64, 65, 200)))]
        stream, lengths, total = token_stream(tokenizer, True, ()), [0], 0
        for token_id in ids:
            total += len(stream.push([token_id]))
            lengths.append(total)
        positions, at, asked = TokenPositions(tokenizer, True, ()), 0, 0
        while at < len(ids):
            piece = ids[at : at + chance.randint(1, 1 + 80 * (case % 2))]
            at += len(piece)
            positions.take(piece)
            assert positions.num_tokens == at
            asked = chance.randint(asked, max(asked, lengths[at]))
            assert positions.tokens_for(asked) == next(k for k, length in enumerate(lengths) if length >= asked)
        assert positions.tokens_for(total + 1) == len(ids)
