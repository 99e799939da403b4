"""The host keeps both kinds of blocks, where layers with a window have blocks of their own; each may go alone."""

import numpy as np

from core.batch.batch import Batch
from core.batch.host_beside import HostBeside
from core.batch.host_cache import HostCache
from core.batch.request import Request, request_from_message
from ipc.tables.arrays import Int32s, Ints
from ipc.wire.messages import ResetPrefixCache
from tests.core.batch.test_host_cache import BLOCK, cached, prompt
from tests.core.driving import Driver, add_message, small_config

PAGE = 2  # blocks
NUM_SEEN = 2  # blocks of a window


def driver_of(num_host_blocks: int, num_blocks: int = 24, **options: object) -> tuple[Driver, Batch, HostCache]:
    pages: dict[str, object] = {"kv_window": 9, "kv_page_blocks": PAGE, "max_model_len": 52, **options}
    driver = Driver(small_config(num_blocks, num_host_blocks=num_host_blocks, **pages))  # type: ignore[arg-type]
    batch = driver.scheduler.batch
    return driver, batch, batch.host_cache


def own(host: HostCache) -> HostBeside:
    (beside,) = host.beside
    return beside


def request(batch: Batch, tokens: list[int]) -> Request:
    made = request_from_message(add_message(0, tokens, 1), 0, 0, 52)
    batch.prefix_cache.prepare(made)
    return made


def found(batch: Batch, tokens: list[int]) -> Int32s:
    """The blocks of layers that see everything in the cache."""
    return batch.prefix_cache.find_all(request(batch, tokens))[0]


def evict(batch: Batch, pages: Ints) -> None:
    """Let free pages go as when others need them."""
    for tier in batch.pool.tiers:
        tier.keep(pages)
    batch.pool._forget(pages)
    here = [page for page in pages.tolist() if batch.pool._rings[0].holds(np.array([page]))[0]]
    batch.pool._rings[0].discard(np.array(here, np.int64))
    batch.pool._push_blank(np.array(here, np.int64))


def test_both_kinds_come_back_and_the_window_only_of_one() -> None:
    driver, _, host = driver_of(80)
    assert cached(driver, prompt(0)) == 0
    assert cached(driver, prompt(100)) == 0
    assert cached(driver, prompt(200)) == 0
    before = host.num_hits
    assert cached(driver, prompt(0)) == 8 * BLOCK
    assert host.num_hits - before <= 8 + NUM_SEEN * PAGE


def test_a_block_of_a_window_goes_as_a_whole() -> None:
    """With an odd number of slots one is left over; what has lost a slot is not found."""
    driver, _, host = driver_of(7)
    for number in range(6):
        cached(driver, prompt(100 * number))
    assert host.num_kept <= 7
    assert len(np.unique(own(host).content[own(host).content > 0])) * PAGE == np.count_nonzero(own(host).content)


def test_without_its_window_a_prefix_is_shorter() -> None:
    driver, batch, host = driver_of(80)
    cached(driver, prompt(0))
    blocks = found(batch, prompt(0))
    evict(batch, batch.pool.names.beside[0].found[blocks[[7]]] // PAGE)
    driver.step()
    host.forget_contents(np.zeros(0, np.int64))
    assert cached(driver, prompt(0)) == 8 * BLOCK, "the host has it"
    evict(batch, batch.pool.names.beside[0].found[found(batch, prompt(0))[[7]]] // PAGE)
    host._release(own(host).forget(batch.pool.names.content[blocks[[7]]]))
    assert cached(driver, prompt(0)) == 7 * BLOCK


def test_what_lies_beside_an_evicted_block_is_copied_unless_a_row_holds_it() -> None:
    """A row's page may be one that only the step being planned computes."""
    driver, batch, host = driver_of(80)
    cached(driver, prompt(0))
    blocks, names = found(batch, prompt(0)), batch.pool.names
    beside, contents = names.beside[0].found[blocks[:2]], names.content[blocks[:2]]
    batch.pool.ref_count[beside[1] // PAGE] += 1
    evict(batch, blocks[:1] // PAGE)
    batch.pool.ref_count[beside[1] // PAGE] -= 1
    assert (own(host).leads_of(contents) >= 0).tolist() == [True, False]


def test_a_copy_whose_name_the_cache_has_is_not_found_twice() -> None:
    """The beginning has gone from the cache, and the host has all of it: the rest is there twice."""
    driver, batch, host = driver_of(80, 40)
    cached(driver, prompt(0))
    blocks = found(batch, prompt(0))
    evict(batch, np.unique(blocks // PAGE))
    assert cached(driver, prompt(0)) == 8 * BLOCK
    assert host.num_kept >= 8 + NUM_SEEN * PAGE
    evict(batch, found(batch, prompt(0))[:1] // PAGE)
    assert cached(driver, prompt(0)) == 8 * BLOCK
    driver.scheduler.check_integrity()


def test_a_reset_empties_the_host_too() -> None:
    driver, _, host = driver_of(80)
    for number in range(3):
        cached(driver, prompt(100 * number))
    assert host.num_kept > 0
    driver.step([(0, ResetPrefixCache(1))])
    assert host.num_kept == 0
    assert not own(host).content.any()
    assert cached(driver, prompt(0)) == 0
