"""Adapters in a fleet: a name counts where all replicas have it with one content, and blocks are an adapter's own."""

from typing import Any

import msgspec

from frontend.fleet.call_sums import common_adapters
from frontend.fleet.requests import RoutedRequests
from ipc.params.sampling_params import SamplingParams
from ipc.wire.lora_messages import AdapterId, LoraAdapter, LoraAdapters
from ipc.wire.messages import AddRequest

NO_DISPATCH: Any = None


def adapters(**digests: str) -> LoraAdapters:
    return LoraAdapters(1, [LoraAdapter(name, digest, 8, 100) for name, digest in digests.items()])


def test_a_name_counts_where_all_replicas_have_its_content() -> None:
    answers: list[Any] = [adapters(a="1", b="2", c="3"), adapters(c="3", a="1", b="9"), adapters(a="1", c="3", d="4")]
    joined = common_adapters(7, answers, NO_DISPATCH, 0.0)
    assert (joined.call, [one.name for one in joined.adapters], joined.is_enabled) == (7, ["a", "c"], True)
    off = msgspec.structs.replace(adapters(), is_enabled=False)
    assert common_adapters(7, [answers[0], off], NO_DISPATCH, 0.0) == LoraAdapters(7, [], False)


def test_requests_of_other_adapters_look_for_other_blocks() -> None:
    requests = RoutedRequests()
    prompt = bytes(4 * 32)
    roots = {
        int(requests.root[requests.enter(1, AddRequest(n, prompt, SamplingParams(), 0, adapter=one), 0.0)])
        for n, one in enumerate((None, AdapterId("a" * 32), AdapterId("b" * 32)))
    }
    assert len(roots) == 3
