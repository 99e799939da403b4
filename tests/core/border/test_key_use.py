"""KeyUse: the quota of one key over all its connections, on a clock of the test."""

import numpy as np
import pytest

from core.border.accounts import load_of
from core.border.key_use import KeyUse, KeyUses
from ipc.errors import ConfigError
from ipc.keys.quota import NO_QUOTA, Quota, read_quota
from ipc.wire.messages import AddRequest, ErrorCode, Outputs
from tests.raw_client import request


def let_in(use: KeyUse, message: AddRequest, now: float) -> str:
    """The text of the refusal, "" for none; what is let in is counted."""
    refusal = use.refusal(message, now)
    if refusal is None:
        use.take(message, now)
        use.account.add(load_of(message, 100))
        return ""
    assert refusal.number == message.number
    return refusal.message


def outputs(*counts: int) -> Outputs:
    return Outputs(0, 0, b"", b"", np.array(counts, "<u2").tobytes(), b"")


def test_requests_a_minute() -> None:
    use = KeyUse("alice", Quota(rpm=3), 100.0)
    assert [let_in(use, request(number, [1]), 100.0) for number in range(3)] == ["", "", ""]
    refusal = use.refusal(request(9, [1]), 100.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.RESOURCE_EXHAUSTED, 20_001)
    assert refusal.message == "the key alice has used up its 3 requests (rpm) a minute; send again later"
    assert let_in(use, request(9, [1]), 100.0 + 20.001) == ""
    assert let_in(use, request(10, [1]), 100.0 + 20.001) != "", "one more has come in, and was used"


def test_tokens_a_minute_are_those_read_and_those_made() -> None:
    use = KeyUse("alice", Quota(tpm=600), 0.0)
    assert let_in(use, request(1, [1] * 100), 0.0) == ""
    use.note(outputs(300, 400), 0.0)  # 800 by now: a debt of 200, and then 10 a second
    assert "tokens (tpm) a minute" in let_in(use, request(2, [1]), 20.0)
    assert let_in(use, request(2, [1]), 20.2) == ""
    refusal = use.refusal(request(3, [1] * 601), 1000.0)
    assert refusal is not None
    assert refusal.code == ErrorCode.INVALID_ARGUMENT, "it never fits"
    assert let_in(use, request(3, [1] * 600), 1000.0) == ""


def test_requests_at_once() -> None:
    use, first = KeyUse("alice", Quota(concurrent=2), 0.0), request(1, [1])
    assert [let_in(use, one, 0.0) for one in (first, request(2, [1]))] == ["", ""]
    assert let_in(use, request(3, [1]), 50.0).startswith("the key alice has 2 unfinished requests, its limit")
    use.account.remove(load_of(first, 100))
    assert let_in(use, request(3, [1]), 50.0) == ""


def test_ten_thousand_arrivals_are_counted_exactly() -> None:
    """One request a millisecond for ten seconds: what is there at the beginning and what comes in, and no more."""
    use = KeyUse("alice", Quota(rpm=600), 0.0)
    taken = sum(let_in(use, request(number, [1]), number / 1000) == "" for number in range(10_000))
    assert taken == 600 + 99


def test_a_changed_quota_holds_at_once_and_without_one_there_is_none() -> None:
    quotas = {"alice": Quota(rpm=1)}
    uses = KeyUses(lambda name: quotas.get(name, NO_QUOTA))
    assert [let_in(uses.of("alice", 0.0), request(n, [1]), 0.0) == "" for n in range(2)] == [True, False]
    assert let_in(uses.of("bob", 0.0), request(1, [1]), 0.0) == ""
    quotas["alice"] = Quota(rpm=2)
    assert [let_in(uses.of("alice", 0.0), request(n, [1]), 0.0) == "" for n in range(3)] == [True, True, False]
    del quotas["alice"]
    assert all(let_in(uses.of("alice", 0.0), request(n, [1] * 50), 0.0) == "" for n in range(100))


def test_tenants_are_the_keys_own() -> None:
    use = KeyUse("alice", NO_QUOTA, 0.0)
    assert (use.tenant(""), use.tenant("bob")) == ("alice", "alice/bob")


def test_quotas_are_read_and_written() -> None:
    quota = read_quota(["tpm=60", "concurrent=1"], "here")
    assert quota == Quota(concurrent=1, tpm=60)
    assert quota.words() == ["concurrent=1", "tpm=60"]
    for words in (["rpm=0"], ["rpm=-1"], ["rpm"], ["rpm=1", "rpm=2"], ["speed=1"], ["rpm=" + "9" * 30]):
        with pytest.raises(ConfigError, match=r"allowed:3: '.*' is not a limit of a client"):
            read_quota(words, "allowed:3")
