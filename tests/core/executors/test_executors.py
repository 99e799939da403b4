"""The executors are made of the same parts and none of another executor: each answers the whole protocol itself."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.execution.executor import Executor, ModelInfo
from core.executors.cuda import CudaExecutor
from core.executors.fake import FakeExecutor
from core.executors.local import LocalExecutor
from core.executors.run import caches_that_fit, runner_sizes
from core.grammars.grammars import Grammars
from ipc.errors import OutOfMemoryError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from tests.resolved import resolved_config
from tools.lab.bench.tiny_model import write_tiny_model

INFO = ModelInfo("tiny", "00", "float32", 64, 96, (2,), "L0")
EXECUTORS = [LocalExecutor, CudaExecutor, FakeExecutor]
GRAMMARS = Grammars(dict, 100, (2,))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_executor_inherits_nothing(executor: type) -> None:
    calls = {name for name, _ in inspect.getmembers(Executor, inspect.isfunction) if not name.startswith("_")}
    assert executor.__bases__ == (object,)
    assert calls <= vars(executor).keys()


def test_a_runner_has_the_sizes_of_the_config() -> None:
    config = resolved_config(7, 96, max_num_seqs=3, block_size=32, logprobs_mode="raw_logits")
    assert runner_sizes(config, INFO, GRAMMARS) == {
        "num_rows": 3,
        "num_blocks": 7,
        "block_size": 32,
        "eos_token_ids": (2,),
        "logprobs_mode": "raw_logits",
        "num_swap_blocks": 0,
        "grammars": GRAMMARS,
    }


def test_a_cache_that_does_not_fit_is_an_error_that_names_the_options() -> None:
    message = r"^9 blocks; lower kv_cache_memory_bytes, max_model_len, swap_space_bytes or kv_host_bytes$"
    with pytest.raises(OutOfMemoryError, match=message), caches_that_fit():
        raise MemoryError("9 blocks")
    with pytest.raises(torch.OutOfMemoryError), caches_that_fit():
        raise torch.OutOfMemoryError("a device's own error stays what it is")


def test_what_the_window_passes_is_given_back_where_all_layers_have_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())

    def window(sliding: int | None, **options: Any) -> int:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": sliding}
        (tmp_path / "config.json").write_text(json.dumps(settings | mistral))
        config = EngineConfig(model=str(tmp_path), dtype="float32", threads=1, load_format="dummy", **options)
        return LocalExecutor(config).info.kv_window

    assert window(40) == 40
    assert window(None) == 0
    drafting = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=2)
    assert window(40, speculative_config=drafting) == 0
