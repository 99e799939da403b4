"""LLM and AsyncLLM on several engines: a fleet of their own, or one engine after the other."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.executors.fake import choice_seed
from frontend.async_llm import AsyncLLM
from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.errors import ConfigError, EngineDeadError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake",
    executor_options=fake_options(vocab_size=VOCAB, step_us=2000, max_model_len=2048),
    num_blocks_override=2000,
    max_num_seqs=64,
)


class Engines:
    """Engines at addresses of a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.addresses = [f"ipc://{folder}/{index}" for index in range(count)]
        self.running = {address: EngineProcess(CONFIG, listen=address) for address in self.addresses}
        for engine in self.running.values():
            engine.start()
        for engine in self.running.values():
            engine.wait_ready()

    def kill(self, address: str) -> None:
        engine = self.running.pop(address)
        os.kill(engine.pid, signal.SIGKILL)
        engine.close()

    def close(self) -> None:
        for engine in self.running.values():
            engine.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path, 2)
    try:
        yield engines
    finally:
        engines.close()


def prompt(index: int) -> list[int]:
    return [5 + index, *range(20, 52)]


def params(index: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8 * (index % 2), ignore_eos=True, seed=index)


def due(index: int, max_tokens: int) -> list[int]:
    return fake_tokens(prompt(index), max_tokens, VOCAB, choice_seed(index, 0) if index % 2 else 0)


@pytest.mark.parametrize("route", ["prefix", None])
def test_streams_go_on_when_an_engine_dies(engines: Engines, route: str | None) -> None:
    async def stream(llm: AsyncLLM, index: int, begun: asyncio.Semaphore) -> list[int]:
        async for output in llm.generate({"prompt_token_ids": prompt(index)}, params(index, 150)):
            if len(output.outputs[0].token_ids) > 3:
                begun.release()
        return list(output.outputs[0].token_ids)

    async def run() -> None:
        async with await AsyncLLM.create(connect=engines.addresses, route=route, skip_tokenizer_init=True) as llm:
            begun = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(stream(llm, index, begun)) for index in range(24)]
            for _ in range(24):
                await begun.acquire()
            engines.kill(engines.addresses[0])
            for index, tokens in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), 60)):
                assert tokens == due(index, 150)
            if route is not None:
                assert [one.state for one in llm.client.replicas().replicas] == ["lost", "open"]
                assert llm.client.replicas().num_moved > 0

    asyncio.run(run())


def test_the_client_is_the_owner_of_its_own_fleet(engines: Engines) -> None:
    with LLM(connect=engines.addresses, route="least_loaded", skip_tokenizer_init=True) as llm:
        llm.client.leave(engines.addresses[0], move_after=0.0)
        assert llm.client.welcome.limits.max_num_seqs == 128
        outputs = llm.generate([{"prompt_token_ids": prompt(index)} for index in range(8)], params(0, 20))
        assert outputs[0].outputs[0].token_ids == due(0, 20)
        assert [one.address for one in llm.client.replicas().replicas] == [engines.addresses[1]]
        llm.client.join(engines.addresses[0])
        assert llm.client.statistics().num_finished == 8
        assert llm.client.model_information().executor == "fake"
        assert llm.client.explain().requests == []


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="route must be one of prefix, least_loaded, round_robin"):
        LLM(connect=["ipc:///a", "ipc:///b"], route="random")
    with pytest.raises(ConfigError, match="a list of different addresses"):
        LLM(connect=["ipc:///a", "ipc:///a"], route="prefix")
    with pytest.raises(EngineDeadError, match=r"no engine answered within 0\.2 s"):
        LLM(connect=[f"ipc://{tmp_path}/a"], route="prefix", connect_timeout=0.2)
    with pytest.raises(EngineDeadError, match=r"no engine listens at .*a: .*; no engine listens at .*b"):
        LLM(connect=[f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"])
