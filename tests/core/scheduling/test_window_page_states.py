"""EngineCore under random clients, where layers with a window have blocks of their own: as test_scheduler_states.py."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from core.batch.batch import Batch
from core.batch.request import NO_ROW, Request
from core.kv.cache_kinds import cache_room
from ipc.options.config import EngineConfig
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
        "num_host_blocks": st.sampled_from([0, 60, 15, 4]),
    }
)


def longest(config: EngineConfig) -> int:
    """The most tokens of a request of which every choice fits."""
    budget, pages = config.max_num_batched_tokens or 0, (config.num_blocks_override or 0) - 1
    room = cache_room(config, config.kv_window or 0, config.kv_page_blocks or 0, budget)
    return max(one for one in range(1, pages * config.block_size + 1) if room.num_pages(one, True) <= pages)


def longest_prefix(batch: Batch, request: Request) -> int:
    """The most first blocks with which it can start: searched for in all blocks, without keys and hashes."""
    size, window, names, host = batch.block_size, batch.others[0].kind.window, batch.pool.names, batch.host_cache
    content, has_window, places = request.root, list[bool](), [names, host.names]
    for start in range(0, len(request.token_ids) - size, size):
        tokens = request.token_ids[start : start + size]
        while places:
            contents, parents, token_ids = places[0].columns()
            found = contents[(parents == content) & (token_ids == tokens).all(1)]
            if len(found):
                break
            places.pop(0)  # behind the first that the cache lacks only the host is looked at
        if not places:
            break
        (content,) = found.tolist()
        in_cache = places[0] is names and bool(names.beside[0].found[names.content == content].any())
        has_window.append(in_cache or bool((host.beside[0].content == content).any()))
    counts = range(len(has_window), -1, -1)
    return next(count for count in counts if all(has_window[max(0, count * size - window + 1) // size : count]))


class PageMachine(EngineMachine):
    @invariant()
    def check_prefixes(self) -> None:
        """What waiting requests find now."""
        batch, admission = self.driver.scheduler.batch, self.driver.scheduler.admission
        for request in self.driver.scheduler.live_requests():
            if request.row != NO_ROW or request.swapped or request.choices or request.needs_whole_prompt:
                continue
            expected = longest_prefix(batch, request) if batch.prefix_cache.is_enabled else 0
            hits = batch.prefix_cache.find_all(request)[0][:expected]
            found = admission.appraise(request, admission.room()).num_computed_tokens
            if len(hits) and not batch.prefix_cache.fits(request, hits):
                assert found == 0
            else:
                assert found == expected * batch.block_size

    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        if not config["prefix_caching"]:
            config = {**config, "num_host_blocks": 0}
        config = {**config, "max_model_len": 1 + longest(small_config(**config))}
        super().start(msgspec.json.decode(msgspec.json.encode(config)))


@pytest.mark.parametrize("examples", [5, pytest.param(1_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_engine_survives_random_clients(examples: int) -> None:
    run(PageMachine, examples)
