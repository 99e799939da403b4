"""LLM with a folder of KV blocks: a second engine finds what the first one has left there, and no token changes."""

import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine_core import LLM, Pin, SamplingParams
from ipc.errors import ConfigError, EngineStartError
from tests.core.assistants import AssistedModel
from tests.frontend.http.caller import wait_for
from tools.commands.replay.__main__ import EXIT_OTHER_MODEL
from tools.commands.replay.__main__ import main as replay
from tools.lab.bench.tiny_model import write_tiny_model

SIZES: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 256, "block_size": 8}
SIZES |= {"skip_tokenizer_init": True, "num_blocks_override": 34, "num_host_blocks": 40}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPTS = [[number, *range(3, 163)] for number in range(3, 7)]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return str(folder)


def wait_for_stored(llm: LLM, count: int) -> None:
    end = time.monotonic() + 60
    while llm.statistics().num_stored_blocks < count:
        assert time.monotonic() < end, llm.statistics()
        time.sleep(0.01)


def answers(llm: LLM, *, stores: bool = False) -> tuple[list[Any], list[int | None]]:
    """(tokens with the bits of their log probabilities, cached tokens) of the prompts, one after the other."""
    found: tuple[list[Any], list[int | None]] = ([], [])
    for prompt in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS, use_tqdm=False)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        if stores:
            wait_for_stored(llm, 20 * (1 + len(found[0])))
        found[0].append([[(token, one.logprob) for token, one in place.items()] for place in logprobs])
        found[1].append(output.num_cached_tokens)
    return found


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
def test_an_assistant_reads_the_blocks_of_its_model(tmp_path: Path) -> None:
    """They are those of engines without one: it has none of its own."""
    model, assistant = AssistedModel("gemma4-31b").write(tmp_path)
    drafts = {"method": "mtp", "model": assistant, "step_ns": [10**6] * 8, "num_speculative_tokens": 3}
    with LLM(model, **SIZES, kv_window=0, kv_dir=tmp_path / "kv") as llm:
        first = answers(llm, stores=True)
    with LLM(model, **SIZES, speculative_config=drafts, kv_dir=tmp_path / "kv") as llm:
        second = answers(llm)
        assert llm.statistics().num_draft_tokens > 0
    assert second[0] == first[0]
    assert min(one or 0 for one in second[1]) >= 152


def test_blocks_outlive_the_engine_and_damage_is_computed_again(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        first = answers(llm, stores=True)
    assert first[1] == [0] * 4
    capture = tmp_path / "run.cap"
    with LLM(model, **SIZES, kv_dir=folder, capture=str(capture)) as llm:
        second = answers(llm)
        assert llm.statistics().num_fetched_blocks > 0
    assert second[0] == first[0]
    assert second[1][:2] == [160, 160]
    assert replay([str(capture)]) == 0
    assert replay([str(capture), "--mode", "full"]) == EXIT_OTHER_MODEL
    for path in (folder / "blocks").glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        assert answers(llm) == first


def test_a_pinned_prompt_is_kept_in_the_folder_until_its_time(model: str, tmp_path: Path) -> None:
    """The files that a real engine writes for a pin have its time, also those that were written before it."""
    folder, one = tmp_path / "kv", SamplingParams(max_tokens=1, temperature=0)
    prompt, sizes = {"prompt_token_ids": list(range(5, 170))}, {**SIZES, "max_tenant_pinned_share": 0.7}
    sizes |= {"max_pinned_share": 0.7, "kv_dir": folder}
    with LLM(model, **sizes) as llm:
        (output,) = llm.generate(prompt, one, use_tqdm=False, pins=[Pin("s", 3_600_000)])
        assert output.pins[0].num_tokens == 160
        wait_for_stored(llm, 20)
    times = [path.stat().st_mtime - time.time() for path in (folder / "blocks").glob("*.kv")]
    assert len(times) == 20
    assert all(3000 < left <= 3600 for left in times)
    with LLM(model, **sizes) as llm:
        (again,) = llm.generate(prompt, one, use_tqdm=False, pins=[Pin("s", 3_600_000)])
        assert (again.num_cached_tokens, again.pins[0].num_promised) == (160, 0)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        llm.release_pin("s")
        wait_for(lambda: all(path.stat().st_mtime <= time.time() for path in (folder / "blocks").glob("*.kv")))


def test_a_folder_that_cannot_be_used_fails_the_start_with_its_reason(model: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="link or not a folder"):
        LLM(model, **SIZES, kv_dir=tmp_path / "link")
    with pytest.raises(ConfigError, match="does not share its blocks"):
        LLM(executor="fake", num_host_blocks=10, kv_dir=tmp_path / "kv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_host_blocks": 0}, "also give kv_host_bytes"),
        ({"kv_dir": ""}, "path of a folder"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, EngineStartError), match=message):
        LLM(**{**SIZES, "kv_dir": "somewhere", **options})


def test_blocks_of_other_weights_are_not_found_and_those_of_the_same_are(model: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "kv", load_file(f"{model}/model.safetensors")
    other = {name: tensor + tensor.roll(1) for name, tensor in other.items()}
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        first = answers(llm, stores=True)
        llm.update_weights(other.items())
        second = answers(llm)
        assert llm.statistics().num_fetched_blocks == 0
        wait_for_stored(llm, 160)
    assert second[0] != first[0]
    assert second[1] == first[1]
    with LLM(model, **SIZES, kv_dir=folder) as llm:
        llm.update_weights(other.items())
        assert answers(llm)[0] == second[0]
        assert llm.statistics().num_fetched_blocks > 0
