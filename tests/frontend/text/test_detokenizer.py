"""Detokenizer against decoding everything at once: byte-level (the demo model's) and every other kind of decoder."""

# ruff: noqa: RUF001 - the texts are meant to be unusual
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from frontend.text import detokenizer as module
from frontend.text.detokenizer import ByteStream, Detokenizer, WindowStream
from frontend.text.tokenizer import Tokenizer
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import read_tokenizer_files, resolve_model
from tests.frontend.text.sentencepiece_vocabulary import sentencepiece_metadata

TEXTS = [
    "Hello, world!  Two  spaces\n\n\ttabs 123 4567",
    "naïve café e\u0301 ﬁ \u00a0\u2003\u200b",
    "你好，世界。日本語のテキスト 한국어 ไทย हिन्दी",
    "שלום مرحبا 👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ \U0001f9d1\U0001f3fb\u200d\U0001f4bb",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n👋<|im_end|>🏽",
    "\ufffd\ufffd a \ufffd",
]
CHUNKS = (1, 2, 7, 10_000)


def _llama() -> Tokenizer:
    """Llama 2's decoder: a leading space stripped, bytes for what is no word; a run of bytes is decoded as a whole."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁Hello", "▁wor", "ld", "!", "é", "▁你", "好", "\ufffd", "a", "b", "\n"]
    hf = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(hf)


def _words(decoder: object) -> Tokenizer:
    words = ["[UNK]", "[CLS]", "hello", "##ing", "wor", "##ld", "▁you", "▁", "a</w>", "b", ".", "n't", "\ufffd"]
    hf = tokenizers.Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    hf.decoder = decoder  # type: ignore[assignment]
    hf.add_special_tokens(["[CLS]"])
    return Tokenizer(hf)


def _byte_level_in_a_sequence() -> Tokenizer:
    """A decoder that leaves unfinished characters as U+FFFD and is not the plain one ByteStream knows."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    hf.decoder = decoders.Sequence([decoders.ByteLevel()])
    return Tokenizer(hf)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))


@pytest.fixture(scope="module")
def kinds(demo: Tokenizer) -> dict[str, Tokenizer]:
    return {
        "demo": demo,
        "llama": _llama(),
        "sentencepiece": Tokenizer(build_gguf_tokenizer(sentencepiece_metadata())),
        "gemma": Tokenizer(build_gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False))),
        "byte level in a sequence": _byte_level_in_a_sequence(),
        "word piece": _words(decoders.WordPiece()),
        "metaspace": _words(decoders.Metaspace()),
        "bpe suffix": _words(decoders.BPEDecoder()),
        "no decoder": _words(None),
    }


KINDS = [
    "demo",
    "llama",
    "sentencepiece",
    "gemma",
    "byte level in a sequence",
    "word piece",
    "metaspace",
    "bpe suffix",
    "no decoder",
]


def _chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def _check_stream(tokenizer: Tokenizer, ids: list[int], size: int, skip: bool) -> None:
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = ""
    for chunk in _chunks(ids, size):
        detokenizer.update(chunk)
        deltas += detokenizer.delta()
        assert detokenizer.text == deltas
        assert expected.startswith(deltas), (deltas, expected, ids)
    detokenizer.finish()
    deltas += detokenizer.delta()
    assert detokenizer.text == deltas == expected, ids
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.stop_string is None


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", CHUNKS)
def test_corpus(demo: Tokenizer, size: int, skip: bool) -> None:
    for text in [*TEXTS, "".join(TEXTS), ""]:
        _check_stream(demo, demo.encode(text), size, skip)


