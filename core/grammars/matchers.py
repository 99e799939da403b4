"""RowMatchers: the matchers of the batch's constrained rows. A matcher tracks a row's position in its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from core.grammars.compilation import TOO_LONG, is_of_lexer, is_too_long, why_failed
from core.grammars.grammars import Grammars
from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.tables.arrays import NO_INT32S, Bools, Int32s, Rows, TokenIds, UInt32s

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NOTHING_LEFT = (
    "structured_outputs allow no token here that the request's other parameters (min_tokens, bad_words, logit_bias, "
    "allowed_token_ids) allow too, or the logits are not finite"
)
_MAX_ERROR_CHARS = 500
#: Forced tokens of a row that are drafts in one step. Each needs a mask, and a hostile grammar's takes milliseconds.
_MAX_FORCED = 8
#: Drafts of a row times the tokens of its whole forced text, which is tokenized again for each mask: about 3 us each.
_MAX_FORCED_WORK = 2048
#: How often a row's matcher may be rebuilt; see _renewed().
_MAX_RENEWALS = 2


class _Row:
    """A constrained row: its matcher, and what is needed to rebuild it."""

    # The model has evicted rows from the CPU caches between steps, so each row is a single object.
    __slots__ = (
        "draft_failed", "error", "is_free", "matcher", "num_renewals", "output", "params", "takes_drafts"
    )  # fmt: skip

    def __init__(self, params: StructuredOutputsParams, *, takes_drafts: bool) -> None:
        self.params = params  # keeping them alive keeps the grammar compiled
        self.output: list[int] = []  # tokens that the matcher has consumed
        self.matcher: LLMatcher | None = None
        self.error = ""  # of the compilation
        self.num_renewals = 0
        self.draft_failed = False  # a token that was only tried has failed the matcher; the row's own tokens may not
        self.takes_drafts = takes_drafts
        self.is_free = False  # nothing is forced at the matcher's position


class RowMatchers:
    """The matchers by row. A row's matcher has consumed the row's output tokens, and no drafts.

    A row that resumes is added with its output, so its matcher is where it was.
    """

    def __init__(self, grammars: Grammars, num_rows: int) -> None:
        self._grammars = grammars
        self._rows: dict[int, _Row] = {}
        self.offers_drafts = True  # False for measurements
        self.is_constrained: Bools = np.zeros(num_rows, np.bool_)
        self._forced: dict[int, list[int]] = {}  # tokens for which the grammar leaves no choice now; by row, not empty
        self._taken: dict[int, int] = {}  # token from take() that has not been appended yet; by row
        self._masks: UInt32s = np.zeros((0, 0), np.uint32)

    def __len__(self) -> int:
        """Return the number of constrained rows."""
        return len(self._rows)

    def add(self, row: int, params: StructuredOutputsParams, output: TokenIds, *, takes_drafts: bool = True) -> None:
        """Add a row with the tokens of its output so far. takes_drafts: whether it may get several tokens in a step."""
        self.is_constrained[row] = True
        added = self._rows[row] = _Row(params, takes_drafts=takes_drafts)
        added.output = output.tolist()
        try:
            added.matcher = self._grammars.matcher(params)
        # only in a replay: otherwise the preparation thread has refused the request
        except InvalidRequestError as error:
            added.error = str(error)
        else:
            added.matcher.consume_tokens(added.output)
        self._settle(row, added)

    def remove(self, row: int) -> None:
        """Remove the row; a row that was not added is ignored."""
        if self.is_constrained[row]:
            self.is_constrained[row] = False
            self._forced.pop(row, None)
            self._taken.pop(row, None)
            del self._rows[row]

    def take(self, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Let the matcher of each of these distinct constrained rows [n] consume its token [n] if it is allowed.

        Return (refused, closed): the indices of rows that may not have this token, and of those that need a mask.
        tokens: below 0 = none. Call append() afterwards with the tokens that were taken. If the text is free, taking a
        token needs a tenth of the time of a mask. If it is forced, no token is taken, because a mask allows only the
        first token of the forced text, although others would match too.
        """
        refused, closed, num_tokens = list[int](), list[int](), self._grammars.num_tokens
        for index, (number, token) in enumerate(zip(rows, tokens, strict=True)):
            row = self._rows.get(number)
            if row is None:
                continue
            matcher = row.matcher
            if matcher is None or not row.is_free or not 0 <= token < num_tokens:
                closed.append(index)
            elif not matcher.try_consume_tokens([token]):
                row.draft_failed = matcher.is_error()
                (closed if row.draft_failed else refused).append(index)
            else:
                row.output.append(token)
                self._taken[number] = token
                if matcher.compute_ff_bytes() or matcher.is_stopped():  # otherwise it is as before: free
                    self._settle(number, row)
        return refused, closed

    def append(self, rows: Rows, token_ids: TokenIds) -> None:
        """Let each constrained one of these rows [n] consume a token [n], unless take() has already done so.

        A row's tokens must be in order.
        """
        moved: dict[int, _Row] = {}
        for number, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if self._taken and (taken := self._taken.pop(number, None)) is not None:
                assert taken == token, f"row {number} got token {token} and had taken {taken}"
            elif (row := self._rows.get(number)) is not None:
                row.output.append(token)
                if row.matcher is not None:
                    row.matcher.consume_token(token)
                moved[number] = row
        for number, row in moved.items():
            self._settle(number, row)

    def masks(self, rows: Rows, drafts: Sequence[Sequence[int]] | None = None) -> UInt32s:
        """Return the allowed tokens of distinct constrained rows as bits [n, words], valid until the next call.

        Bit i of word w is token 32 * w + i. drafts: unverified tokens of each row. Row r then has 1 + len(drafts[r])
        adjacent masks, one for the next token and one after each draft. Nothing is allowed after a draft that is not
        allowed, or if the matcher has failed.
        """
        counts = [1] * len(rows) if drafts is None else [1 + len(draft) for draft in drafts]
        masks = self._room(sum(counts))
        address, size, index = masks.ctypes.data, masks.strides[0], 0
        for which, number in enumerate(rows.tolist()):
            row, end = self._rows[number], index + counts[which]
            if row.matcher is not None:
                row.matcher.unsafe_compute_mask_ptr(address + index * size, size)
            if row.matcher is None or (row.matcher.is_error() and not self._renewed(row, address + index * size, size)):
                masks[index] = 0
            if end > index + 1 and drafts is not None:
                self._fill_behind(row, drafts[which], masks[index + 1 : end])
            index = end
        return masks

    def drafts(self, rows: Rows) -> tuple[Int32s | None, Int32s]:
        """Return (counts [R], token ids) of the tokens for which the grammars of these rows leave no choice.

        counts is None if no row has any. They are drafts, because only the text is forced: the tokenizer chooses its
        tokens, and a model may sample others.
        """
        if not self._forced or not self.offers_drafts:
            return None, NO_INT32S
        forced = [self._forced.get(row, ()) for row in rows.tolist()]
        if not any(forced):
            return None, NO_INT32S
        counts = np.array([len(tokens) for tokens in forced], np.int32)
        return counts, np.array([token for tokens in forced for token in tokens], np.int32)

    def failure(self, row: int) -> str | None:
        """Return why no token was sampled for the row, or None if the row is not constrained."""
        if not self.is_constrained[row]:
            return None
        matcher = self._rows[row].matcher
        if matcher is None:
            return self._rows[row].error
        if not matcher.is_error():
            return _NOTHING_LEFT
        return f"structured_outputs: the grammar failed: {why_failed(matcher)}".partition("\n")[0][:_MAX_ERROR_CHARS]

    def _settle(self, number: int, row: _Row) -> None:
        """Record what is forced at the matcher's position: the first tokens of the text, or EOS at the end."""
        matcher, forced, is_free = row.matcher, list[int](), False
        if matcher is None or matcher.is_error():
            pass
        elif matcher.is_stopped():
            forced = [self._grammars.eos_token_id]
        elif not (text := matcher.compute_ff_bytes()):
            is_free = True
        elif is_too_long(text):
            row.matcher, row.error = None, f"structured_outputs: the grammar failed: {TOO_LONG}"
        elif row.takes_drafts:
            forced = matcher.compute_ff_tokens()
            forced = forced[: min(_MAX_FORCED, _MAX_FORCED_WORK // max(1, len(forced)))]
        row.is_free = is_free
        self._forced.pop(number, None)
        if forced and row.takes_drafts:
            self._forced[number] = forced

    def _renewed(self, row: _Row, address: int, size: int) -> bool:
        """Rebuild a failed matcher, and fill the mask at this address. Return whether that succeeded.

        A token that was only tried may have failed it; then a copy of the compiled grammar is enough. Also, copies
        share a lexer, whose states are limited in total; then the grammar is compiled again, which takes up to a second
        of the step. So a row only fails if a matcher that shares nothing fails too.
        """
        if row.draft_failed:
            row.draft_failed = False
            if self._fill_again(row, self._grammars.matcher(row.params), address, size):
                return True
        assert row.matcher is not None, "a row that has failed had a matcher"
        may_help = is_of_lexer(row.matcher) and self._grammars.is_shared(row.params)
        if not may_help or row.num_renewals == _MAX_RENEWALS:
            return False
        row.num_renewals += 1
        return self._fill_again(row, self._grammars.renew(row.params), address, size)

    def _fill_again(self, row: _Row, matcher: "LLMatcher", address: int, size: int) -> bool:
        row.matcher = matcher
        if matcher.consume_tokens(row.output):
            matcher.unsafe_compute_mask_ptr(address, size)
        return not matcher.is_error()

    def _fill_behind(self, row: _Row, draft: Sequence[int], masks: UInt32s) -> None:
        """Fill the mask after each draft. The matcher is left unchanged, or with an error that _renewed() clears."""
        masks[:] = 0
        matcher, num_taken = row.matcher, 0
        if matcher is None or matcher.is_error() or not row.takes_drafts:
            return
        for token, mask in zip(draft, masks, strict=True):
            # An id outside the vocabulary would put the matcher into an error state.
            if token >= self._grammars.num_tokens or not matcher.try_consume_tokens([token]):
                break
            num_taken += 1
            if is_too_long(matcher.compute_ff_bytes()):
                break
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                mask[:] = 0
                break
        if matcher.is_error():
            row.takes_drafts, row.draft_failed = False, True
        else:
            matcher.rollback(num_taken)

    def _room(self, count: int) -> UInt32s:
        if count > len(self._masks):
            self._masks = np.zeros((max(count, 2 * len(self._masks)), self._grammars.num_words), np.uint32)
        return self._masks[:count]
