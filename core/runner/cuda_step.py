"""CudaStep: the handle of a step in flight. Sampled: the tokens that it samples, on their way to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from core.execution.plan import FAILED_TOKEN, NO_TOKEN, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from core.runner.accepted import accepted_of
from core.runner.host_rows import HostRows
from core.sampling.logprobs import gather_logprobs
from ipc.tables.arrays import NO_INTS, Bools, Int32s, Ints


class CudaStep:
    """The handle of a step in flight."""

    def __init__(self, event: torch.cuda.Event | None, finish: Callable[[], ModelRunnerOutput]) -> None:
        """event: follows the step's work; None if the work has finished already.

        finish: makes the output after that.
        """
        self._event, self._finish = event, finish
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the step's output has been taken."""
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        """Return the step's output. The first call waits for the device."""
        if self._output is None:
            if self._event is not None:
                self._event.synchronize()
            self._output = self._finish()
        return self._output


@dataclass(frozen=True)
class Sampled:
    """The S tokens and logits of a step's samples, one per sampling row, while they are copied to the host."""

    rows: Int32s  # [S]
    in_plan: Ints  # [S] index in the plan's rows
    positions: Ints  # [S] positions of the new tokens in their rows
    tenancies: Ints  # [S] tenancies of the rows when the step was launched
    tokens: torch.Tensor  # [S] int32, host memory; valid after the event
    reporting: Ints  # indices of the samples that report log probabilities
    num_top: Ints  # [len(reporting)] number of top tokens to report
    reported: torch.Tensor  # [len(reporting), vocab] their logits, in host memory; valid after the event
    draws: Bools  # [S] whether the row gets the token; beam search rows do not
    candidates: LogprobColumns | None  # of beam search rows

    @property
    def counted(self) -> Int32s:
        """Return the rows whose tokens the host's table counts at launch, so that the next step can continue them."""
        return self.rows[self.draws]

    def logprobs(self, *, normalized: bool) -> list[LogprobColumns]:
        """Return the log probabilities of the samples that report any."""
        if not len(which := self.reporting):
            return []
        # arbitrary for a failed sample; the scheduler drops its entry
        tokens = np.maximum(self.tokens.numpy()[which], 0)
        return [
            gather_logprobs(
                self.reported.numpy(),
                tokens,
                self.num_top,
                self.in_plan[which],
                self.positions[which],
                normalized=normalized,
            )
        ]

    def take(self, num_rows: int) -> tuple[Int32s, Int32s | None, Ints]:
        """Return token_ids and counts of ModelRunnerOutput, and the samples that failed. num_rows: R of the plan."""
        tokens = self.tokens.numpy()
        token_ids = np.full(num_rows, NO_TOKEN, np.int32)
        kept = np.where(self.draws, tokens, NO_TOKEN)
        token_ids[self.in_plan] = np.where(tokens >= 0, kept, FAILED_TOKEN)
        return token_ids, None, np.flatnonzero(tokens < 0)

    def tell(self, host: HostRows) -> None:
        """Add the tokens to the host's table."""
        self._tell(host, self.draws)

    def _tell(self, host: HostRows, mine: Bools) -> None:
        tokens = np.maximum(self.tokens.numpy()[mine], 0)  # a failed row gets a token too
        host.learn(self.rows[mine], self.positions[mine], self.tenancies[mine], tokens)


@dataclass(frozen=True)
class SampledBehindDrafts(Sampled):
    """The samples of a step in which rows have drafts: one after a row's known tokens, and one after each draft.

    A row with drafts gets nothing in the next step. So its tokens are counted once they are known, and only the host
    works out how many of them are kept. The device has written all of them to its table.
    """

    offsets: Ints  # [S] drafts before each sample: 0, 1, ... in a row
    drafts: Int32s  # [S] the draft at the sample's position; -1 at a row's last sample
    is_drafted: Bools  # [S] whether the sample's row has drafts

    @property
    def counted(self) -> Int32s:
        """Return the rows without drafts."""
        return self.rows[self.draws & ~self.is_drafted]

    def take(self, num_rows: int) -> tuple[Int32s, Int32s | None, Ints]:
        """Return token_ids and counts of ModelRunnerOutput, and the samples that failed."""
        tokens = self.tokens.numpy()
        kept = self._kept() & (self.draws | (tokens < 0))
        counts = np.bincount(self.in_plan[kept], minlength=num_rows).astype(np.int32)
        token_ids = np.where(tokens[kept] >= 0, tokens[kept], FAILED_TOKEN).astype(np.int32)
        return token_ids, counts, np.flatnonzero(kept & (tokens < 0))

    def tell(self, host: HostRows) -> None:
        """Add the tokens of rows without drafts, and the accepted ones of the others, to the host's table."""
        self._tell(host, self.draws & ~self.is_drafted)
        tokens = self.tokens.numpy()
        kept = self._kept() & self.is_drafted & (tokens >= 0)
        firsts = np.flatnonzero(kept & (self.offsets == 0))
        counts = np.add.reduceat(kept, firsts, dtype=np.int64) if len(firsts) else NO_INTS
        host.accept(self.rows[firsts], self.tenancies[firsts], tokens[kept], counts)

    def _kept(self) -> Bools:
        return accepted_of(self.rows, self.offsets, self.tokens.numpy(), self.drafts)


def behind_drafts(sampled: Sampled, plan: SchedulerOutput, offsets: Ints) -> SampledBehindDrafts:
    """Return the samples of a plan with drafts. offsets [S]: drafts before each sample."""
    num_drafts = plan.num_draft_tokens[sampled.in_plan]
    drafts = np.full(len(offsets), -1, np.int32)
    drafts[offsets < num_drafts] = plan.draft_token_ids
    return SampledBehindDrafts(**vars(sampled), offsets=offsets, drafts=drafts, is_drafted=num_drafts > 0)
