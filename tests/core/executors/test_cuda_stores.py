"""The CUDA executor's blocks in a folder: a second engine finds what the first one has left, and no token changes."""

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
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, Outputs
from tests.triton_device import ANYWHERE
from tools.lab.bench.tiny_model import write_tiny_model

pytestmark = ANYWHERE

PROMPT = list(range(3, 70))  # 4 whole blocks and 3 tokens
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True)
PATIENCE_S = 60


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return str(folder)


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


def test_blocks_outlive_the_engine(model: str, tmp_path: Path) -> None:
    first = Answer(model, tmp_path / "kv", async_scheduling=True)
    assert (first.num_stored, first.num_fetched, len(first.tokens)) == (4, 0, 3)
    second = Answer(model, tmp_path / "kv")
    assert (second.num_fetched, second.tokens) == (4, first.tokens)
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
    damaged = Answer(model, tmp_path / "kv")
    assert (damaged.num_fetched, damaged.tokens) == (0, first.tokens)
