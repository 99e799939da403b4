"""CompletionState: one choice of a request, with its tokens, text, log probabilities and end."""

from collections.abc import Sequence
from typing import Any

from frontend.client.progress import Progress
from frontend.client.received_logprobs import PositionLogprobs
from frontend.results.logprobs import each_logprobs
from frontend.results.outputs import CompletionOutput, TokenLogprobs
from frontend.text.detokenizer import Detokenizer
from frontend.text.token_texts import TokenTexts
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import FinishReason

_FREED_AT_ONCE = 256
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


def needs_every_token(params: SamplingParams) -> bool:
    """Return whether tokens are needed before the end of the request: they are shown, or may complete a stop string."""
    return params.output_kind != RequestOutputKind.FINAL_ONLY or bool(params.stop_strings)


def free_slowly(values: list[Any] | None) -> None:
    """Empty a long list of objects in steps, between which other threads run."""
    while values:
        del values[-_FREED_AT_ONCE:]


class CompletionState:
    """One choice of a request. It decodes the text: once at the end if only that is needed, otherwise as tokens arrive.

    tokenizer: None = token ids only, texts stay "". context: the result of prompt_context(). `num_tokens` is the
    position at which the next Progress must begin. `finished` becomes true with the last output. This may be before the
    engine has finished the choice; then `stop_string` is set.
    """

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, context: Sequence[int] = ()
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self.stop_string: str | None = None
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._context = context
        self._detokenizer: Detokenizer | None = None
        if self._tokenizer is not None and needs_every_token(params):
            self._detokenizer = self._make_detokenizer(self._tokenizer)
        self._finish = FinishReason.NONE
        self._stop_token: int | None = None
        self._versions: tuple[tuple[int, int], ...] = ()
        self.token_ids: list[int] = []
        self._received: list[PositionLogprobs] = []  # of the last tokens: they are read when shown
        self._logprobs: list[TokenLogprobs] = []  # that later outputs show again; none with DELTA
        self._num_read = 0  # positions before those of _received
        self._cumulative = 0.0  # log probability of the tokens at these
        self._token_texts: TokenTexts | None = None
        if self._tokenizer is not None and params.logprobs is not None:
            self._token_texts = TokenTexts(self._tokenizer, params.skip_special_tokens, context)
        self._num_shown = 0  # tokens of earlier outputs

    @property
    def num_unread_logprobs(self) -> int:
        """Return how many log probabilities the next output() must read, which makes it take longer."""
        return len(self._received) * len(self._received[0].token_ids) if self._received else 0

    @property
    def finish_reason(self) -> str | None:
        """Return why the choice has ended; None = it has not."""
        if self.stop_string is not None:
            return "stop"
        return _FINISH_REASONS[self._finish] if self.finished else None

    def update(self, progress: Progress) -> bool:
        """Take new tokens and log probabilities; return whether there is anything new."""
        new = progress.token_ids.tolist()
        if self._params.logprobs is not None and progress.logprobs is not None:
            self._received += progress.logprobs.output[self.num_tokens : self.num_tokens + len(new)]
        self._stop_token, self._versions = progress.stop_token, progress.weights_versions
        return self.take(new, progress.finish)

    def take(self, new: list[int], finish: FinishReason) -> bool:
        """Take new tokens of a choice without log probabilities; return whether there is anything new."""
        assert not self.finished, self.index
        self.num_tokens += len(new)
        self.token_ids += new
        self._finish = finish
        if self._detokenizer is not None:
            self._detokenize(self._detokenizer, new)
        self.finished = finish != FinishReason.NONE or self.stop_string is not None
        return self.finished or bool(new)

    def forget_logprobs(self) -> None:
        """Free the log probabilities: no later output shows them."""
        free_slowly(self._logprobs)
        free_slowly(self._received)

    def take_whole(self, new: list[int]) -> bool:
        """Take new tokens of whole characters whose text the caller shows itself; return False if that is not possible.

        For DELTA, without log probabilities.
        """
        if self._detokenizer is None or not self._detokenizer.skip(len(new)):
            return False
        self.num_tokens += len(new)
        self.token_ids += new
        self._num_shown += len(new)
        return True

    def output(self) -> CompletionOutput:
        """Return the output to show now: all so far, or with DELTA only the new part since the last output."""
        first = self._num_shown if self._params.output_kind == RequestOutputKind.DELTA else 0
        self._num_shown = len(self.token_ids)
        output = CompletionOutput(self.index, self._text(), self.token_ids[first:])
        if self._versions:
            last = len(self.token_ids)
            output.weights_versions = tuple(span for span in self._versions if span[0] < last)
        if self._params.logprobs is not None:
            new = self._read_logprobs()
            if self._params.output_kind == RequestOutputKind.DELTA:
                output.logprobs = new
            else:
                self._logprobs += new
                output.logprobs = self._logprobs[:]
            output.cumulative_logprob = self._cumulative
        if self.finished:
            output.finish_reason = self.finish_reason
            output.stop_reason = self._stop_reason() if self.stop_string is None else self.stop_string
        return output

    def _read_logprobs(self) -> list[TokenLogprobs]:
        """Return the log probabilities that no output has shown."""
        new = list(each_logprobs(self._received, self._token_texts))
        for one, token in zip(new, self.token_ids[self._num_read :], strict=True):
            self._cumulative += one[token].logprob
        self._num_read += len(new)
        free_slowly(self._received)
        return new

    def _stop_reason(self) -> int | None:
        """Return the token that ended the choice; None for the tokenizer's own EOS, as in vLLM, and for other ends.

        The engine reports the request's stop tokens only. Further end tokens are those of the model's files.
        """
        if self._stop_token is None and self._finish == FinishReason.STOP and self._tokenizer is not None:
            last = next(reversed(self.token_ids), None)
            return last if last in self._tokenizer.eos_token_ids[1:] else None
        return self._stop_token

    def _detokenize(self, detokenizer: Detokenizer, new: list[int]) -> None:
        """Feed the detokenizer. A stop string ends the choice and cuts its tokens after the one that completed it."""
        detokenizer.update(new[:-1] if self._hides_last_token() else new)
        if self._finish != FinishReason.NONE:
            detokenizer.finish()
        if detokenizer.stop_string is not None:
            self.stop_string = detokenizer.stop_string
            del self.token_ids[detokenizer.num_tokens :]
            del self._received[max(0, detokenizer.num_tokens - self._num_read) :]

    def _hides_last_token(self) -> bool:
        """Return whether the text leaves out the last token.

        EOS and stop tokens are part of token_ids. They are part of the text only with include_stop_str_in_output.
        """
        return self._finish == FinishReason.STOP and not self._params.include_stop_str_in_output

    def _text(self) -> str:
        if self._detokenizer is not None:
            delta = self._params.output_kind == RequestOutputKind.DELTA
            return self._detokenizer.delta() if delta else self._detokenizer.text
        if self._tokenizer is None:
            return ""
        detokenizer = self._make_detokenizer(self._tokenizer)
        detokenizer.update(self.token_ids[:-1] if self._hides_last_token() else self.token_ids)
        detokenizer.finish()
        return detokenizer.text

    def _make_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        return Detokenizer(
            tokenizer,
            skip_special_tokens=self._params.skip_special_tokens,
            stop=self._params.stop_strings,
            include_stop_str_in_output=self._params.include_stop_str_in_output,
            min_tokens=self._params.min_tokens,
            context=self._context,
        )
