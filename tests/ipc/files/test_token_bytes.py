"""The bytes of tokens: those that the library's decoder writes, for every kind of vocabulary that is read."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files import gguf_vocabulary
from ipc.files.gguf import parse_gguf_metadata
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import GGUF_HEADER, read_tokenizer_files, resolve_model
from ipc.files.token_bytes import byte_level_bytes, token_bytes_of_gguf, token_bytes_of_json
from tests.grammar_vocabulary import EOS, tokenizer, tokenizer_files


def test_byte_level_json() -> None:
    found = token_bytes_of_json(tokenizer_files()["tokenizer.json"])
    assert found.special == [EOS]
    assert sorted(found.tokens[:256]) == [bytes([byte]) for byte in range(256)]
    for index, token in enumerate(found.tokens):
        if index != EOS:
            assert token.decode(errors="replace") == tokenizer().decode([index])


def test_the_demo_model() -> None:
    metadata = parse_gguf_metadata(read_tokenizer_files(resolve_model(None))[GGUF_HEADER])
    found, tokenizer = token_bytes_of_gguf(metadata), build_gguf_tokenizer(metadata)
    assert found.special == list(range(17))
    texts = tokenizer.decode_batch([[index] for index in range(17, len(found.tokens))], skip_special_tokens=False)
    assert [token.decode(errors="replace") for token in found.tokens[17:]] == texts


SENTENCEPIECE = {"<unk>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁a": 3, "b▁": 4, "é": 5, "<0xzz>": 6, "</s>": 7}
BYTES = [b"<unk>", b"\n", b"\xe2", b" a", b"b ", "é".encode(), b"<0xzz>", b"</s>"]


def test_byte_fallback_json() -> None:
    made = Tokenizer(models.BPE(vocab=SENTENCEPIECE, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    found = token_bytes_of_json(made.to_str().encode())
    assert found.tokens == BYTES
    assert found.special == [7]


def test_sentencepiece_gguf() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(SENTENCEPIECE),
        "tokenizer.ggml.token_type": [2, 6, 6, 1, 1, 1, 1, 3],
    }
    assert token_bytes_of_gguf(metadata) == (BYTES, [0, 7])  # type: ignore[arg-type]


def test_what_is_no_vocabulary_of_bytes_is_refused() -> None:
    wordpiece = json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}})
    with pytest.raises(UnsupportedModelError, match="are not bytes"):
        token_bytes_of_json(wordpiece.encode())
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a tokenizer"):
        token_bytes_of_json(b"[]")
    with pytest.raises(ModelFileError, match=r"the id -1"):
        token_bytes_of_json(b'{"model": {"vocab": {"a": -1}}}')
    with pytest.raises(UnsupportedModelError, match="kind 'bert'"):
        token_bytes_of_gguf({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelFileError, match="tokens is missing"):
        token_bytes_of_gguf({})


@pytest.mark.parametrize(
    ("token", "expected"), [("Ġa", b" a"), ("Ċ", b"\n"), ("<é x>", "<é x>".encode()), ("Ā", b"\0")]
)
def test_byte_level_names(token: str, expected: bytes) -> None:
    assert byte_level_bytes(token) == expected


def test_merges_are_made_of_the_vocabulary_s_own_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies would take 100 bytes a merge, of which large vocabularies have hundreds of thousands."""
    make, seen = models.BPE, list[tuple[str, str]]()

    def watched(vocab: dict[str, int], merges: list[tuple[str, str]], **options: bool) -> models.BPE:
        seen.extend(pair for pair in merges if all(any(part is token for token in vocab) for part in pair))
        return make(vocab=vocab, merges=merges, **options)

    monkeypatch.setattr(gguf_vocabulary.models, "BPE", watched)
    lists = {"tokens": ["hello", "world", "helloworld"], "merges": ["hello world"]}
    build_gguf_tokenizer({"tokenizer.ggml.model": "gpt2", **{f"tokenizer.ggml.{key}": lists[key] for key in lists}})
    assert seen == [("hello", "world")]
