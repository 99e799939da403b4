"""Range: consecutive items, and the shares of ranks in them."""

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


def split_heads(num_heads: int, num_groups: int, rank: int, size: int) -> tuple[Range, Range]:
    """Return a rank's heads, and their groups, of consecutive heads each: whole groups with all their heads.

    If there are fewer groups than ranks, several ranks have the same group and share its heads.
    """
    each = num_heads // num_groups
    if size <= num_groups:
        groups = part_of(num_groups, rank, size)
        return groups.times(each), groups
    owner = rank * num_groups // size
    ranks = [one for one in range(size) if one * num_groups // size == owner]
    own = part_of(each, ranks.index(rank), len(ranks))
    return own.moved(owner * each), Range(owner, owner + 1)
