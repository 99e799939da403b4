"""LLM: against a played engine in process, and with engine processes running the fake executor."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import engine_core
from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelFileError,
    RequestFailedError,
)
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, RequestFailed
from tests.fake_tokens import fake_tokens
from tests.frontend.conftest import VOCAB_SIZE, greedy, ids_of
from tests.placed import PREFIX

ROOT = Path(engine_core.__file__).parents[1]


def assert_idle(llm):
    deadline = time.monotonic() + 5.0
    while (counts := llm.statistics()).num_running + counts.num_waiting:
        assert time.monotonic() < deadline, counts
        time.sleep(0.01)


# --- with an engine process -------------------------------------------------------------------------------------


def test_as_a_script_for_vllm_would(capsys):
    llm = engine_core.LLM(model=None, executor="fake", dtype="float32", max_model_len=512, enforce_eager=True)
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]
    outputs = llm.generate(prompts, engine_core.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for index, output in enumerate(outputs):
        assert output.prompt_token_ids == prompts[index]["prompt_token_ids"]
        assert len(output.outputs[0].token_ids) == 8
        assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "length", "")
        assert output.metrics.ttft > 0
    llm.close()
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_outputs_are_in_the_order_of_the_prompts_and_independent_of_the_batch(llm):
    prompts = [[index % 60, 3, 5] for index in range(40)]
    params = [greedy(1 + index * 7 % 30, ignore_eos=True) for index in range(40)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in together] == prompts
    oracle = [fake_tokens(prompt, one.max_tokens, VOCAB_SIZE) for prompt, one in zip(prompts, params, strict=True)]
    assert ids_of(together) == oracle


def test_texts(llm):
    (output,) = llm.generate("w4 w5", greedy(ignore_eos=True), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("w4 w5", [4, 5])
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    streamed = llm.generate("w4 w5", greedy(ignore_eos=True, output_kind=RequestOutputKind.DELTA), use_tqdm=False)
    assert streamed[0].outputs == output.outputs


def test_chat(llm):
    messages = [{"role": "user", "content": "w7 w8"}]
    (output,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == [7, 8, 9]
    outputs = llm.chat([messages, messages], greedy(), use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt_token_ids for output in outputs] == [[7, 8]] * 2
    assert llm.chat(messages, greedy(), use_tqdm=False, chat_template="w1")[0].prompt_token_ids == [1]
    with pytest.raises(InvalidRequestError, match="a chat is a list of"):
        llm.chat("hello", greedy())


def test_a_stop_string_ends_the_request_in_the_engine_too(llm):
    (free,) = llm.generate([1, 2], greedy(200, ignore_eos=True), use_tqdm=False)
    stop = f".w{free.outputs[0].token_ids[9]}"
    (output,) = llm.generate([1, 2], greedy(100_000, ignore_eos=True, stop=[stop]), use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert completion.token_ids == free.outputs[0].token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) <= 10
    assert_idle(llm)


def test_seeds(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5)
    assert (
        ids_of(llm.generate([[1, 2], [1, 2]], params, use_tqdm=False)) == [fake_tokens([1, 2], 20, VOCAB_SIZE, 5)] * 2
    )


def test_a_wrong_prompt_among_many_is_known_before_anything_is_submitted(llm):
    before = llm.statistics()
    with pytest.raises(InvalidRequestError, match=r"the prompt cannot be empty \(prompt 2 of 3\)"):
        llm.generate([[1], [2], []], greedy(), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="3 prompts need one sampling_params each, or one for all; got 2"):
        llm.generate([[1], [2], [3]], [greedy(), greedy()], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="3 prompts need one priority each, or one for all; got 1"):
        llm.generate([[1], [2], [3]], greedy(), use_tqdm=False, priority=[1])
    after = llm.statistics()
    assert (after.num_finished, after.num_prompt_tokens) == (before.num_finished, before.num_prompt_tokens)


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_prefix_cache_hits_are_told(llm):
    llm.reset_prefix_cache()
    prompt = list(range(40))
    cold, warm = (llm.generate(prompt, greedy(), use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    llm.reset_prefix_cache()
    assert llm.generate(prompt, greedy(), use_tqdm=False)[0].num_cached_tokens == 0


def test_interrupting_generate_aborts_its_requests(llm):
    def interrupt():
        while llm.client.num_live < 30:  # all are submitted; then this thread waits for them
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2], [3]] * 10, greedy(100_000, ignore_eos=True), use_tqdm=False)
    thread.join()
    assert_idle(llm)
    assert llm.client.num_live == 0
    assert len(llm.generate([1], greedy(ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_threads_share_an_llm(llm):
    def one(index):
        return ids_of(llm.generate([[index, 1], [index, 2]], greedy(20, ignore_eos=True), use_tqdm=False))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(12))) == [one(index) for index in range(12)]


def test_two_clients_of_one_engine(tmp_path):
    config = EngineConfig(executor="fake", max_num_seqs=4)
    with (
        EngineProcess(config, listen=f"ipc://{tmp_path}/engine.sock") as engine,
        LLM(connect=engine.address) as first,
        LLM(connect=engine.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        mine, theirs = pool.map(lambda llm: ids_of(llm.generate([[1, 2]] * 3, params, False)), (first, second))
        assert [len(ids) for ids in mine + theirs] == [30] * 6
        assert len({tuple(ids) for ids in mine + theirs}) == 6, "requests without a seed drew the same numbers"
        first.close()
        assert ids_of(second.generate([1, 2], greedy(ignore_eos=True), False)) == [fake_tokens([1, 2], 8, 32_000)]
        with pytest.raises(EngineDeadError, match="closed"):
            first.generate([1], greedy())
        engine.stop()
        with pytest.raises(EngineDeadError):
            second.statistics()


@pytest.mark.parametrize("state", ["running", "idle"])
def test_a_killed_engine_is_known_at_once(state):
    with LLM(executor="fake", restart_engine=False) as llm, ThreadPoolExecutor(1) as pool:
        long = SamplingParams(max_tokens=100_000, ignore_eos=True)
        running = pool.submit(llm.generate, [[1]] * 4, long, False) if state == "running" else None
        while state == "running" and llm.statistics().num_running < 4:
            time.sleep(0.01)
        begin = time.monotonic()
        os.kill(llm.client.welcome.pid, signal.SIGKILL)
        if running is not None:
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                running.result(5.0)
        while llm.client.error is None:
            time.sleep(0.001)
        assert time.monotonic() - begin < 10.0
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            llm.generate([1], greedy())


def test_making_and_ending_leaves_nothing():
    def one():
        llm = LLM(executor="fake")
        pid = llm.client.welcome.pid
        llm.generate([1], greedy(), use_tqdm=False)
        return llm, pid

    llm, _ = one()
    llm.close()
    llm.close()
    gc.collect()  # what earlier tests have left
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    llm, closed = one()
    llm.close()
    llm, forgotten = one()
    del llm
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)
    for pid in (closed, forgotten):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_script_without_main_guard_and_what_it_imports(tmp_path):
    """Also: a script that does not close its LLM ends, and its engine with it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from engine_core import LLM, SamplingParams\n"
        "llm = LLM(executor='fake')\n"
        "ids = llm.generate([1, 2], SamplingParams(max_tokens=4, ignore_eos=True), False)[0].outputs[0].token_ids\n"
        "assert len(ids) == 4\n"
        f"heavy = ('torch', 'transformers', '{PREFIX}core', '{PREFIX}kernels', 'triton')\n"
        "print([name for name in sys.modules if name in heavy], llm.client.welcome.pid)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    imported, pid = done.stdout.rsplit(maxsplit=1)
    assert imported == "[]"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"executor": "fake", "max_models_len": 5}, "unknown option 'max_models_len'"),
        ({"executor": "fake", "seed": "x"}, "seed must be an integer"),
        ({"executor": "fake", "model": 123}, "model must be a path or a name, .*; got 123"),
        ({"executor": "fake", "model": "\udcff"}, "model must be valid UTF-8"),
        ({"executor": "fake", "tokenizer": b"t"}, "tokenizer must be a path or a name"),
        ({"executor": "fake", "start_timeout": float("nan")}, "start_timeout must be a finite number of seconds"),
        ({"executor": "fake", "start_timeout": "5"}, "start_timeout must be a finite number of seconds"),
        ({"connect": "ipc:///x", "connect_timeout": -1}, "connect_timeout must be a finite number of seconds"),
        ({"connect": "ipc:///x", "connect_timeout": float("inf")}, "connect_timeout must be a finite number"),
        ({"connect": "ipc:///x", "seed": True}, "seed must be an integer"),
        ({"connect": "ipc:///x", "model": "m", "dtype": "auto"}, "leave out model, dtype"),
    ],
)
def test_wrong_options(arguments, text):
    with pytest.raises(ConfigError, match=text):
        LLM(**arguments)


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        LLM(executor="fake", tokenizer=tmp_path / "nowhere")