@pytest.mark.parametrize("size", CHUNKS)
@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
def test_corpus_in_words_and_bytes(kinds: dict[str, Tokenizer], kind: str, size: int) -> None:
    for text in [*TEXTS, "".join(TEXTS), " leading", ""]:
        ids = kinds[kind].encode(text)
        _check_stream(kinds[kind], ids, size, skip=True)
        assert kinds[kind].decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("size", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_ids(kinds: dict[str, Tokenizer], kind: str, size: int) -> None:
    """Random ids are invalid UTF-8 in the middle, special tokens within characters, ids that do not exist."""
    tokenizer = kinds[kind]
    rng = random.Random(f"{kind} {size}")
    pieces = [i for i in range(tokenizer.vocab_size) if len(tokenizer.hf.id_to_token(i) or "") in (1, 6)]
    for _ in range(120):
        length = rng.choice((3, 10, 40))
        ids = [
            rng.choice(pieces) if rng.random() < 0.7 else rng.randrange(tokenizer.vocab_size + 2) for _ in range(length)
        ]
        _check_stream(tokenizer, ids, size, skip=rng.random() < 0.5)


def test_a_character_is_shown_when_its_last_byte_arrives(demo: Tokenizer) -> None:
    ids = demo.encode("a👋🏽b")
    detokenizer = Detokenizer(demo)
    shown = []
    for token_id in ids:
        detokenizer.update([token_id])
        shown.append(detokenizer.text)
    assert {"a", "a👋", "a👋🏽", "a👋🏽b"} == set(shown)
    assert len(ids) > len(set(shown))


def test_unfinished_character_becomes_a_replacement_only_at_the_end(demo: Tokenizer) -> None:
    ids = demo.encode("a👋")[:-1]
    detokenizer = Detokenizer(demo)
    detokenizer.update(ids)
    assert detokenizer.text == "a"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == demo.decode(ids) == "a\ufffd"
    assert detokenizer.delta() == "a\ufffd"


def test_numpy_columns_are_taken(demo: Tokenizer) -> None:
    detokenizer = Detokenizer(demo, stop=["zz"])
    detokenizer.update(np.array(demo.encode(TEXTS[2]), np.int32))
    detokenizer.update(np.empty(0, np.int32))
    detokenizer.finish()
    assert detokenizer.text == TEXTS[2]


# --- stop strings -------------------------------------------------------------------------------------------------


def _reference(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], *, include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """Decode everything, find the occurrence that is complete first (then: begins first) after the exempt text."""
    text = tokenizer.decode(ids)
    stream = ByteStream(tokenizer.token_table(True))
    exempt = len(stream.push(ids[:min_tokens]))
    found = [
        (start + len(string), start, string)
        for string in stop
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > exempt and len(ids) > min_tokens
    ]
    if not found:
        return text, None
    end, start, string = min(found)
    return text[: end if include else start], string


def _tokens_to(tokenizer: Tokenizer, ids: list[int], stop: str, min_tokens: int) -> int:
    """The first token count after which a detokenizer fed token by token has the stop string."""
    detokenizer = Detokenizer(tokenizer, stop=[stop], min_tokens=min_tokens)
    for token_id in ids:
        detokenizer.update([token_id])
    return detokenizer.num_tokens


STOP_CASES: list[tuple[str, list[str]]] = [
    ("Hello world, this is it.\n\nNext", ["\n\n"]),
    ("Hello world, this is it.\n\nNext", ["it", "\n"]),
    ("Hello wonderful world", ["derful wor", "ful", "wonderful world!"]),
    ("xxab", ["b", "ab", "xab"]),
    ("aaaaaaaaab", ["aaab"]),
    ("abcabcabd", ["abcabd", "zz"]),
    ("你好世界👋🏽 done", ["界👋"]),
    ("no stop here", ["###", "stop!"]),
    ("Hello", ["H"]),
    ("a\ufffdb", ["\ufffd"]),
]


@pytest.mark.parametrize("min_tokens", [0, 2, 5])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", CHUNKS)
def test_stop_strings(demo: Tokenizer, size: int, include: bool, min_tokens: int) -> None:
    for text, stop in STOP_CASES:
        for ids in (demo.encode(text), [demo.encode(character)[0] for character in text]):
            expected, string = _reference(demo, ids, stop, include=include, min_tokens=min_tokens)
            _check_stop(demo, ids, size, stop, include, min_tokens, expected, string)


def _check_stop(
    tokenizer: Tokenizer,
    ids: list[int],
    size: int,
    stop: list[str],
    include: bool,
    min_tokens: int,
    expected: str,
    string: str | None,
) -> None:
    detokenizer = Detokenizer(tokenizer, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    deltas = ""
    for chunk in _chunks(ids, size):
        detokenizer.update(chunk)
        deltas += detokenizer.delta()
        assert expected.startswith(deltas), "part of a stop string was shown"
    before_end = detokenizer.stop_string
    detokenizer.finish()
    deltas += detokenizer.delta()
    assert (detokenizer.text, detokenizer.stop_string) == (expected, string), (ids, stop, size)
    assert deltas == expected
    if before_end is not None:
        assert detokenizer.num_tokens == _tokens_to(tokenizer, ids, before_end, min_tokens)
    else:
        assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("size", CHUNKS)
def test_stop_strings_in_random_tokens(demo: Tokenizer, size: int) -> None:
    rng = random.Random(size)
    letters = demo.encode("a b c")[::2] + [demo.encode(word)[0] for word in ("ab", "ba", "aa", " a", "é", "👋")]
    letters += demo.encode("👋")
    for _ in range(150):
        ids = [rng.choice(letters) for _ in range(rng.randrange(1, 30))]
        stop = ["".join(rng.choice("aab ") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        include, min_tokens = rng.random() < 0.5, rng.choice((0, 0, 3, 12))
        expected, string = _reference(demo, ids, stop, include=include, min_tokens=min_tokens)
        _check_stop(demo, ids, size, stop, include, min_tokens, expected, string)


def test_stop_string_out_of_byte_tokens() -> None:
    llama = _llama()
    ids = [llama.hf.token_to_id(word) or 0 for word in ("▁Hello", "<0x61>", "<0x62>", "<0x0A>", "▁wor", "ld")]
    for size in CHUNKS:
        detokenizer = Detokenizer(llama, stop=["ab"])
        for chunk in _chunks(ids, size):
            detokenizer.update(chunk)
        assert (detokenizer.text, detokenizer.stop_string) == ("Hello", "ab")
        assert detokenizer.num_tokens == 5, "the run of bytes is settled by the first other token"


def test_stop_string_completed_by_the_end(demo: Tokenizer) -> None:
    ids = demo.encode("a👋")[:-1]
    detokenizer = Detokenizer(demo, stop=["\ufffd"])
    detokenizer.update(ids)
    assert detokenizer.stop_string is None
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_string, detokenizer.num_tokens) == ("a", "\ufffd", len(ids))

    exempt = Detokenizer(demo, stop=["\ufffd"], min_tokens=len(ids))
    exempt.update(ids)
    exempt.finish()
    assert (exempt.text, exempt.stop_string) == ("a\ufffd", None)


def test_held_back_text_is_shown_at_the_end_and_tokens_after_a_stop_are_ignored(demo: Tokenizer) -> None:
    detokenizer = Detokenizer(demo, stop=["world!"])
    detokenizer.update(demo.encode("Hello world"))
    assert detokenizer.text == "Hello "
    assert detokenizer.delta() == "Hello "
    detokenizer.finish()
    assert detokenizer.delta() == "world"
    assert detokenizer.text == "Hello world"

    stopped = Detokenizer(demo, stop=["lo"])
    stopped.update(demo.encode("Hello"))
    stopped.update(demo.encode(" more"))
    stopped.finish()
    assert (stopped.text, stopped.num_tokens) == ("Hel", len(demo.encode("Hello")))


def test_update_after_finish_is_a_bug(demo: Tokenizer) -> None:
    detokenizer = Detokenizer(demo)
    detokenizer.finish()
    with pytest.raises(AssertionError, match="0 tokens taken"):
        detokenizer.update([5])


# --- cost ---------------------------------------------------------------------------------------------------------

NUM_TOKENS = 20_000


def _garbage(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text never gets past U+FFFD: continuation bytes."""
    token = tokenizer.hf.token_to_id("<0x80>") if tokenizer.has_byte_fallback else tokenizer.hf.token_to_id("Ģ")
    assert token is not None
    return [token] * NUM_TOKENS


@pytest.mark.parametrize("text", ["words", "garbage"])
def test_byte_stream_handles_every_byte_once(demo: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = module.codecs.utf_8_decode

    def counting(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        sizes.append(len(data))
        return decode(data, errors, final)

    monkeypatch.setattr(module.codecs, "utf_8_decode", counting)
    ids = (demo.encode("Hello wonderful 世界 ") * NUM_TOKENS)[:NUM_TOKENS] if text == "words" else _garbage(demo)
    detokenizer = Detokenizer(demo, stop=["never seen"])
    shown = 0
    for token_id in ids:
        detokenizer.update([token_id])
        shown += len(detokenizer.delta())
    detokenizer.finish()
    assert shown + len(detokenizer.delta()) == len(demo.decode(ids))
    assert len(sizes) == NUM_TOKENS
    assert sum(sizes) <= len(demo.decode(ids).encode()) + 3 * NUM_TOKENS


@pytest.mark.parametrize("kind", ["llama", "byte level in a sequence", "metaspace"])
@pytest.mark.parametrize("text", ["words", "garbage"])
def test_window_stream_decodes_a_bounded_number_of_tokens_each_time(
    kinds: dict[str, Tokenizer], kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = kinds[kind]
    decoded: list[int] = []
    decode = WindowStream._decode

    def counting(self: WindowStream, ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(WindowStream, "_decode", counting)
    if text == "garbage" and kind == "metaspace":
        ids = [tokenizer.vocab_size - 1] * NUM_TOKENS
        assert tokenizer.hf.id_to_token(ids[0]) == "\ufffd"
    elif text == "garbage":
        ids = _garbage(tokenizer)
    else:
        ids = [tokenizer.vocab_size - 3] * NUM_TOKENS
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids:
        detokenizer.update([token_id])
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)
    assert sum(decoded) <= 16 * NUM_TOKENS


def test_text_is_kept_in_pieces(demo: Tokenizer) -> None:
    """A delta costs what is new: the pieces shown so far are not touched by an update."""
    detokenizer = Detokenizer(demo)
    for _ in range(1000):
        detokenizer.update(demo.encode("word "))
    assert max(map(len, detokenizer._shown)) <= 5
    assert detokenizer.delta() == detokenizer.text == "word " * 1000
    assert detokenizer.delta() == ""
