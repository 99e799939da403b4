"""WeightUpdate: when the model's weights change, and what happens to requests that have begun with the earlier ones.

K and V belong to the weights that computed them. So a change of weights is like the loss of the executor: all rows wait
and are computed again, and all copies of blocks are forgotten.
"""

from core.batch.index import RequestIndex
from core.inputs import NewWeights
from core.scheduling.ends import Ends
from core.scheduling.parts import SchedulerParts
from core.scheduling.preemption import Preemption
from ipc.wire.messages import FinishReason
from ipc.wire.weights_messages import UpdateMode, WeightsMark


class WeightUpdate:
    """The weights in use, and an update that waits for requests to end.

    mark: None = the weights that the engine started with. pending: (client, update).
    """

    def __init__(self, parts: SchedulerParts, preemption: Preemption, ends: Ends, requests: RequestIndex) -> None:
        self._batch, self._waiting, self._outputs, self._stats = parts.batch, parts.waiting, parts.outputs, parts.stats
        self._preemption, self._ends, self._requests = preemption, ends, requests
        self.mark: WeightsMark | None = None
        self.pending: tuple[int, NewWeights] | None = None
        self.reopens = False  # the queue is shut for the update alone
        self.are_gone = False  # the executor sleeps without weights

    def begin(self, client: int, update: NewWeights) -> None:
        """Take an update in. The border gives the next one after this one's end."""
        assert self.pending is None, f"update {update.mark.version}: {self.pending} is not finished"
        self.pending = client, update
        if update.mode is UpdateMode.ABORT:
            self._abort()
        elif self.waits:
            self.reopens = not self._waiting.is_shut
            self._waiting.shut()

    @property
    def waits(self) -> bool:
        """Return whether an update waits for requests to end, and no request may begin."""
        is_awake = not self._stats.sleep_level  # asleep, requests cannot end
        return self.pending is not None and self.pending[1].mode is UpdateMode.WAIT and is_awake

    @property
    def is_due(self) -> bool:
        """Return whether there is an update, and no request that it waits for.

        Requests of clients that do not read are not waited for: they might wait forever.
        """
        if self.pending is None or not self.waits:
            return self.pending is not None
        waiting = self._waiting
        return not (len(self._batch) or waiting.num_ready or any(one.has_started for one in waiting.aside()))

    def take(self) -> tuple[int, NewWeights]:
        """Return the update that is due, and forget it."""
        assert self.pending is not None, "no update is due"
        pending, self.pending = self.pending, None
        return pending

    def apply(self, mark: WeightsMark) -> None:
        """Change the weights: nothing computed with the earlier ones is used again."""
        self.mark, self.are_gone = mark, False
        self._outputs.weights_version = self._stats.weights_version = mark.version
        self._preemption.lose_all(self._requests.all())
        if self.reopens:
            self.reopens = False
            self._waiting.open()

    def sleep(self, level: int) -> None:
        """Note that the executor sleeps, which loses K and V, and from level 2 on the weights."""
        self._stats.sleep_level = max(level, self._stats.sleep_level)
        self.are_gone |= level > 1

    def _abort(self) -> None:
        """Abort all requests of which a choice has begun."""
        begun = {(one.client, one.number) for one in self._requests.all() if one.has_started}
        for request in self._requests.all():
            if (request.client, request.number) in begun:
                num_output_tokens = 0 if request.searches else self._batch.table.num_output_tokens(request)
                self._ends.take_out(request)
                if request.choice < request.params.n:  # otherwise it is a beam beyond the answers
                    self._outputs.add_finish(request, num_output_tokens, FinishReason.ABORT)
