"""Every feature of the engine through every mode of `replay`: it runs, or it is refused by name.

Exact replay, from each checkpoint, --what-if, --fails-when, shrink, redact, explain --at, --html and --perfetto; and in
a soak --compare. What each mode has to find is tested by its own tests; here is that none of them lacks a feature.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture import writer as capture_writer
from core.capture.engine import CapturedEngine, start_capture
from core.executors.fake import FakeExecutor
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest
from ipc.wire.pooling_messages import AddPooling
from tests.captures import CONFIG, make_request
from tests.core.capture.test_checkpoints import VARIANTS, capture, make_any, replay_from_each
from tests.core.scheduling.exchange_driver import ExchangeDriver, exchange_config
from tests.core.scheduling.test_block_exchange import filled, messages_of
from tests.core.scheduling.test_window_exchange import filled as filled_pages
from tests.core.scheduling.test_window_exchange import pages_config
from tests.core.test_structured_outputs import KINDS
from tests.fake_options import fake_options, with_options
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, tokenizer_files
from tests.tools.commands.test_what_if import simulator
from tools.cli import main
from tools.commands.replay.shrink.trial import CONSTANT
from tools.commands.replay.what_if.simulation import simulate
from tools.commands.replay.what_if.step_time import Pace

ROOT = Path(__file__).resolve().parents[3]
NUM_STEPS = 60
#: Seeds of changed options and times. The 84th loses a row in that step.
TRIALS = range(82, 87)
Make = Callable[[int, random.Random], AddRequest | AddPooling]


def make_adapted(number: int, rng: random.Random) -> AddRequest | AddPooling:
    message = make_request(number, rng)
    adapter = AdapterId("ab"[number % 2] * 32) if number % 3 else None
    return msgspec.structs.replace(message, adapter=adapter)


def make_images(number: int, rng: random.Random) -> AddRequest | AddPooling:
    message = make_request(number, rng)
    if len(message.prompt_token_ids) < 12 or number % 3:
        return message
    ids = np.frombuffer(message.prompt_token_ids, "<i4").copy()
    feature = number % 12 // 3  # two are encoded in steps
    ids[:2] = -1 - feature
    uses = [FeatureUse(0, 2, b"digest" + bytes([feature]), feature % 2 == 0, feature < 2)]
    return msgspec.structs.replace(message, prompt_token_ids=ids.tobytes(), features=uses)


def make_images_in_parts(number: int, rng: random.Random) -> AddRequest | AddPooling:
    message = make_images(number, rng)
    if isinstance(message, AddPooling) or not message.features:
        return message
    uses = [msgspec.structs.replace(use, num_parts=3 if use.is_encoded else 1) for use in message.features]
    return msgspec.structs.replace(message, features=uses)


def make_structured(number: int, rng: random.Random) -> AddRequest | AddPooling:
    params = SamplingParams(structured_outputs=KINDS[number % len(KINDS)], max_tokens=60)
    ids = np.frombuffer(make_request(number, rng).prompt_token_ids[:16], "<i4") % EOS
    return AddRequest(number, ids.astype("<i4").tobytes(), params, number)


def take_any_adapter(executor: Any) -> None:
    executor.adapters.find = lambda digest: None


def use_tokenizer(executor: Any) -> None:
    executor.grammars.use_files(tokenizer_files())


def have_states(executor: Any) -> None:
    executor.info = msgspec.structs.replace(executor.info, state_bytes=1000)


#: Options, what requests are like, and what is done to the executor; requests of all kinds where that is None.
FEATURES: dict[str, tuple[dict[str, Any], Make | None, Callable[[Any], None] | None]] = {
    **{name: (options, None, None) for name, options in VARIANTS.items()},
    "host": ({"num_host_blocks": 12, "num_blocks_override": 16}, None, None),
    "states": ({"kv_cache_memory_bytes": 40_000}, None, have_states),
    "adapters": ({"enable_lora": True, "max_loras": 1}, make_adapted, take_any_adapter),
    "images": ({"max_num_encoder_input_tokens": 2, "encoder_cache_size": 2}, make_images, None),
    "images in parts": ({"max_num_encoder_input_tokens": 2, "encoder_cache_size": 2}, make_images_in_parts, None),
    "forced tokens": (
        {"executor_options": fake_options(vocab_size=VOCAB_SIZE, eos_token_id=EOS)},
        make_structured,
        use_tokenizer,
    ),
    "tiers": ({}, None, None),
    "pages on the host": ({**VARIANTS["pages"], "num_host_blocks": 40, "num_blocks_override": 30}, None, None),
    "pages in files": ({}, None, None),
}
QUICK = {"plain", "states", "images in parts", "forced tokens", "tiers", "pages in files"}
#: By feature: what cannot be redacted, and why.
REFUSED = {"drafts": "speculative_config"}


def capture_tiers(path: Path, *, has_pages: bool) -> None:
    """Capture an engine whose blocks come from a folder; one without a folder gets the same inputs."""
    (filled_pages if has_pages else filled)(path.parent / "kv")
    sizes = {"max_num_seqs": 4, "budget": 17, "max_model_len": 52}
    config = pages_config(60, 24, **sizes) if has_pages else exchange_config(20, 16, **sizes)
    driven = ExchangeDriver(path.parent / "kv", config, random.Random(5))
    for message in messages_of(random.Random(5), 30):
        driven.step(message)
    driven.drain()
    assert driven.exchange is not None
    assert driven.exchange.num_fetched
    executor = FakeExecutor(config)
    executor.initialize_cache(config)
    writer = start_capture(str(path), config, executor.info, "test", 0)
    engine = CapturedEngine(config, executor, writer)
    for number, (messages, _, _) in enumerate(driven.driver.log):
        engine.step(messages, 10**12 + number * 1_000_000)
    writer.close()
    driven.close()


def capture_feature(path: Path, name: str, make: Make) -> None:
    options, own, prepare = FEATURES[name]
    if name in ("tiers", "pages in files"):
        capture_tiers(path, has_pages=name != "tiers")
        return
    config = with_options(CONFIG, **options)
    capture(path, config, 3, NUM_STEPS, own or make, prepare or (lambda executor: None))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FEATURES]
)
def test_each_mode_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 8000)
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    path, out, html = tmp_path / "a.cap", tmp_path / "red.cap", tmp_path / "a.html"
    capture_feature(path, name, make_any)
    most_steps = 10 if name in QUICK else None
    assert replay_from_each(path, most_steps) > 0
    assert main(["replay", str(path), "--what-if", "max_num_seqs=3", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["changes"][0]["figures"]["num_tokens"] > 0
    assert main(["replay", str(path), "--html", str(html)]) == 0
    assert main(["replay", str(path), "--perfetto", str(tmp_path / "a.json")]) == 0
    assert main(["explain", "--at", str(NUM_STEPS // 2), str(path)]) == 0
    capfd.readouterr()
    status = main(["replay", "redact", str(path), str(out)])
    if name in REFUSED:
        assert status != 0
        assert REFUSED[name] in capfd.readouterr().err
    else:
        assert status == 0, capfd.readouterr().err
        assert replay_from_each(out, most_steps) >= 0


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FEATURES]
)
def test_it_is_judged_and_shrunk(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """Captures with requests that sample: nothing is wrong with them, and `preemptions` are something to shrink."""
    path, out = tmp_path / "a.cap", tmp_path / "small.cap"
    capture_feature(path, name, make_request)
    status = main(["replay", str(path), "--fails-when", "crashed or broken or misread or stuck"])
    shown = capfd.readouterr().out
    assert status == 0, shown
    assert main(["replay", "shrink", str(path), str(out), "--fails-when", "steps > 5", "--seconds", "0.3"]) == 0
    assert re.search(r"small\.cap: [1-9]\d* requests?", capfd.readouterr().out)
    assert main(["replay", str(out)]) == 0


def test_a_search_that_loses_a_row_in_the_step_of_its_last_candidates_begins_anew(tmp_path: Path) -> None:
    """Found by a what-if: the row that was given up had its candidates from an earlier step."""
    capture_feature(tmp_path / "a.cap", "fair", make_any)
    base = simulator(tmp_path / "a.cap", is_open=False)
    recording = msgspec.structs.replace(base.recording, gap_ns=0, empty_ns=100_000)
    for seed in TRIALS:
        rng = np.random.default_rng(seed)
        rows, blocks = (int(rng.integers(*most)) for most in ((2, 9), (16, 26)))
        config = msgspec.structs.replace(base.config, max_num_seqs=rows, num_blocks_override=blocks)
        run = simulate(
            config, base.info, recording, CONSTANT, pace=Pace.of(rng.uniform(1e5, 1e7, 31), rng.uniform(1e5, 1e8, 31))
        )
        assert all(one.ended for one in run.moments)


@pytest.mark.soak
@pytest.mark.parametrize("name", FEATURES)
def test_it_is_compared_with_another_version(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "a.cap"
    capture_feature(path, name, make_any)
    assert main(["replay", str(path), "--compare", str(ROOT)]) == 0, capfd.readouterr().err
