"""The CUDA executor's blocks and states in a folder: a second engine finds what the first has left, and no token
changes."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.inputs import EngineInput, StoreNews
from core.process.resolve import resolve
from core.process.start import open_stores, start_store, with_orders
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from tests.core.executors.test_cuda_recurrent import KINDS_OF_LAYERS, write
from tests.triton_device import ANYWHERE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

PROMPT = list(range(3, 70))  # 4 whole blocks and 3 tokens
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True)
PATIENCE_S = 60


STATES: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": 1 << 22}
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2, step_ns=(10**6,) * 8)
#: Options of an engine, and how many blocks and states PROMPT leaves.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "attention": ({}, 4),
    "recurrent": (STATES, 5),
    "recurrent with a head": ({**STATES, "speculative_config": MTP}, 5),
}


@pytest.fixture(scope="module", name="folder_of")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = [tmp_path_factory.mktemp("tiny") for _ in MODELS]
    write_tiny_model(folders[0])
    for folder, kind in zip(folders[1:], ("short convolution", "gated delta"), strict=True):
        write(folder, {**KINDS_OF_LAYERS[kind], "vocab_size": 80})
    return dict(zip(MODELS, map(str, folders), strict=True))


class Answer:
    """The tokens of PROMPT, and what the engine's store did."""

    def __init__(self, model: str, folder: Path, **options: Any) -> None:
        sizes = {"dtype": "bfloat16", "max_model_len": 128, "num_blocks_override": 9, "num_host_blocks": 8}
        given = {"max_num_seqs": 1, "max_num_batched_tokens": 80, "threads": 1, **sizes, **options}
        config = EngineConfig(model=model, device="cuda", kv_dir=str(folder), **given)
        self.executor = CudaExecutor(config)
        resolved = resolve(config, self.executor.info, lambda *_: 9, total_memory_bytes=1 << 34, num_cpus=1)
        self.executor.initialize_cache(resolved)
        self.core = EngineCore(resolved, self.executor)
        self.news = deque[StoreNews]()
        store = start_store(open_stores(resolved, self.executor), self.executor, self.core, self.news.append)
        assert store is not None
        self.engine = with_orders(self.core, self.core, store)
        self.tokens: list[int] = []
        self.run([AddRequest(0, np.array(PROMPT, "<i4").tobytes(), SAMPLING, 0)])
        store.close(PATIENCE_S)
        self.run([self.news.popleft() for _ in range(len(self.news))])
        exchange = self.core.scheduler.exchange
        assert exchange is not None
        self.num_fetched, self.num_stored = exchange.num_fetched, exchange.num_stored

    def run(self, messages: Any) -> None:
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in messages]
        end = time.monotonic() + PATIENCE_S
        while inbox or self.engine.has_work or self.engine.has_unfinished:
            assert time.monotonic() < end, self.core.scheduler
            for _, output in self.engine.step(inbox, 0):
                assert isinstance(output, Outputs), output
                self.tokens += np.frombuffer(output.tokens, "<i4").tolist()
            inbox = [(0, self.news.popleft()) for _ in range(len(self.news))]


@pytest.mark.parametrize(
    "kind", ["attention", pytest.param("recurrent", marks=pytest.mark.soak), "recurrent with a head"]
)
def test_blocks_and_states_outlive_the_engine(folder_of: dict[str, str], kind: str, tmp_path: Path) -> None:
    model, (options, count) = folder_of[kind], MODELS[kind]
    first = Answer(model, tmp_path / "kv", **options)
    assert (first.num_stored, first.num_fetched, len(first.tokens)) == (count, 0, 3)
    second = Answer(model, tmp_path / "kv", **options)
    assert (second.num_fetched, second.tokens) == (count, first.tokens)
    caches = [answer.executor.runner.cache for answer in (first, second)]
    blocks = [
        [part.tobytes() for block in range(1, 6) for part in answer.executor.shared_blocks.cache.views(block)]  # type: ignore[union-attr]
        for answer in (first, second)
    ]
    assert blocks[0][:4] == blocks[1][:4], "what was read is what was computed"
    assert all(torch.isfinite(cache.layers[0][1:5]).all() for cache in caches)
    for path in (tmp_path / "kv" / "blocks").glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    damaged = Answer(model, tmp_path / "kv", **options)
    assert (damaged.num_fetched, damaged.tokens) == (0, first.tokens)
