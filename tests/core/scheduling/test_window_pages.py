"""Pages: layers with a window give KV blocks back, beside layers that see everything and keep theirs."""

from typing import Any

import pytest

from core.batch.batch import Batch
from core.scheduling.decisions import Cause
from core.scheduling.draft import Draft
from ipc.options.config import EngineConfig
from tests.core.driving import ByHand, Driver, add_message, expected_tokens, small_config
from tests.core.scheduling.beams.test_beam_searches import MAX_LEN, check, driver, some_messages

WINDOW = 9
#: Of a model as Gemma 3: 5 of 6 layers have a window, so a page has 5 blocks of the layers that see everything.
RATIO = 5


def paged(num_blocks: int = 60, **options: Any) -> EngineConfig:
    given = {"kv_window": WINDOW, "kv_page_blocks": RATIO, "watermark": 0.0, **options}
    return small_config(num_blocks, **given)


def batch_of(core: ByHand | Driver) -> Batch:
    return core.scheduler.batch


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_long_prompt_holds_its_window_and_a_fifth_of_a_page_for_each_block(prefix_caching: bool) -> None:
    """In steps of 16 tokens: 8 tokens of the window before, so 24 tokens in up to 7 blocks of 4."""
    core, most = Driver(paged(budget=16, prefix_caching=prefix_caching, max_model_len=600)), 0
    message = add_message(1, [token % 900 + 3 for token in range(200)], 20)
    core.step([(0, message)])
    while core.engine.has_work:
        held = core.scheduler.pool.ref_count[1:].astype(bool).sum()
        tokens = int(core.scheduler.table.num_tokens[0])
        assert held <= -(-tokens // (4 * RATIO)) + 7
        most = max(most, int(held))
        core.step()
    assert core.inbox.received[0, 1].tokens == expected_tokens(message, 600)
    assert most <= 11 + 7 < 50  # all layers' blocks of 220 tokens are 55


@pytest.mark.parametrize(("pages", "expected"), [(0, 1), (RATIO, 4)])
def test_as_many_long_requests_run_as_their_pages_allow(pages: int, expected: int) -> None:
    """200 to 260 tokens are 50 to 65 blocks: of them 72 have the memory of 60 pages, so one request runs.

    In pages they are 10 to 13 of the full layers, and 3 or 4 of windows; but 10 + 7 to begin with. So a fourth begins
    beside three, which hold 3 * (11 + 3) of the 60, and no fifth.
    """
    given = {} if pages else {"kv_window": 0, "kv_page_blocks": 0}
    core = Driver(paged(61 if pages else 61 * 6 // 5, budget=16, max_num_seqs=8, max_model_len=280, **given))
    messages = [add_message(n, [(n * 211 + token) % 900 + 3 for token in range(200)], 60) for n in range(5)]
    core.step([(0, message) for message in messages])
    most = 0
    while core.engine.has_work:
        core.step()
        most = max(most, core.scheduler.get_request_counts()[0])
    assert most == expected
    assert core.scheduler.stats.num_preemptions == 0
    for message in messages:
        assert core.inbox.received[0, message.number].tokens == expected_tokens(message, 280)


def test_what_never_fits_is_refused_with_the_pages() -> None:
    core = Driver(paged(20, budget=16, max_model_len=2000))
    core.step([(0, add_message(1, range(3, 242), 2)), (0, add_message(2, range(3, 243), 2))])
    core.drain()
    failed = core.inbox.received[0, 2].failed
    assert len(core.inbox.received[0, 1].tokens) == 2
    assert failed is not None
    assert "may need 20 KV blocks for 241 tokens, and there are 19" in failed.message


def test_a_hit_ends_where_its_windows_blocks_are_gone() -> None:
    """The first prompt's blocks are found at its end only; in its middle those of the window are taken by another."""
    core = Driver(paged(24, budget=16, max_model_len=400))
    first = list(range(3, 103))
    core.run(add_message(1, first, 2))
    assert core.run(add_message(2, [*first, 7], 2))[0].cached == 100
    middle = core.run(add_message(3, [*first[:50], 8], 2))[0].cached
    assert middle == 48  # whatever was freed is there still
    core.run(add_message(4, range(300, 400), 2))
    again = core.run(add_message(5, [*first[:50], 9], 2))[0]
    assert again.cached is not None
    assert again.cached < 48
    assert again.tokens == expected_tokens(add_message(5, [*first[:50], 9], 2), 400)
    found = core.run(add_message(6, [*first[:50], 9], 2))[0]
    assert found.cached == 48  # computed again, and found beside the blocks that had stayed


def test_a_request_with_all_its_blocks_resumes_after_its_preemption() -> None:
    hand = ByHand(paged(60, budget=32, max_model_len=300))
    hand.add(add_message(1, range(3, 90), 30))
    for _ in range(10):
        hand.step()
    scheduler = hand.scheduler
    scheduler.preemption.preempt(Draft(0, 0, 0), int(scheduler.running[0]), Cause.MORE_URGENT)
    scheduler.check_integrity()
    for _ in range(60):
        hand.step()
        scheduler.check_integrity()
    assert not scheduler.has_unfinished_requests
    assert scheduler.stats.num_recomputed_tokens < 8  # it has found the rest


@pytest.mark.parametrize("pages", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"depth": 2, "num_blocks": 150, "budget": 9}])
def test_beam_searches_have_their_results(pages: int, options: dict[str, Any]) -> None:
    core = driver(kv_window=WINDOW, kv_page_blocks=pages, **options)
    messages = some_messages(pages, 8)
    assert all(len(message.prompt_token_ids) // 4 < MAX_LEN for message in messages)
    core.step([(0, message) for message in messages])
    core.drain()
    for message in messages:
        check(core, message)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [41, 44, 45, 2])
def test_choices_share_the_prompts_blocks_of_both_kinds(length: int, prefix_caching: bool) -> None:
    core = Driver(paged(100, budget=16, prefix_caching=prefix_caching, max_model_len=80))
    message = add_message(1, range(3, 3 + length), 30, temperature=1.0, n=4)
    core.step([(0, message)])
    core.drain()
    for choice in range(4):
        assert core.inbox.received[0, 1 + choice].tokens == expected_tokens(message, 80, choice)
    assert core.scheduler.stats.num_scheduled_tokens == length + 3 + 4 * 29
