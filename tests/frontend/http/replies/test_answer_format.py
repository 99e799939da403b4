"""JSON of long values: equal to that of short ones, and never encoded in one long piece."""

import json

import pytest

from frontend.http.openai.logprobs import chat_logprobs
from frontend.http.replies import answer_format
from frontend.http.replies.answer_format import json_bytes, raw_list
from frontend.results.outputs import Logprob

LISTS = ([], [1], list(range(1000)), [{"text": "a\u2028b\x85"}] * 300, ["\0"], [None, [], {}])


@pytest.mark.parametrize("values", LISTS)
@pytest.mark.parametrize("text", ["", "plain", "\u2028\u2029\x85", "\0", "\ud800", '"[]"'])
def test_a_list_in_parts_is_the_list(values: list[object], text: str) -> None:
    whole = json_bytes({text: 1, "a": values, "b": [{"c": values}, text], "d": values})
    shown = [raw_list(iter(values)) for _ in range(3)]
    data = json_bytes({text: 1, "a": shown[0], "b": [{"c": shown[1]}, text], "d": shown[2]})
    assert json.loads(data) == json.loads(whole)
    assert len(data.decode().splitlines()) == 1


def test_what_is_no_json_is_named() -> None:
    for value in ({"a": object()}, {"a": raw_list([1]), "b": object()}):
        with pytest.raises((TypeError, AssertionError), match="object"):
            json_bytes(value)


def test_a_long_list_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder holds Python's lock for as long as it works: 40 ms for 50 MB, in which no stream goes on."""
    sizes, encode = list[int](), answer_format._encode

    def counted(value: object) -> bytes:
        data = encode(value)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(answer_format, "_encode", counted)
    lists = [raw_list({"text": "x" * 100} for _ in range(5000)) for _ in range(4)]
    data = json_bytes({"choices": [{"logprobs": one} for one in lists]})
    assert len(data) > 2_000_000
    assert max(sizes) < 40_000


@pytest.mark.parametrize(("num_top", "shown"), [(0, []), (1, [7]), (2, [7, 5]), (-1, [7, 5, 6])])
def test_as_many_top_log_probabilities_as_are_asked_for(num_top: int, shown: list[int]) -> None:
    """-1 = all of them, the token's own included."""
    likely = {5: Logprob(-2.0, 2, "b"), 6: Logprob(-3.0, 3, "c"), 7: Logprob(-0.5, 1, "a")}
    found = json.loads(json_bytes(chat_logprobs([5], [likely], None, num_top, as_ids=True)))
    (entry,) = found["content"]
    assert entry["token"] == "token_id:5"
    assert [one["token"] for one in entry["top_logprobs"]] == [f"token_id:{token}" for token in shown]
