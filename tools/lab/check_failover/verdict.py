"""What became of a stream, by comparison with the same request undisturbed: exact, lost, doubled or different."""

from itertools import pairwise
from typing import NamedTuple

from tools.lab.check_failover.calls import Received

KINDS = ("exact", "lost", "doubled", "different", "unsteady")


class Verdict(NamedTuple):
    """kind: one of KINDS. Characters are counted from 0."""

    kind: str
    at: int = 0  # the first character that is lost, doubled or different
    length: int = 0  # characters that are lost or doubled
    why: str = ""


def judge(got: Received, whole: Received, *, is_steady: bool = True) -> Verdict:
    """Compare an answer with the undisturbed one.

    is_steady: whether undisturbed runs give one answer. If they do not, another text is no fault of the failover, and
    the verdict is "unsteady". An answer without its end is lost in any case.
    """
    if not got.finish:
        why = got.error or "it ended without a finish_reason"
        shared = _num_shared(got.text, whole.text)
        if is_steady and shared < len(got.text):
            return Verdict("different", shared, why=f"and then {why}")
        return Verdict("lost", len(got.text), max(0, len(whole.text) - len(got.text)), why)
    if (got.text, got.finish) == (whole.text, whole.finish) and not got.error:
        return Verdict("exact")
    if not is_steady:
        return Verdict("unsteady", _num_shared(got.text, whole.text))
    if got.text == whole.text:
        why = got.error or f"it ended by {got.finish!r:.40}, and undisturbed by {whole.finish!r:.40}"
        return Verdict("different", len(got.text), why=why)
    return _compare(got.text, whole.text)


def _compare(got: str, whole: str) -> Verdict:
    """Return the verdict on two texts that are not the same."""
    start = _num_shared(got, whole)
    end = _num_shared(got[::-1], whole[::-1])
    count = abs(len(got) - len(whole))
    if len(got) < len(whole) and start + end >= len(got):
        return Verdict("lost", start, count, "in the middle" if end else "though it ended as if it were whole")
    # got is whole[:start], the piece, whole[start:]. If the piece can stand further left too, it repeats there as well.
    piece = got[start : start + count]
    if len(got) > len(whole) and start + end >= len(whole) and whole.endswith(piece, 0, start):
        return Verdict("doubled", start, count)
    return Verdict("different", start)


def _num_shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    differing = (place for place, (here, there) in enumerate(zip(one, other, strict=False)) if here != there)
    return next(differing, min(len(one), len(other)))


def longest_pause(got: Received, struck: float, usual_s: float) -> float | None:
    """Return the longest silence after the kill, in seconds; None for an answer that did not end.

    Of an answer that is not streamed it is how much longer it took than usual_s, undisturbed among the others.
    """
    if not got.finish:
        return None
    if len(got.times) < 2:
        return max(0.0, got.end - got.begin - usual_s) if got.end > struck else 0.0
    points = [struck, *(at for at in (*got.times, got.end) if at > struck)]
    return max((after - before for before, after in pairwise(points)), default=0.0)
