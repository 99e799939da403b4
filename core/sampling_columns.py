"""SamplingColumns: what the sampler must know of each row, as columns of the runner's table."""

import numpy as np

from core.plan import NewRow
from core.runner_table import RunnerTable
from core.sampler import SamplingInputs
from ipc.paged_rows import Ints


class SamplingColumns:
    """temperature, top_k, top_p, min_p, seed [rows]; and the index group of rows with min_tokens, whose EOS and stop
    tokens are forbidden until their output is so long."""

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self._eos_token_ids = eos_token_ids
        self._forbidden_row = np.zeros(0, np.int64)  # entries of the index group: row and token id
        self._forbidden_token = np.zeros(0, np.int64)

    def remove(self, row: int) -> None:
        if self.min_tokens[row]:
            kept = self._forbidden_row != row
            self._forbidden_row, self._forbidden_token = self._forbidden_row[kept], self._forbidden_token[kept]
            self.min_tokens[row] = 0

    def add(self, new: NewRow) -> None:
        row, params = new.row, new.params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.min_tokens[row] = params.min_tokens
        if params.min_tokens:
            stop_token_ids = params.stop_token_ids or []
            tokens = [*stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
            self._forbidden_row = np.concatenate([self._forbidden_row, np.full(len(tokens), row)])
            self._forbidden_token = np.concatenate([self._forbidden_token, np.array(tokens, np.int64)])

    def inputs(self, rows: Ints, table: RunnerTable) -> SamplingInputs:
        """The columns of these rows [S], in their order, for the token that each is about to get."""
        positions = table.num_tokens[rows] - table.num_prompt_tokens[rows]
        index = token = np.zeros(0, np.int64)
        if len(self._forbidden_row):
            place = np.full(len(self.seed), -1)
            place[rows[positions < self.min_tokens[rows]]] = np.flatnonzero(positions < self.min_tokens[rows])
            active = place[self._forbidden_row] >= 0
            index, token = place[self._forbidden_row[active]], self._forbidden_token[active]
        return SamplingInputs(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=positions,
            forbidden_row=index,
            forbidden_token=token,
        )
