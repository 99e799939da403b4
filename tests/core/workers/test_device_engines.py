"""Engines with a group of GPUs, from LLM on: files of KV blocks and states, and images. Under Triton's interpreter."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from core.workers import crew
from core.workers.wires import Place, Wires, places_of
from engine_core import LLM, SamplingParams
from frontend.engine import child
from ipc.machine.channel import Channel
from ipc.machine.child_process import run_package
from ipc.options.config import EngineConfig
from tests.core.models.idefics3_checkpoint import noise
from tests.core.workers.test_worker_images import MODELS
from tests.core.workers.test_worker_tiers import SIZES, ask, children_of, wait_for_stored
from tests.triton_device import ANYWHERE, ON_GPU

pytestmark = [*ANYWHERE, pytest.mark.timeout(900)]

PROMPT = [3 + 7 * number % 290 for number in range(68)]
SECOND = [*PROMPT, *range(3, 12)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cuda", "enforce_eager": True}
STORES: dict[str, Any] = {
    **SIZES,
    **OPTIONS,
    "max_model_len": 128,
    "num_host_blocks": 12,
    "kv_cache_memory_bytes": 2**21,
}


@pytest.fixture(name="emulated")
def emulated_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        return
    monkeypatch.setattr(child, "run_package", lambda _, *rest: run_package("tests.core.workers.emulated_engine", *rest))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize(("device", "is_asked"), [("cpu", False), ("cuda", True)])
def test_workers_with_gpus_are_asked_for_their_blocks(
    device: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine maps the blocks of others."""
    given = list[tuple[bool, bool]]()

    class Process:
        pid = ended_fd = -1
        end = None

        def __init__(self, _: EngineConfig, place: Place, wires: Wires) -> None:
            given.append((wires.blocks >= 0, wires.asked >= 0))
            ours, self._theirs = socket.socketpair()
            self.channel = Channel(ours)
            wires.close()

        def signal(self, _: int) -> None:
            pass

        kill = close = lambda self: self._theirs.close()

    monkeypatch.setattr(crew, "ChildProcess", Process)
    crew.Crew(EngineConfig(device=device, kv_dir="kv", num_host_blocks=4), places_of(2, 1)).end()
    assert given == [(not is_asked, is_asked)] * 2


@pytest.mark.soak
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", ["folder", "hybrid"])
def test_blocks_and_states_of_several_gpus_are_found_in_files(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the next engine, and after a worker's death."""
    model = request.getfixturevalue(kind)
    options = {**STORES, "tensor_parallel_size": 2, "kv_dir": tmp_path / "kv"}
    with LLM(model, **options) as llm:
        ask(llm, PROMPT)
        wait_for_stored(llm, 4)
        expected = ask(llm, SECOND)
        assert expected[1] == 64
    with LLM(model, **options) as llm:
        assert ask(llm, SECOND) == expected
        assert llm.statistics().num_fetched_blocks >= 4
        os.kill(children_of(llm.client.welcome.pid)[0], signal.SIGKILL)
        assert ask(llm, PROMPT)[1] == 64


def seen(folder: str, mark: str, **options: Any) -> list[Any]:
    """One prompt has two images, the other has none."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    images = {"image": [noise(16, 16, 1), noise(9, 12, 2)]}
    prompts: list[Any] = [{"prompt": f"See {mark} and {mark}.", "multi_modal_data": images}, "Why?"]
    sizes = {"max_model_len": 400, "max_num_seqs": 2, "num_blocks_override": 200}
    with LLM(folder, **OPTIONS, **sizes, **options) as llm:
        return [
            [[(token, each.logprob) for token, each in place.items()] for place in output.outputs[0].logprobs or ()]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]


@pytest.mark.soak
@pytest.mark.usefixtures("emulated")
@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize("name", MODELS)
def test_images_reach_all_gpus(name: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    write, mark = MODELS[name]
    folder = str(write(tmp_path))
    alone = seen(folder, mark)
    assert len(alone[0]) == 3
    assert seen(folder, mark, tensor_parallel_size=2) == alone
