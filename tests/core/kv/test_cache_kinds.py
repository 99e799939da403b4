"""How many pages requests take, with one kind of layers and with several; compared with plain counting."""

import numpy as np
import pytest

from core.kv.cache_kinds import CacheKind, CacheRoom, cache_room, room_of
from tests.core.driving import small_config

SIZE = 4
ROOMS = {
    "one kind": CacheRoom((CacheKind(SIZE, 1),)),
    "one kind with a window": CacheRoom((CacheKind(SIZE, 1, 9),)),
    "two kinds": CacheRoom((CacheKind(SIZE, 3), CacheKind(SIZE, 1, 9, 5))),
    "pages of one block": CacheRoom((CacheKind(SIZE, 1), CacheKind(SIZE, 1, 9, 5))),
    "three kinds": CacheRoom((CacheKind(SIZE, 2), CacheKind(SIZE, 1, 9, 5), CacheKind(SIZE, 1, 1, 2))),
}


def passed(num_tokens: int, window: int) -> int:
    """Blocks that the token at this place does not see, counted one by one."""
    return sum((block + 1) * SIZE <= num_tokens - window + 1 for block in range(num_tokens))


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_the_longest_request_is_the_last_that_fits(room: CacheRoom) -> None:
    for num_pages in range(1, 40):
        longest = room.longest(num_pages)
        assert room.num_pages(longest) <= num_pages < room.num_pages(longest + 1)


def test_a_request_takes_pages_of_each_kind() -> None:
    assert [ROOMS["one kind"].num_pages(tokens) for tokens in (1, 4, 5, 40)] == [1, 1, 2, 10]
    assert [ROOMS["one kind"].num_pages(tokens, keeps_blocks=True) for tokens in (1, 40)] == [1, 10]
    assert [ROOMS["two kinds"].num_pages(tokens) for tokens in (1, 12, 13, 400)] == [1 + 1, 1 + 3, 2 + 4, 34 + 5]
    assert ROOMS["two kinds"].num_pages(400, keeps_blocks=True) == 34 + 1 + 100
    assert ROOMS["three kinds"].num_pages(400) == 50 + 5 + 2


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_a_prefix_is_usable_if_all_windows_behind_it_are_there(room: CacheRoom) -> None:
    rng, others = np.random.default_rng(3), room.kinds[1:]
    for _ in range(50):
        are_there = [rng.random(12) < 0.7 for _ in others]
        usable = max(
            count
            for count in range(13)
            if all(
                there[passed(count * SIZE, kind.window) : count].all()
                for kind, there in zip(others, are_there, strict=True)
            )
        )
        assert room.num_usable(12, are_there) == usable
        for kind, there in zip(others, are_there, strict=True):
            missing = [int((~there[passed(count * SIZE, kind.window) : count]).sum()) for count in range(13)]
            assert kind.num_missing(there).tolist() == missing


def test_what_a_row_holds_of_a_window_is_bounded_by_window_and_step() -> None:
    """A window of 9 tokens and a step of 64 begin within a block: 72 tokens are in 19 blocks of 4 at most."""
    config = small_config(kv_window=9, kv_page_blocks=3)
    assert room_of(config) == CacheRoom((CacheKind(SIZE, 3), CacheKind(SIZE, 1, 9, 19)))
    assert room_of(config) == cache_room(config, 9, 3, 64)
    assert room_of(small_config(kv_window=9)) == CacheRoom((CacheKind(SIZE, 1, 9),))
