"""EngineCore under random clients, where layers with a window have blocks of their own: as test_scheduler_states.py."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from core.kv.page_room import page_room
from ipc.config import EngineConfig
from tests.core.driving import small_config
from tests.core.scheduling.test_scheduler_states import EngineMachine, run

configs = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([1, 2]),
        "num_blocks": st.sampled_from([12, 16, 24, 60]),
        "block_size": st.sampled_from([4, 2, 1]),
        "max_num_seqs": st.integers(1, 6),
        "budget": st.sampled_from([9, 40, 5, 2, 1]),
        "prefix_caching": st.sampled_from([True, True, True, False]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "fair_quantum": st.sampled_from([4, 40]),
        "reserve_full_length": st.sampled_from([False, False, True]),
        "kv_window": st.sampled_from([1, 5, 9]),
        "kv_page_blocks": st.sampled_from([1, 2, 3, 6]),
        "preemption_mode": st.sampled_from(["swap", "recompute", "auto"]),
        "num_swap_blocks": st.sampled_from([60, 9]),
        "swap_ns_per_block": st.sampled_from([1, 3]),
    }
)


def longest(config: EngineConfig) -> int:
    """The most tokens of a request of which every choice fits."""
    budget, pages = config.max_num_batched_tokens or 0, (config.num_blocks_override or 0) - 1
    room = page_room(config, config.kv_window or 0, config.kv_page_blocks or 0, budget)
    return max(one for one in range(1, pages * config.block_size + 1) if room.num_pages(one, True) <= pages)


class PageMachine(EngineMachine):
    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        config = {**config, "num_host_blocks": 0}
        config["max_model_len"] = 1 + longest(small_config(**config))
        super().start(msgspec.json.decode(msgspec.json.encode(config)))


@pytest.mark.parametrize("examples", [10, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_engine_survives_random_clients(examples: int) -> None:
    run(PageMachine, examples)
