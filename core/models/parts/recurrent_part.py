"""RecurrentPart: a rank's part of layers with a recurrent state: some of their heads, or of their channels.

A rank's heads have all that their state needs: ranks whose heads are of one group all compute its keys and queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from core.models.config import RecurrentParts
from core.models.parts.ranges import Range, groups_of, part_of, split_heads

#: What the rows of a matrix, or the elements of a vector, are of: queries, keys, values, gates, or one number for each
#: head; x: channels of a short convolution. By the kind of layer, then by our name without the ending.
_PIECES = {
    "short convolution": {"in_proj": "xxx", "convolution": "x"},
    "gated delta": {
        "in_proj": "qkvzhh",
        "qkv_proj": "qkv",
        "z_proj": "z",
        "b_proj": "h",
        "a_proj": "h",
        "q_proj": "q",
        "k_proj": "k",
        "v_proj": "v",
        "qkvz_proj": "qkvz",
        "ba_proj": "hh",
        "convolution": "qkv",
        "q_convolution": "q",
        "k_convolution": "k",
        "v_convolution": "v",
        "rates": "h",
        "step": "h",
    },
    "state space": {"in_proj": "zvkqh", "convolution": "vkq", "rates": "h", "step": "h", "skips": "h"},
}


class RecurrentPart(NamedTuple):
    """One rank's heads, which are some of each turn if heads take turns, or channels.

    whole: of all ranks. heads: those of each turn; one turn if heads take none. columns: of a turn in a row of results.
    """

    whole: RecurrentParts
    heads: tuple[Range, ...]
    groups: Range
    columns: Range

    @property
    def own(self) -> RecurrentParts:
        """Return the properties of layers with the rank's heads."""
        whole = self.whole
        if whole.kind == "short convolution":
            return msgspec.structs.replace(whole, channels=self.columns.length)
        num_heads = sum(one.length for one in self.heads)
        channels = 2 * self.groups.length * whole.key_dim + num_heads * whole.value_dim
        return msgspec.structs.replace(whole, num_heads=num_heads, num_groups=self.groups.length, channels=channels)

    @property
    def rows(self) -> dict[str, Sequence[Range]]:
        """Return the rank's rows of each matrix and vector of a layer, by our name without the ending."""
        whole = self.whole
        widths = {
            **dict.fromkeys("qk", whole.num_groups * whole.key_dim),
            **dict.fromkeys("vz", whole.num_heads * whole.value_dim),
            "h": whole.num_heads,
            "x": whole.channels,
        }
        own: dict[str, Sequence[Range]] = {
            **dict.fromkeys("qk", (self.groups.times(whole.key_dim),)),
            **{piece: [one.times(whole.value_dim) for one in self.heads] for piece in "vz"},
            "h": self.heads,
            "x": (self.columns,),
        }
        rows: dict[str, Sequence[Range]] = {}
        for name, pieces in _PIECES[whole.kind].items():
            rows[f"mixer.{name}"] = [
                one.moved(sum(widths[before] for before in pieces[:place]))
                for place, piece in enumerate(pieces)
                for one in own[piece]
            ]
        return rows


def part_of_recurrent(whole: RecurrentParts, rank: int, size: int) -> RecurrentPart:
    """Return a rank's part of layers with these properties. size: most_ranks() at most."""
    if whole.kind == "short convolution":
        return RecurrentPart(whole, (), Range(0, 1), part_of(whole.channels, rank, size))
    heads, groups, count = whole.num_heads, whole.num_groups, num_turns(whole)
    if whole.takes_turns:
        own = part_of(groups, rank, size)
        turns = tuple(own.moved(turn * groups) for turn in range(count))
        return RecurrentPart(whole, turns, own, own.times(whole.value_dim))
    own = split_heads(heads, (groups,), rank, size)
    return RecurrentPart(whole, (own,), groups_of(own, heads // groups), own.times(whole.value_dim))


def num_turns(whole: RecurrentParts) -> int:
    """Return how many parts a row of results has, each with heads of all groups."""
    return whole.num_heads // whole.num_groups if whole.takes_turns else 1


def most_ranks(whole: RecurrentParts) -> int:
    """Return how many ranks can have a part of these layers."""
    if whole.kind == "short convolution":
        return whole.channels
    return whole.num_groups if whole.takes_turns else whole.num_heads
