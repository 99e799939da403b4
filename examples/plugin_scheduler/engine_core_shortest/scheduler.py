"""Shortest remaining job first: the request with the fewest tokens left to sample goes first.

A new request takes the row, blocks and token budget of running requests that have more left. So short answers do not
wait for long ones. A long request can wait forever while shorter ones keep coming.
"""

import numpy as np

from engine_core.schedulers import (
    BatchTable,
    Bools,
    ConfigError,
    Fcfs,
    Ints,
    Line,
    ModelInfo,
    Request,
    ResolvedConfig,
    Scheduler,
    create_scheduler,
)

#: The version of engine_core.schedulers for which this module is written.
SCHEDULER_API = (1, 0)


def tokens_left(request: Request) -> int:
    """Return how many tokens a waiting request may still sample."""
    return request.max_total_tokens - len(request.token_ids)


class ShortestLine(Line):
    """Waiting requests. One that was preempted has fewer tokens left than when it arrived."""

    def push(self, request: Request) -> None:
        """Add a request in its place by the tokens that it has left."""
        request.rank = tokens_left(request)
        super().push(request)


class ShortestRemaining(Fcfs):
    """The built-in policy fcfs, with another order. The methods are described in engine_core.schedulers.Policy."""

    def __init__(self, table: BatchTable) -> None:
        super().__init__(table)
        self.line = ShortestLine()

    def _left(self, rows: Ints) -> Ints:
        """Return the tokens that running rows have left, int64 [n]."""
        return self._table.max_total_tokens[rows] - self._table.num_tokens[rows]

    def in_order(self, rows: Ints) -> Ints:
        """Return the rows in the order in which they are served; ties by arrival."""
        return rows[np.lexsort((self._table.serial[rows], self._left(rows)))]

    def must_yield(self, request: Request, rows: Ints) -> Bools:
        """Return which rows give way to this waiting request: those with more tokens left."""
        return self._left(rows) > tokens_left(request)

    def victim_keys(self, rows: Ints) -> tuple[Ints, ...]:
        """Return the tokens left: the row with the most is preempted first."""
        return (self._left(rows),)


def create(config: ResolvedConfig, info: ModelInfo, epoch: int) -> Scheduler:
    """Return the scheduler of an engine. Errors: ConfigError."""
    if config.scheduling_policy != "fcfs":
        raise ConfigError(
            f"scheduler 'shortest' has an order of its own: leave scheduling_policy={config.scheduling_policy!r} out"
        )
    return create_scheduler(config, info, epoch, policy=lambda config, table: ShortestRemaining(table))