# --- against a played engine ------------------------------------------------------------------------------------


def test_one_failed_request_fails_the_call_at_its_end(played_llm, played_connection):
    def answer(request):
        if request.number in (1, 3):
            return RequestFailed(request.number, ErrorCode.RESOURCE_EXHAUSTED, "no room")
        played_connection.feed(request.number, 0, [5], FinishReason.STOP)
        return None

    played_connection.answers[AddRequest] = answer
    bar = _Bar()
    with pytest.raises(RequestFailedError, match=r"prompt 1 of 5: no room \(RESOURCE_EXHAUSTED\) \(2 of 5 failed\)"):
        played_llm.generate([[1]] * 5, greedy(), use_tqdm=bar)
    assert bar.count == 5
    assert played_connection.sent(Abort) == []
    played_connection.answers[AddRequest] = lambda request: RequestFailed(
        request.number, ErrorCode.INVALID_ARGUMENT, "wrong"
    )
    with pytest.raises(InvalidRequestError, match="prompt 0 of 1: wrong"):
        played_llm.generate([1], greedy(), use_tqdm=False)
    assert played_llm.client.num_live == 0


class _Bar:
    """Stands for tqdm."""

    def __call__(self, **arguments):
        self.arguments = arguments
        self.count = 0
        return self

    def update(self, count):
        self.count += count

    def close(self):
        self.closed = True


