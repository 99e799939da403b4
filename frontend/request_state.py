"""RequestState: one request as its caller sees it; turns journal progress into RequestOutputs."""

from frontend.detokenizer import Detokenizer
from frontend.journal import Progress
from frontend.logprobs import logprob_dicts
from frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from frontend.prompts import Prompt
from frontend.tokenizer import Tokenizer
from ipc.messages import FinishReason
from ipc.sampling_params import RequestOutputKind, SamplingParams

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


def needs_every_token(params: SamplingParams) -> bool:
    """Whether tokens matter before the request has finished: they are shown, or may complete a stop string."""
    return params.output_kind != RequestOutputKind.FINAL_ONLY or bool(params.stop_strings)


class RequestState:
    """Texts are decoded here: once, at the end, where only that is asked for; else as tokens arrive.

    tokenizer: None = token ids only, texts stay "". `num_tokens` is where the next Progress must begin; `finished`
    becomes true with the last output, which may be before the engine knows (a stop string).
    """

    def __init__(
        self, request_id: str, number: int, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.num_tokens = 0
        self.finished = False
        self._prompt = prompt
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        if self._tokenizer is not None and needs_every_token(params):
            self._detokenizer = Detokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_shown = 0  # tokens of earlier outputs

    def update(self, progress: Progress) -> RequestOutput | None:
        """Take what is new; the output it makes, None where there is nothing to show (yet)."""
        assert not self.finished, self.number
        new = progress.token_ids.tolist()
        if self._params.logprobs is not None and progress.logprobs is not None:
            received = progress.logprobs.output[self.num_tokens : self.num_tokens + len(new)]
            self._logprobs += logprob_dicts(received, self._tokenizer)
        self.num_tokens += len(new)
        self._token_ids += new
        stop_string = self._detokenize(new, progress.finish) if self._detokenizer is not None else None
        self.finished = progress.finish != FinishReason.NONE or stop_string is not None
        kind = self._params.output_kind
        if not self.finished and (kind == RequestOutputKind.FINAL_ONLY or not new):
            return None
        completion = self._completion(progress.finish)
        if stop_string is not None:
            completion.finish_reason, completion.stop_reason = "stop", stop_string
        elif self.finished:
            completion.finish_reason, completion.stop_reason = _FINISH_REASONS[progress.finish], progress.stop_token
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[completion],
            finished=self.finished,
            metrics=self._metrics(progress),
            prompt_logprobs=self._take_prompt_logprobs(progress),
            num_cached_tokens=progress.num_cached_tokens,
        )

    def _detokenize(self, new: list[int], finish: FinishReason) -> str | None:
        """Feed the detokenizer; the stop string that ends the request, whose tokens are cut after it."""
        detokenizer = self._detokenizer
        assert detokenizer is not None
        detokenizer.update(new[:-1] if self._hides_last_token(finish) else new)
        if finish != FinishReason.NONE:
            detokenizer.finish()
        if detokenizer.stop_string is not None:
            del self._token_ids[detokenizer.num_tokens :]
            del self._logprobs[detokenizer.num_tokens :]
        return detokenizer.stop_string

    def _hides_last_token(self, finish: FinishReason) -> bool:
        """EOS and stop tokens are part of token_ids; of the text only where the caller wants to see what stopped it."""
        return finish == FinishReason.STOP and not self._params.include_stop_str_in_output

    def _text(self, finish: FinishReason) -> str:
        if self._detokenizer is not None:
            delta = self._params.output_kind == RequestOutputKind.DELTA
            return self._detokenizer.delta() if delta else self._detokenizer.text
        if self._tokenizer is None:
            return ""
        ids = self._token_ids[:-1] if self._hides_last_token(finish) else self._token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=self._params.skip_special_tokens)

    def _completion(self, finish: FinishReason) -> CompletionOutput:
        """What is shown now: all so far, or with DELTA what is new."""
        first = self._num_shown if self._params.output_kind == RequestOutputKind.DELTA else 0
        self._num_shown = len(self._token_ids)
        completion = CompletionOutput(0, self._text(finish), self._token_ids[first:])
        if self._params.logprobs is not None:
            completion.logprobs = self._logprobs[first:]
            chosen = (one[token].logprob for one, token in zip(self._logprobs, self._token_ids, strict=True))
            completion.cumulative_logprob = sum(chosen, 0.0)
        return completion

    def _take_prompt_logprobs(self, progress: Progress) -> list[TokenLogprobs | None] | None:
        """Complete from the first output token on; with DELTA they are shown once."""
        if self._params.prompt_logprobs is None or progress.logprobs is None or not self._token_ids:
            return None
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None, *logprob_dicts(progress.logprobs.prompt, self._tokenizer)]
        elif self._params.output_kind == RequestOutputKind.DELTA:
            return None
        return self._prompt_logprobs

    def _metrics(self, progress: Progress) -> RequestMetrics:
        return RequestMetrics(
            progress.arrival_time,
            progress.first_token_time,
            progress.last_token_time,
            # A stop string ends the request here, before the engine knows.
            progress.finished_time or (progress.last_token_time if self.finished else 0.0),
            len(self._token_ids),
        )
