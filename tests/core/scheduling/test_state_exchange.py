"""Recurrent states go to a folder and come back with their blocks: random clients, and a store that answers late.

Every state is read back in each step (tests/core/stateful_executor.py), and every file is compared with what its name
says.
"""

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch import kept_states
from core.batch.kept_states import KeptStates
from core.scheduling import scheduler
from core.scheduling.exchange_beside import StatesBeside
from core.tiers.block_store import BlockStore
from ipc.options.config import EngineConfig
from tests.core.scheduling.exchange_driver import exchange_config
from tests.core.scheduling.test_block_exchange import play
from tests.core.stateful_executor import StatefulExecutor

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kept_states, scheduler):
        monkeypatch.setattr(module, "LEAST_TOKENS", 4)
    monkeypatch.setattr(kept_states, "_LEAST_DISTANCE", 8)


def serve(folder: Path, seed: int, max_bytes: int = 9000) -> None:
    """Let three engines serve requests of one folder, with few or many slots and every kind of preemption."""
    rng = random.Random(seed)

    def config() -> EngineConfig:
        mode = rng.choice(["recompute", "swap", "auto"])
        options = {"max_num_seqs": rng.choice([2, 4]), "budget": rng.choice([9, 17, 40]), "max_model_len": 52}
        options |= {"preemption_mode": mode, "num_swap_blocks": 0 if mode == "recompute" else 30, "depth": 1 + seed % 2}
        made = exchange_config(rng.choice([20, 60]), rng.choice([16, 30]), **options)
        memory = 2 * (made.max_num_seqs + rng.choice([4, 12, 40]))
        return msgspec.structs.replace(made, kv_cache_memory_bytes=memory, swap_space_bytes=8)

    play(folder, rng, config, max_bytes, StatefulExecutor)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_clients_and_a_store_that_answers_late(seed: int, tmp_path: Path) -> None:
    serve(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_of_states_in_files(tmp_path: Path) -> None:
    for seed in range(10, 210):
        serve(tmp_path / str(seed), seed)


def test_the_state_of_another_place_in_a_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_store = KeptStates.to_store
    monkeypatch.setattr(KeptStates, "to_store", lambda self, contents: np.roll(to_store(self, contents), 1))
    monkeypatch.setattr(BlockStore, "_is_there", lambda *_: True)
    with pytest.raises(AssertionError, match=r"its state is not of|not what its name says"):
        serve(tmp_path, 2)


def test_a_state_that_a_step_in_flight_stores_is_not_left() -> None:
    """Others are, although a step is in flight, as nearly always if steps overlap."""
    nothing: Any = None
    kept, contents = KeptStates(nothing, nothing, num_rows=2, num_slots=4), np.array([7, 8, 9])
    slots = kept.reserve(2)
    assert slots is not None
    kept.put(contents[:2], slots)
    kept.saved_in[slots] = 4, 5
    batch: Any = SimpleNamespace(block_size=4, in_flight=deque[Any]())
    beside = StatesBeside(batch, kept)
    for first, found in ((None, [slots[0], slots[1], 0]), (5, [slots[0], 0, 0]), (4, [0, 0, 0])):
        batch.in_flight = deque([] if first is None else [(first, None, None)])
        left, times_given = beside.left(contents, np.zeros(3, np.int32), np.zeros(9, np.int64))
        assert left.tolist() == found
        assert times_given.tolist() == kept.times_given[left].tolist()
