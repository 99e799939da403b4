"""The end of a stream that is stored: it is made on a thread, and its caller may have left by then."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from frontend.http.replies.answer_format import StoredFormat
from frontend.http.replies.reply import Reply
from frontend.http.replies.usage import Usage
from frontend.results.request_state import RequestState
from frontend.text.prompts import Prompt
from ipc.params.sampling_params import SamplingParams
from ipc.records.receipt import Answered


class Owner:
    """Keeps what a thread is to do."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(hold=lambda number, held: 0)
        self.work: list[Callable[[], bytes]] = []

    def make(self, reply: Reply, size: int, work: Callable[[], bytes], done: Any, then: Any) -> None:
        self.work.append(work)

    def remove(self, reply: Reply) -> None:
        pass


class Stored(StoredFormat):
    is_stored = True

    def closing(self, usage: Usage) -> bytes:
        return b"end with %d receipts" % len(usage.receipts)


class Receipts:
    def of(self, answers: Sequence[Sequence[Answered]]) -> list[Any]:
        return [one for choices in answers for one in choices]


def test_the_receipts_of_a_caller_who_has_left_are_of_all_choices() -> None:
    owner: Any = Owner()
    answer_format: Any = Stored()
    receipts: Any = Receipts()
    request: Any = SimpleNamespace(exchange=SimpleNamespace(), received_at=0.0)
    sizes: dict[str, Any] = {"is_streamed": True, "max_model_len": 8, "num_choices": 2}
    reply = Reply(request, answer_format, receipts=receipts, **sizes)
    params = SamplingParams(n=2)
    state = RequestState("x", 1, Prompt(None, [1, 2]), params, tokenizer=None)
    reply.attach(owner, [(state, params)])
    reply.num_going = 0
    reply.flush(0.0)
    (work,) = owner.work
    reply.leave()
    assert work() == b"end with 2 receipts"
