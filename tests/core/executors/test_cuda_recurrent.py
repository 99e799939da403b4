"""Models with recurrent layers on a GPU: the tokens of the C kernels, and bits that no other request changes."""

from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.executors.local import LocalExecutor
from core.process.resolve import resolve
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from tests.core.executors.test_cuda_executor import Answers
from tests.core.process.tiny_lfm2 import lfm2_folder
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE

BEGIN = list(range(5, 25))
PROMPTS = [[*BEGIN, 7, 8], list(range(40, 54)), [*BEGIN, 7, 8, 9, 30]]
SIZES: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_num_seqs": 2}
SIZES |= {"max_num_batched_tokens": 13, "block_size": 8, "max_model_len": 40, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lfm2_folder(tmp_path_factory.mktemp("lfm2")))


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self.executor = CudaExecutor(config) if config.device == "cuda" else LocalExecutor(config)
        info, blocks_in = self.executor.info, self.executor.determine_num_available_blocks
        resolved = resolve(config, info, blocks_in, total_memory_bytes=1 << 34, num_cpus=1)
        self.executor.initialize_cache(resolved)
        self.core = EngineCore(resolved, self.executor)

    def run(self, which: list[int]) -> Answers:
        """Of some of the prompts, at the same time."""
        found, inbox = Answers(len(PROMPTS)), list[Any]()
        for number in which:
            params = SamplingParams(temperature=0.9, seed=number, max_tokens=4, ignore_eos=True, logprobs=2)
            inbox.append((0, AddRequest(number, np.array(PROMPTS[number], "<i4").tobytes(), params, number)))
        while inbox or self.core.has_work:
            for _, message in self.core.step(inbox, 0):
                assert isinstance(message, Outputs), message
                found.take(message)
            inbox = []
        return found


def of(answers: Answers, number: int) -> Any:
    return answers.tokens[number], {key: one for key, one in answers.logprobs.items() if key[0] == number}


def test_tokens_alone_in_company_preempted_and_from_kept_states(model: str) -> None:
    config = EngineConfig(model=model, device="cuda", **SIZES)
    engine = Engine(config)
    together = engine.run([0, 1, 2])
    again = engine.run([2])  # it starts with a state of the first run
    assert engine.core.scheduler.stats.prefix_cache_hits > 0
    assert of(again, 2) == of(together, 2)
    alone = Engine(EngineConfig(model=model, device="cuda", enable_prefix_caching=False, **SIZES))
    for number in range(2):
        assert of(alone.run([number]), number) == of(together, number)
    few = EngineConfig(model=model, device="cuda", num_blocks_override=6, **SIZES)
    preempted = Engine(few)
    assert preempted.run([0, 1, 2]).logprobs == together.logprobs
    assert preempted.core.scheduler.stats.num_preemptions > 0
    by_cpu = Engine(EngineConfig(model=model, **SIZES)).run([0, 1, 2])
    assert by_cpu.tokens == together.tokens
    for key, entries in by_cpu.logprobs.items():
        got = [value for _, value in together.logprobs[key]]
        np.testing.assert_allclose(got, [value for _, value in entries], rtol=0, atol=1e-4)


def test_states_of_swapped_requests_come_back_from_the_host(model: str) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False, "num_blocks_override": 6, "preemption_mode": "swap"}
    engine = Engine(
        EngineConfig(model=model, device="cuda", num_swap_blocks=12, async_scheduling=False, **{**SIZES, **options})
    )
    states = engine.executor.runner.states
    assert states is not None
    on_host = states._swapped
    assert on_host is not None
    on_host.fill_(np.nan)
    swapped = engine.run([0, 1])
    stats = engine.core.scheduler.stats
    assert stats.num_swapped_in_blocks > 0
    assert stats.num_recomputed_tokens == 0
    assert np.isfinite(on_host.numpy()[0]).all()
    plain = Engine(EngineConfig(model=model, device="cuda", enable_prefix_caching=False, **SIZES))
    assert swapped.logprobs == plain.run([0, 1]).logprobs


@pytest.mark.parametrize(
    ("options", "name"),
    [({"kv_dir": "/nowhere", "num_host_blocks": 4}, "kv_dir"), ({"speculative_config": {"method": "ngram"}}, "specul")],
)
def test_what_is_not_supported_is_refused(model: str, options: dict[str, Any], name: str) -> None:
    from ipc.options.given_options import config_from_options

    config = config_from_options(model=model, device="cuda", **SIZES, **options)
    with pytest.raises(ConfigError, match=f"{name}.*: models with recurrent layers do not support it"):
        CudaExecutor(config)