def test_the_progress_bar_is_vllms(played_llm, played_connection):
    played_connection.answers[AddRequest] = lambda request: played_connection.feed(
        request.number, 0, [5, 6], FinishReason.STOP
    )
    bar = _Bar()
    played_llm.generate([[1, 2, 3]] * 2, greedy(), use_tqdm=bar)
    assert (bar.arguments["total"], bar.arguments["desc"], bar.count, bar.closed) == (2, "Processed prompts", 2, True)
    assert bar.arguments["postfix"] == "est. speed input: 0.00 toks/s, output: 0.00 toks/s"
    assert bar.postfix.startswith("est. speed input: ")


def test_what_the_engine_is_sent(played_llm, played_connection):
    played_connection.answers[AddRequest] = lambda request: played_connection.feed(
        request.number, 0, [5], FinishReason.STOP
    )
    shared = greedy()
    played_llm.generate([[1], [2], [3]], shared, use_tqdm=False, priority=[5, -1, 5])
    requests = played_connection.sent(AddRequest)
    assert played_connection.prompts() == [[1], [2], [3]], "the order is the engine's policy's to change"
    assert [request.priority for request in requests] == [5, -1, 5]
    assert {request.params.output_kind for request in requests} == {RequestOutputKind.FINAL_ONLY}
    assert shared.output_kind == RequestOutputKind.CUMULATIVE
    assert len({request.seed for request in requests}) == 3
    played_llm.generate([[1]], greedy(seed=77), use_tqdm=False)
    assert played_connection.sent(AddRequest)[-1].seed == 77


def test_more_requests_than_the_window(played_llm, played_connection):
    """What is with the engine at once is bounded; the rest follows as requests finish."""
    most = 0

    def answer(request):
        nonlocal most
        most = max(most, played_llm.client.num_live)
        if request.number % 2:
            for number in (request.number - 1, request.number):
                played_connection.feed(number, 0, [number % 1000], FinishReason.LENGTH)

    played_connection.answers[AddRequest] = answer
    outputs = played_llm.generate([[1]] * 1000, greedy(), use_tqdm=False)
    assert ids_of(outputs) == [[number] for number in range(1000)]
    assert most == 256
