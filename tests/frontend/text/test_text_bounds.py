"""TextBound: no text has fewer tokens than it says."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from frontend.text import tokenizer as tokenizer_module
from frontend.text.prompts import read_prompts
from frontend.text.text_bounds import text_bound
from frontend.text.tokenizer import Tokenizer
from ipc.errors import PromptTooLongError
from ipc.files.model_files import read_tokenizer_files, resolve_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))


def byte_level(*merged: str, missing: str = "") -> tokenizers.Tokenizer:
    names = [name for name in ALPHABET if name not in missing] + list(merged)
    merges = [(name[:-1], name[-1]) for name in merged]
    hf = tokenizers.Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return hf


def random_text(draw: random.Random) -> str:
    piece = draw.choice([" ", "#", "\n" + " " * 80, "aé", "\x04", "\N{GRINNING FACE}", "12", "<|im_end|>", "word "])
    return piece * draw.randrange(1, 200)


@pytest.mark.parametrize("seed", range(40))
def test_no_text_has_fewer(demo: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(random_text(draw) for _ in range(draw.randrange(1, 6)))
    assert demo.bound.fewest_tokens(text) <= len(demo.encode(text, add_special_tokens=False))


def test_the_demo_models(demo: Tokenizer) -> None:
    assert demo.bound.longest == 81
    assert demo.bound.fewest_tokens("#" * 8100) == 100
    assert demo.bound.fewest_tokens("\x04" * 8100) == 0  # a byte that its vocabulary does not have: no token
    assert demo.encode("\x04" * 8100, add_special_tokens=False) == []


def test_a_text_that_cannot_fit_is_not_read(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(texts: object, special: bool = True) -> list[list[int]]:
        raise AssertionError("the text was read")

    limits = {"vocab_size": 49152, "max_model_len": 100}
    monkeypatch.setattr(demo, "encode_batch", read)
    with pytest.raises(PromptTooLongError, match="101 tokens or more; at most 99 fit: the maximum"):
        read_prompts(["#" * 8101], demo, **limits)
    with pytest.raises(AssertionError, match="was read"):  # these may fit
        read_prompts(["#" * 8019], demo, **limits)
    with pytest.raises(AssertionError, match="was read"):  # this one is cut
        read_prompts(["#" * 8101], demo, truncation=[5], **limits)


def test_steps_that_lose_text_have_no_bound() -> None:
    hf = byte_level("aa", "aaa")
    assert text_bound(hf) == (3, b"")
    assert text_bound(byte_level("aa", missing="b")) == (2, b"b")
    hf.normalizer = normalizers.NFC()
    assert text_bound(hf).longest == 9
    for normalizer in (normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("  ", " ")):
        hf.normalizer = normalizers.Sequence([normalizers.NFC(), normalizer])
        assert text_bound(hf).longest == 0
    hf.normalizer = normalizers.Replace(" ", "__")
    assert text_bound(hf).longest == 3
    hf.add_tokens([AddedToken("<long token>")])
    assert text_bound(hf).longest == len("<long token>")
    hf.add_tokens([AddedToken("<eats>", rstrip=True)])
    assert text_bound(hf).longest == 0
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert text_bound(words).longest == 0
    pieces = byte_level("aa")
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert text_bound(pieces).longest == 0


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_many_calls_have_the_ids_of_one(demo: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    texts = ["".join(random_text(draw) for _ in range(draw.randrange(3))) for _ in range(20)]
    wanted = [demo.hf.encode(text).ids for text in texts]
    monkeypatch.setattr(tokenizer_module, "_CALL_CHARS", 300)
    assert demo.encode_batch(texts) == wanted
    assert [demo.encode(text) for text in texts] == wanted
    ids = [token for one in wanted for token in one]
    monkeypatch.setattr(tokenizer_module, "_MANY_IDS", 5)
    assert demo.decode(ids) == demo.hf.decode(ids, skip_special_tokens=False)
