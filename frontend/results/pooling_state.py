"""PoolingState: one pooling request from its caller's side."""

from frontend.client.progress import Progress
from frontend.results.pooling_outputs import PoolingOutput, PoolingRequestOutput, SubmittedPooling
from frontend.text.prompts import Prompt
from ipc.errors import RequestFailedError
from ipc.params.pooling_params import PoolingParams
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import FinishReason


class PoolingState:
    """A request that is answered at once. It has the methods of RequestState, so that callers can handle both."""

    def __init__(
        self, request_id: str, number: int, prompt: Prompt, params: PoolingParams, *, adapter: AdapterId | None
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.finished = False
        self.prompt = prompt
        self._submitted = SubmittedPooling(params, prompt.second_from, adapter, prompt.features)
        self._is_of_tokens = (params.task or "").startswith("token_")

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """Return that update() takes the first choice's Progress."""
        return [(0, 0)]

    def update(self, *progress: Progress) -> PoolingRequestOutput | None:
        """Take the Progress; return the answer, None if there is none yet.

        Errors: RequestFailedError for a request that was aborted.
        """
        (one,) = progress
        if one.finish == FinishReason.NONE:
            return None
        self.finished = True
        if one.vectors is None:
            raise RequestFailedError("the request was aborted")
        data = one.vectors if self._is_of_tokens else one.vectors[0]
        ids = list(self.prompt.token_ids)
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(data), ids, one.num_cached_tokens, submitted=self._submitted
        )

    def take_stopped(self) -> list[int]:
        """Return no choices: a pooling request has no stop strings."""
        return []
