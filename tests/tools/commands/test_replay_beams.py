"""Captures with beam searches and with several choices replay without a difference, also from recorded candidates."""

import random
from pathlib import Path

import msgspec
import pytest

from core.capture.records import Step, decode_record
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.captures import CONFIG, capture_in_process, change, frames_of, make_request, replaced, replay


def make_group(number: int, rng: random.Random) -> AddRequest:
    """Every second request is a beam search, the others have three choices."""
    beams = SamplingParams(use_beam_search=True, n=2, best_of=3, temperature=0, max_tokens=rng.randrange(1, 20))
    choices = SamplingParams(n=3, temperature=0.9, max_tokens=rng.randrange(1, 20))
    message = make_request(number, rng)
    return msgspec.structs.replace(message, params=beams if number % 2 else choices)


@pytest.mark.parametrize("mode", ["resched", "full"])
@pytest.mark.parametrize("depth", [1, 2])
def test_zero_differences(tmp_path: Path, depth: int, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture"
    engine = capture_in_process(path, msgspec.structs.replace(CONFIG, async_scheduling=depth == 2), make_group)
    assert engine.engine.scheduler.stats.num_preemptions > 0
    status, report = replay(capfd, path, "--mode", mode)
    assert (status, report["run"]["difference"]) == (0, None)


def test_candidates_that_do_not_fit_are_an_error_of_the_replay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capture"
    capture_in_process(path, CONFIG, make_group)
    records = [decode_record(frame.tag, frame.payload) for frame in frames_of(path)]
    place = next(i for i, one in enumerate(records) if isinstance(one, Step) and one.candidate_rows)
    change(path, place, replaced(candidate_values=b"1234"))
    status, report = replay(capfd, path, "--mode", "resched")
    assert status != 0
    assert "candidates" in str(report["run"]["difference"])
