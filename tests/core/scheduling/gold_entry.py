"""What the gold model keeps of a request and of a KV block."""

from dataclasses import dataclass, field

Key = tuple[int | str, tuple[int, ...]]  # (name of the block before it, or the salt; its tokens)


@dataclass(eq=False, slots=True)
class Block:
    """A KV block that somebody holds, or that has content."""

    owners: int = 1
    name: int = 0  # of its content; 0: nobody can find that
    fence: int = 0  # steps in flight to wait for
    urgency: int = 0  # of its last user


@dataclass(eq=False, slots=True)
class Entry:
    """A live request."""

    number: int
    client: int
    serial: int
    priority: int
    arrival: int
    tokens: list[int]
    max_total: int
    salt: str
    eos: int
    party: int  # under policy fair: its client, or its tenant's negative number
    rank: int = 0
    urgency: int = 0  # of policy priority: 1, 0, -1; the blocks of the less urgent are evicted first
    blocks: list[Block] = field(default_factory=list)
    seen: list[Block] = field(
        default_factory=list
    )  # pages of layers with a window, where these have blocks of their own
    gone: int = 0  # of blocks, or of seen, the first ones: given back, because the window has passed them
    content: int | str = ""  # name of the last of the named blocks
    named: int = 0
    computed: int = 0
    pending: int = 0  # tokens that steps in flight sample
    n: int = 0  # tokens that it gets in this step
    stay: int = 0  # counts its times in a row
    served: int = 0  # most tokens it had computed when it was preempted
    kept: int = 0  # tokens copied to the host
    begun: bool = False
    whole: bool = False  # starts with all the blocks that it can need
    preemptions: int = 0  # for other running rows
    first: int = 0  # tokens of its prompt
    choices: list["Entry"] = field(default_factory=list)  # of its message, itself included; empty: it is alone
    known: int = 0  # with recurrent layers: tokens of its first blocks that were found
    wanted_places: list[int] = field(default_factory=list)  # tokens after which pins want a recurrent state
    hits: int = 0  # blocks that it found when it started
    follows: bool = False  # another one computes their prompt
    drafts: list[int] = field(default_factory=list)  # guesses of its next tokens, in the step that is planned

    def wanted(self) -> int:
        """Tokens that it could compute now; its last one is never computed."""
        known = len(self.tokens) + self.pending
        return known - self.computed if known < self.max_total else 0

    def advance(self) -> bool:
        """Advance by the tokens of this step; return whether it samples."""
        self.computed += self.n
        samples = self.computed == len(self.tokens) + self.pending
        self.pending += samples and not self.drafts  # how many tokens drafts give is not known yet
        return samples

    def take(self, token: int) -> bool:
        """A sampled token has come; whether it was the last."""
        self.tokens.append(token)
        self.pending = max(0, self.pending - 1)
        return token == self.eos or len(self.tokens) == self.max_total
