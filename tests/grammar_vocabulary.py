"""A small byte-level vocabulary for tests of structured outputs: every byte, some words, EOS."""

import json
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from core.grammars.grammars import Grammars
from ipc.params.structured_outputs import StructuredOutputsParams

EOS = 256
VOCAB_SIZE = 320  # more than there are tokens, as in models with a padded vocabulary
_WORDS = ("true", "false", "null", '{"', '":', '", "', "name", "age", "00", "  ", "\n\n", "é", "yes", "no")


@lru_cache(1)
def tokenizer_files() -> dict[str, bytes]:
    """The files of a model with this vocabulary; ids 0 to 255 are the bytes in the alphabet's order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary["<eos>"] = EOS
    for word in _WORDS:
        parts = list(split.pre_tokenize_str(word)[0][0])
        while len(parts) > 1:
            left, right = parts[0], parts[1]
            parts[:2] = [left + right]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    assert len(vocabulary) <= VOCAB_SIZE - 10, len(vocabulary)
    return {"tokenizer.json": tokenizer.to_str().encode()}


@lru_cache(1)
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])


def text_of(tokens: list[int]) -> str:
    """The text of an output, without EOS."""
    return tokenizer().decode([token for token in tokens if token != EOS])


def make_grammars(vocab_size: int = VOCAB_SIZE) -> Grammars:
    return Grammars(tokenizer_files, vocab_size, (EOS,))


def structured(**fields: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)  # type: ignore[arg-type]


def schema(**properties: object) -> str:
    """A closed object with these properties, all of them required."""
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return json.dumps(closed)


def allowed(mask: npt.NDArray[np.uint32]) -> list[int]:
    """The token ids of a mask [words]."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(grammars: Grammars, given: StructuredOutputsParams | None, *parts: str | int) -> bool:
    """Whether an output of these parts is whole. Parts: text, or the id of a special token."""
    assert given is not None
    matcher = grammars.matcher(given)
    ids = [[part] if isinstance(part, int) else tokenizer().encode(part).ids for part in parts]
    return all(matcher.consume_tokens(one) for one in ids) and matcher.is_accepting()
