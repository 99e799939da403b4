"""Range: consecutive items, and the shares of ranks in them."""

from collections.abc import Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Consecutive items: from `first` to before `last`."""

    first: int
    last: int

    @property
    def length(self) -> int:
        """Return the number of items."""
        return self.last - self.first

    def times(self, size: int) -> "Range":
        """Return the range of the parts of these items, which have `size` parts each."""
        return Range(self.first * size, self.last * size)

    def moved(self, count: int) -> "Range":
        """Return the range of the items that are `count` behind these."""
        return Range(self.first + count, self.last + count)


def part_of(count: int, rank: int, size: int, unit: int = 1) -> Range:
    """Return a rank's share of `count` items: whole units except for the last one, if there are enough of them."""
    unit = unit if count >= unit * size else 1
    units = -(-count // unit)
    first, last = (min(count, units * one // size * unit) for one in (rank, rank + 1))
    return Range(first, last)


def split_heads(num_heads: int, counts: Sequence[int], rank: int, size: int) -> Range:
    """Return a rank's heads, of groups of consecutive heads: whole groups with all their heads.

    If there are fewer groups than ranks, several ranks have the same group and share its heads. counts: of the groups;
    then of those that they consist of, if heads are grouped in several ways. Each is a multiple of the one before.
    """
    num_groups, *finer = counts
    each = num_heads // num_groups
    if size <= num_groups:
        return part_of(num_groups, rank, size).times(each)
    owner = rank * num_groups // size
    ranks = [one for one in range(size) if one * num_groups // size == owner]
    inner = [count // num_groups for count in finer] or [each]
    return split_heads(each, inner, ranks.index(rank), len(ranks)).moved(owner * each)


def groups_of(heads: Range, each: int) -> Range:
    """Return the groups of `each` consecutive heads that these heads belong to."""
    return Range(heads.first // each, -(-heads.last // each))
