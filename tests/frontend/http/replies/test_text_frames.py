"""The looked-up JSON of tokens is what msgspec makes of their text, for any tokens, also hostile ones."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.http.replies.answer_format import json_bytes
from frontend.http.replies.text_frames import TokenJson
from frontend.text.detokenizer import Detokenizer
from frontend.text.tokenizer import Tokenizer
from ipc.files.model_files import read_tokenizer_files, resolve_model

VOCABULARY = 49_152
#: Characters that JSON or a reader of event streams treats in a way of their own.
HOSTILE = ('"\\/\b\f\n\r\t\x00\x1f\x7f', "\u0085\u2028\u2029", "data: x\n\n", "\U0001f600\u0301\u200d", "\ud7ff\ue000")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(resolve_model(None)))


def plain(text: str) -> bytes:
    """The JSON of a text, without the quotes."""
    return json_bytes(text)[1:-1]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_tokens_in_any_deltas(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """What is looked up where that may be, and detokenized elsewhere, is the JSON of the text of all tokens."""
    texts = data.draw(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=6)), max_size=4))
    ids = tokenizer.encode("".join(texts).encode(errors="replace").decode(), add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, VOCABULARY + 5), max_size=12))
    skips = data.draw(st.booleans())
    table = TokenJson(tokenizer.token_table(skips))
    reference = Detokenizer(tokenizer, skip_special_tokens=skips)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
    found, at = b"", 0
    while at < len(ids):
        part = ids[at : at + data.draw(st.integers(1, 4))]
        at += len(part)
        text = table.join(part)
        if text is not None and detokenizer.skip(len(part)):
            found += text
        else:
            detokenizer.update(part)
            found += plain(detokenizer.delta())
    detokenizer.finish()
    reference.update(ids)
    reference.finish()
    assert found + plain(detokenizer.delta()) == plain(reference.delta())
    assert detokenizer.num_tokens == len(ids)
    assert not set("\u0085\u2028\u2029\n\r") & set(found.decode())


def test_each_token_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    table, num_whole = TokenJson(tokenizer.token_table(False)), 0
    for token in range(VOCABULARY):
        found, data = table.join([token]), tokenizer.token_table(False)[token]
        assert (found is None) == (
            "\ufffd" in data.decode(errors="replace") and "\ufffd" not in data.decode(errors="ignore")
        )
        if found is not None:
            num_whole += 1
            assert json.loads(b'"%b"' % found) == data.decode()
    assert 0.9 * VOCABULARY < num_whole < VOCABULARY
    assert table.join([VOCABULARY + 9]) == b""
    assert len(table) <= VOCABULARY


def test_no_look_up_beside_stop_strings_or_within_a_character(tokenizer: Tokenizer) -> None:
    assert not Detokenizer(tokenizer, stop=["x"]).skip(1)
    half = tokenizer.encode("\U0001f9d1", add_special_tokens=False)[0]
    assert TokenJson(tokenizer.token_table(True)).join([half]) is None
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.skip(1)
    detokenizer.update([half])
    assert not detokenizer.skip(1)
