"""speculative_config: as a dict or JSON, with vLLM's keys; what is not supported is refused by name."""

from typing import Any

import msgspec
import pytest

from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options
from ipc.options.speculation import SpeculativeConfig, parse_speculative_config


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 6},
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 6}',
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 6, "model": None},
    ],
)
def test_a_dict_or_json(given: Any) -> None:
    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=3, prompt_lookup_max=6)
    assert config_from_options(speculative_config=given).speculative_config == wanted


DRAFTING: dict[str, dict[str, str]] = {"draft_model": {"model": "m"}, "eagle3": {"model": "m"}, "mtp": {}}


def test_defaults() -> None:
    assert parse_speculative_config(None) is None
    got = parse_speculative_config({"method": "ngram"})
    assert got == SpeculativeConfig(method="ngram", num_speculative_tokens=7, prompt_lookup_min=2, prompt_lookup_max=5)
    found = [parse_speculative_config({"method": name, **own}) for name, own in DRAFTING.items()]
    assert [one and one.num_speculative_tokens for one in found] == [4, 4, 1]
    alone = parse_speculative_config({"method": "ngram", "prompt_lookup_max": 3})
    assert alone is not None
    assert (alone.prompt_lookup_min, alone.prompt_lookup_max) == (3, 3)


def test_a_model_without_a_method_is_a_draft_model_or_by_its_name_a_head() -> None:
    assert parse_speculative_config({"model": "org/a"}) == SpeculativeConfig(
        method="draft_model", model="org/a", num_speculative_tokens=4
    )
    found = parse_speculative_config({"model": "org/A-EAGLE3-b", "num_speculative_tokens": 2})
    assert found == SpeculativeConfig(method="eagle3", model="org/A-EAGLE3-b", num_speculative_tokens=2)
    assistant = "google/gemma-4-E4B-it-assistant"
    expected = SpeculativeConfig(method="mtp", model=assistant, num_speculative_tokens=4)
    assert parse_speculative_config({"model": assistant}) == expected
    assert parse_speculative_config({"method": "mtp", "model": assistant}) == expected


def test_keys_that_say_what_holds_anyway_are_accepted() -> None:
    neutral = {
        "draft_tensor_parallel_size": 1,
        "enforce_eager": True,
        "disable_padded_drafter_batch": False,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "rejection_sample_method": "standard",
    }
    assert parse_speculative_config({"model": "m", **neutral}) == parse_speculative_config({"model": "m"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"method": "eagle"},
            "method 'eagle' is not supported: of heads that read the model's hidden states, only EAGLE-3's",
        ),
        ({"method": "ernie_mtp"}, "method 'ernie_mtp' is not supported: these layers are not read here"),
        ({"method": "gemma4_mtp"}, "method 'gemma4_mtp' is not supported: its name here is 'mtp'"),
        ({"method": "glm4_moe_mtp"}, "method 'glm4_moe_mtp' is not supported: its name here is 'mtp'"),
        ({"method": "mimo_mtp"}, "method 'mimo_mtp' is not supported: its name here is 'mtp'"),
        ({"method": "eagle3"}, "method 'eagle3' needs \"model\": the name or path of the model that drafts"),
        ({"method": "custom_class"}, "method 'custom_class' is not supported; this version supports ngram"),
        ({"method": "ngrams"}, "unknown method 'ngrams'"),
        ({}, "needs a method"),
        ({"method": 3}, "needs a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "from 1 to 32; got 2.5"),
        ({"method": "ngram", "num_speculative_tokens": True}, "got True"),
        ({"method": "ngram", "prompt_lookup_max": 17}, "prompt_lookup_m"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "is more than prompt_lookup_max=3"),
        ({"method": "ngram", "disable_by_batch_size": 8}, "a large batch gets none; leave it out"),
        ({"model": "m", "draft_tensor_parallel_size": 2}, "one process computes the whole draft model; leave it out"),
        ({"model": "m", "draft_tensor_parallel_size": True}, "draft_tensor_parallel_size is not supported"),
        ({"model": "m", "revision": "v1"}, "write it after the name: model='org/name@revision'"),
        ({"model": "m", "quantization": "awq"}, "the option quantization applies to both models"),
        ({"method": "ngram", "draft": 8}, "unknown key 'draft'"),
        ({"method": "ngram", "step_ns": [0]}, "step_ns must be"),
        ({"method": "ngram", "step_ns": 5}, "step_ns must be a list"),
        ({"method": "ngram", "alone_ns": [2, 0]}, "alone_ns must be"),
        ({"method": "ngram", "alone_ns": "5"}, "alone_ns must be a list"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 25}, "must be an integer from 1 to 24; got 25"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "must be an integer from 0 to"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "must be a number above 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "2"}, "must be a number above 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.1}, "the cost rule decides; leave it out"),
        ({"method": "draft_model"}, "method 'draft_model' needs \"model\""),
        (
            {"method": "ngram", "model": "m"},
            "model is for methods 'draft_model', 'eagle3', 'mtp'; leave it out of 'ngram'",
        ),
        ({"method": "draft_model", "model": 5}, "model must be a name or a path; got 5"),
        ("{", "must be a dict or a JSON object"),
        ("[]", "must be a dict or a JSON object"),
        (7, "must be a dict or a JSON object"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as raised:
        config_from_options(speculative_config=given)
    assert text in str(raised.value)


def test_suffix_proposes_as_much_as_it_matches() -> None:
    got = parse_speculative_config({"method": "suffix"})
    assert got is not None
    assert got.num_speculative_tokens == 24
    shallow = parse_speculative_config({"method": "suffix", "suffix_decoding_max_tree_depth": 8})
    assert shallow is not None
    assert shallow.num_speculative_tokens == 8


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp", "eagle3"])
def test_a_gpu_has_drafts_of_all_methods(method: str) -> None:
    model = {"model": "some/model"} if method == "eagle3" else {}
    config = config_from_options(speculative_config={"method": method, **model}, device="cuda")
    assert config.speculative_config is not None


def test_it_travels() -> None:
    """As a part of the Start message and of a capture's header."""
    config = config_from_options(
        speculative_config={"method": "ngram", "step_ns": [5, 6], "alone_ns": [8]}, executor="fake"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
