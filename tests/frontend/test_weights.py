"""LLM.update_weights(): a running model with other weights is the model that starts with them, bit for bit; nothing
computed with the earlier ones is used again, and every token says which weights it comes from.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from core.executors.local import LocalExecutor
from core.model_files import loading
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from frontend.llm import LLM
from frontend.results.outputs import RequestOutput
from ipc.errors import CallFailedError, EngineDeadError, InvalidRequestError, ModelFileError
from ipc.params.sampling_params import SamplingParams
from ipc.tables.arrays import Floats
from ipc.wire.messages import FinishReason, PauseMode
from kernels.cpu.library import CpuLibrary
from tests.captures import error, replay
from tests.core.draft_heads import LLAMA, MIMO, model_shapes, random_weights, write
from tests.resolved import resolved_config
from tools.cli import main

MODEL = {**LLAMA, "num_hidden_layers": 2}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 256,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
PROMPT = list(range(10, 50))
LENGTH = 60
_ATTEMPTS = 20
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=LENGTH, ignore_eos=True, logprobs=1)


class Site(NamedTuple):
    """An engine, the folders of three versions of its weights, and what a fresh engine answers with each."""

    llm: LLM
    folders: list[Path]
    answers: list[RequestOutput]
    capture: Path

    def weights(self, which: int) -> dict[str, Floats]:
        return random_weights(model_shapes(MODEL), which)

    def use(self, which: int, **options: Any) -> int:
        return self.llm.update_weights(self.folders[which], **options).version


def answer(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]


def bits(output: RequestOutput) -> list[Any]:
    """Return the tokens, and the log probabilities of all entries."""
    (one,) = output.outputs
    assert one.logprobs is not None
    return [one.token_ids, [[(token, entry.logprob) for token, entry in each.items()] for each in one.logprobs]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("weights")
    folders = [folder / str(which) for which in range(3)]
    answers = []
    for which, one in enumerate(folders):
        write(one, MODEL, random_weights(model_shapes(MODEL), which))
        with LLM(str(one), **OPTIONS) as llm:
            answers.append(answer(llm))
    capture = folder / "run.cap"
    with LLM(str(folders[0]), **OPTIONS, capture=str(capture)) as llm:
        assert bits(answer(llm)) == bits(answers[0])
        yield Site(llm, folders, answers, capture)


def test_arrays_make_the_model_that_starts_with_them(site: Site) -> None:
    before = site.llm.client.weights().mark
    arrays = [(name, torch.from_numpy(numbers)) for name, numbers in site.weights(1).items()]
    mark = site.llm.update_weights(arrays)
    assert mark.version == before.version + 1
    assert mark.weights != before.weights
    assert mark.fingerprint != before.fingerprint
    assert mark.variant == before.variant
    first, second = answer(site.llm), answer(site.llm)
    assert bits(first) == bits(second) == bits(site.answers[1]) != bits(site.answers[0])
    assert first.outputs[0].weights_versions == ((0, mark.version),)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
    assert site.llm.statistics().weights_version == site.llm.client.weights_version == mark.version
    site.use(2)
    assert bits(answer(site.llm)) == bits(site.answers[2])
    assert site.use(1) == mark.version + 2
    assert site.llm.client.weights().mark.fingerprint == mark.fingerprint, (
        "the same numbers from a file and from arrays"
    )


def changed(weights: dict[str, Floats], name: str, numbers: Any) -> list[tuple[str, Any]]:
    return list({**weights, name: numbers}.items())


NORM, HEAD = "model.norm.weight", "lm_head.weight"


def test_weights_that_do_not_fit_change_nothing(site: Site) -> None:
    version = site.use(1)
    whole = site.weights(0)
    nan, infinite = whole[HEAD].copy(), whole[NORM].copy()
    nan[3, 5], infinite[-1] = np.nan, np.inf
    refused: list[tuple[list[tuple[str, Any]], type[Exception], str]] = [
        ([pair for pair in whole.items() if pair[0] != NORM], CallFailedError, f"tensor {NORM} is missing"),
        (changed(whole, "model.other.weight", whole[NORM]), CallFailedError, "unexpected tensor 'model.other.weight'"),
        (changed(whole, HEAD, whole[HEAD][:-1]), CallFailedError, r"lm_head.weight has shape \(299, 64\)"),
        (changed(whole, HEAD, nan), CallFailedError, f"tensor {HEAD} has numbers that are NaN or infinite"),
        (changed(whole, NORM, infinite), CallFailedError, f"tensor {NORM} has numbers that are NaN or infinite"),
        ([*whole.items(), (NORM, whole[NORM])], ModelFileError, "'model.norm.weight' is given twice"),
        (changed(whole, NORM, whole[NORM].astype(np.float64)), ModelFileError, "has type float64"),
        ([], ModelFileError, "no weights are given"),
    ]
    for weights, kind, text in refused:
        with pytest.raises(kind, match=text):
            site.llm.update_weights(weights)
    with pytest.raises(CallFailedError, match="cannot be read"):
        site.llm.update_weights("/nowhere.safetensors")
    with pytest.raises(InvalidRequestError, match="mode must be one of wait, keep, abort; got 'now'"):
        site.llm.update_weights(site.folders[0], mode="now")  # type: ignore[arg-type]
    assert site.llm.client.weights().mark.version == version
    assert bits(answer(site.llm)) == bits(site.answers[1])


def begin(site: Site, count: int) -> int:
    """Submit a request, pause the engine once it has this many tokens, and return its number.

    If this process was away for so long that the request finished before the pause, another one is submitted.
    """
    client = site.llm.client
    for _ in range(_ATTEMPTS):
        number = client.submit(PROMPT, PARAMS, seed=5, streaming=True)
        while len(client.read(number).token_ids) < count:
            client.wait(np.array([number]), 10)
        client.pause(PauseMode.ALL)
        if not client.read(number).finish:
            return number
        client.resume()
    raise AssertionError("each request finished before the pause")


def test_requests_that_are_kept_continue_with_the_new_weights_and_say_from_where(site: Site) -> None:
    client, old = site.llm.client, site.use(1)
    number = begin(site, 3)
    new = site.use(2, mode="keep")
    client.resume()
    while not client.read(number).finish:
        client.wait(np.array([number]), 10)
    got = client.read(number)
    client.discard([number])
    ((begin_old, version_old), (place, version_new)) = got.weights_versions
    assert (begin_old, version_old, version_new) == (0, old, new)
    assert 3 <= place < LENGTH
    tokens = got.token_ids.tolist()
    assert tokens[:place] == site.answers[1].outputs[0].token_ids[:place]
    # the rest is drawn from the new weights' logits of the whole sequence, of which none is left over
    given = PARAMS.changed(prompt_logprobs=0, max_tokens=1, logprobs=None)
    whole = answer(site.llm, PROMPT + tokens, given)
    assert whole.prompt_logprobs is not None
    forced = [
        entry[token].logprob
        for entry, token in zip(whole.prompt_logprobs[-len(tokens) :], tokens, strict=True)
        if entry
    ]
    assert got.logprobs is not None
    reported = [float(entry.values[0]) for entry in got.logprobs.output]
    assert forced[place:] == reported[place:]
    assert forced[:place] != reported[:place]


def test_requests_that_are_waited_for_end_with_the_old_weights(site: Site) -> None:
    old = site.use(1)
    number = begin(site, 3)
    done: list[int] = []
    update = threading.Thread(target=lambda: done.append(site.use(2)))
    update.start()
    client = site.llm.client
    while not client.weights().is_waiting:
        pass
    later = client.submit(PROMPT, PARAMS, seed=5)
    with pytest.raises(CallFailedError, match="another update of the weights has not finished"):
        site.use(0)
    assert not done
    client.resume()
    update.join(30)
    assert done == [old + 1]
    for one, version in ((number, old), (later, old + 1)):
        while not (got := site.llm.client.read(one)).finish:
            site.llm.client.wait(np.array([one]), 10)
        assert got.weights_versions == ((0, version),)
        assert got.token_ids.tolist() == site.answers[1 if version == old else 2].outputs[0].token_ids
        site.llm.client.discard([one])


def test_requests_can_be_aborted(site: Site) -> None:
    number = begin(site, 3)
    version = site.use(1, mode="abort")
    site.llm.client.resume()
    got = site.llm.client.read(number)
    assert got.finish is FinishReason.ABORT
    assert version not in [which for _, which in got.weights_versions]
    site.llm.client.discard([number])
    assert bits(answer(site.llm)) == bits(site.answers[1])


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_its_requests_continue(site: Site, level: int) -> None:
    site.use(1)
    number, client = begin(site, 3), site.llm.client
    site.llm.sleep(level)
    client.resume()
    assert site.llm.is_sleeping()
    assert len(client.read(number).token_ids) < LENGTH
    if level == 2:
        with pytest.raises(CallFailedError, match="sleeps without weights: give it weights first"):
            site.llm.wake_up()
        site.llm.wake_up(["weights"])
        site.use(1)
    site.llm.wake_up(["kv_cache"])
    assert not site.llm.is_sleeping()
    while not (got := client.read(number)).finish:
        client.wait(np.array([number]), 10)
    assert got.token_ids.tolist() == site.answers[1].outputs[0].token_ids, "the same weights, so the same tokens"
    client.discard([number])
    assert bits(answer(site.llm)) == bits(site.answers[1])
    with pytest.raises(CallFailedError, match="level must be 1"):
        site.llm.sleep(3)


INT8 = {**OPTIONS, "dtype": "bfloat16", "quantization": "int8"}
MTP = {**OPTIONS, "reserve_weights": True, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(("settings", "options"), [(MODEL, INT8), (MIMO, MTP)], ids=["int8", "draft head"])
def test_packed_matrices_and_draft_heads_follow(
    settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    old, new = (random_weights(model_shapes(settings), which) for which in (3, 4))
    with LLM(write(tmp_path / "new", settings, new), **options) as llm:
        wanted = answer(llm)
    with LLM(write(tmp_path / "old", settings, old), **options) as llm:
        assert bits(answer(llm)) != bits(wanted)
        llm.update_weights(new.items())
        assert bits(answer(llm)) == bits(wanted)
        llm.sleep(2)
        llm.update_weights(old.items())
        llm.wake_up()
        assert bits(answer(llm)) != bits(wanted)


def test_the_weights_of_the_start_come_back_after_a_sleep_without_them(site: Site) -> None:
    with LLM(str(site.folders[0]), **OPTIONS) as llm:
        before = llm.client.weights().mark
        llm.sleep(2)
        llm.wake_up()
        after = llm.client.weights().mark
        assert (after.version, after.fingerprint, after.weights) == (1, before.fingerprint, before.weights)
        assert bits(answer(llm)) == bits(site.answers[0])


def test_an_engine_that_died_does_not_continue_with_the_weights_of_its_start(site: Site) -> None:
    with LLM(str(site.folders[0]), **OPTIONS) as llm:
        llm.update_weights(site.folders[1])
        os.kill(llm.client.welcome.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="it has weights of version 0, and the last one had 1"):
            answer(llm)


def test_an_executor_without_weights_refuses() -> None:
    with LLM(executor="fake", skip_tokenizer_init=True) as llm:
        with pytest.raises(CallFailedError, match="this engine's executor cannot change its weights"):
            llm.update_weights("/data/step-3")
        with pytest.raises(CallFailedError, match="cannot free its memory"):
            llm.sleep()


def test_a_receipt_names_the_weights_of_its_answer(site: Site) -> None:
    site.use(1)
    first = answer(site.llm)
    mark = site.llm.client.weights().mark
    site.use(2)
    header = site.llm.receipt(first).header
    assert (header.weights, header.fingerprint) == (mark.weights, mark.fingerprint)
    first.outputs[0].weights_versions += ((9, mark.version + 1),)
    with pytest.raises(InvalidRequestError, match="the weights changed while it was computed"):
        site.llm.receipt(first)


def test_a_capture_replays_with_its_weights_and_is_refused_without(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.llm.close()  # the last test: the file is complete
    assert replay(capfd, site.capture)[0] == 0
    redacted = site.capture.with_name("redacted.cap")
    assert main(["replay", "redact", str(site.capture), str(redacted)]) == 0
    assert replay(capfd, redacted)[0] == 0
    status, text = error(capfd, site.capture, "--mode", "full")
    assert status == 5
    assert "the capture changes the weights to version 1" in text
    files = [str(folder) for folder in site.folders]
    status, report = replay(capfd, site.capture, "--mode", "full", "--weights", *files)
    assert (status, report["run"]["difference"]) == (0, None)


def test_steps_leave_a_core_to_an_update(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has one thread less while tensors are read, and the one after the update has all again."""
    options = {"executor": "local", "dtype": "float32", "threads": 2, "max_num_seqs": 2, "block_size": 8}
    config = resolved_config(16, 64, model=str(site.folders[0]), **options)
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    library, seen = cast(CpuLibrary, cast(Llama, executor.runner.model).library), list[int]()

    def step() -> None:
        library.wake_threads()
        seen.append(library.function("pool_num_threads", result=ctypes.c_int)())

    def next_to_a_step(*given: Any) -> Iterator[Any]:
        for number, tensor in enumerate(load_weights(*given)):
            if number == 1:
                thread = threading.Thread(target=step)
                thread.start()
                thread.join()
            yield tensor

    kept = list[bool]()
    monkeypatch.setattr(loading, "load_weights", next_to_a_step)
    monkeypatch.setattr(library.memory, "keep", kept.append)
    step()
    executor.prepare_weights(str(site.folders[1]), 1)
    step()
    library.stop_threads()
    assert seen == [2, 1, 2]
    assert kept == [True], "the memory of the weights that these replace is for the next ones"
