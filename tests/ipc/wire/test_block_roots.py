"""Roots of the prefix cache: what differs in any part has another root, whatever the parts look like side by side."""

import random

from ipc.wire.block_roots import CACHE_SALT, PLAIN_ROOT, root_content, root_of_salt


def test_roots_are_the_same_in_every_process() -> None:
    assert root_of_salt("s") == -2028016272843373306
    assert root_content([("salt", b"s"), ("adapter", b"x")]) == -3731330982574180771


def test_without_parts_the_root_is_plain() -> None:
    assert root_of_salt("") == root_content([]) == root_content([("salt", b""), ("adapter", b"")]) == PLAIN_ROOT == -1


def test_an_empty_part_is_no_part() -> None:
    assert root_of_salt("a") == root_content([(CACHE_SALT, b"a"), ("adapter", b"")])


def test_parts_never_run_into_one_another() -> None:
    """Lists that are equal when their tags and values are strung together, and random ones of two letters."""
    lists = {
        (("salt", b"ab"),),
        (("salt", b"a"), ("b", b"\0")),
        (("salta", b"b"),),
        (("sal", b"tab"),),
        (("salt", b"a"), ("salt", b"b")),
        (("salt", b"b"), ("salt", b"a")),
        (("adapter", b"ab"),),
        (("salt", b"ab\0"),),
        # A value that looks like the frame of a second part.
        (("salt", b"a" + (1).to_bytes(8, "little") + b"t" + (1).to_bytes(8, "little") + b"v"),),
        (("salt", b"a"), ("t", b"v")),
    }
    rng = random.Random(0)
    for _ in range(3000):
        pairs = []
        for _ in range(rng.randrange(1, 5)):
            value = bytes(rng.choices(b"ab", k=rng.randrange(1, 4)))
            pairs.append((rng.choice(["a", "b", "ab", "ba", ""]), value))
        lists.add(tuple(pairs))
    roots = [root_content(parts) for parts in lists]
    assert len(set(roots)) == len(lists) > 1000
    assert all(-(2**63) <= root < PLAIN_ROOT for root in roots)
