"""Redaction: every decision stays, and an attacker who knows the method and all but the key finds no content."""

import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture import writer as capture_writer
from core.capture.file import CaptureFile
from core.capture.records import Checkpoint, Header, Record, decode_config, decode_record, encode_config
from core.capture.redaction import redact, rename_state
from core.capture.renaming import Renaming, TokenNames
from core.capture.restore import restore
from core.capture.snapshot import Snapshot
from core.engine import EngineCore
from core.executors.by_name import load_executor
from core.proposers.offered import OfferedDrafts
from ipc.errors import CaptureFileError, ConfigError
from ipc.options.speculation import SpeculativeConfig
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.block_roots import PLAIN_ROOT, root_of_message, root_of_salt
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import AddRequest
from ipc.wire.pooling_messages import AddPooling
from tests.captures import CONFIG, SHARED, VOCAB, change, frames_of, make_request
from tests.core.capture.test_checkpoints import VARIANTS, capture, make_any, replay_from_each
from tests.core.test_structured_outputs import KINDS
from tests.fake_options import fake_options, with_options
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, tokenizer_files
from tools.commands.replay.__main__ import main
from tools.commands.replay.differences import unpack

#: Bytes that must not be in the redacted file.
CANARIES = ("salt-canary", "tenant-canary", "stop-canary", "regex-canary")


def make_secret(number: int, rng: random.Random) -> AddRequest | AddPooling:
    """Requests of all kinds but beam searches, with canaries in all that is text, and outputs as later prompts."""
    message = make_any(number, rng)
    changes = {
        "cache_salt": "salt-canary" if number % 4 == 1 else "",
        "tenant": "tenant-canary" if number % 4 == 2 else "",
    }
    if isinstance(message, AddRequest):
        params = message.params
        if params.use_beam_search:
            params = SamplingParams(temperature=0, max_tokens=9)
        params = msgspec.structs.replace(params, stop=["stop-canary"], logit_bias={17: 1.0}, bad_words=["regex-canary"])
        changes["params"] = params
    return msgspec.structs.replace(message, **changes)


def decisions(path: Path) -> list[tuple[object, ...]]:
    names = ("now_ns", "rows", "counts", "removed_rows", "added", "num_preemptions", "num_waiting", "num_free_blocks")
    return [tuple(getattr(turn.step, name) for name in names) for turn in CaptureFile(path).turns()]


def tokens_of(path: Path) -> list[list[int]]:
    """All sequences of tokens in the requests and results of a file."""
    found = []
    for turn in CaptureFile(path).turns():
        found += [unpack(message.prompt_token_ids) for _, message in turn.inbox if hasattr(message, "prompt_token_ids")]
        found.append([token for token in unpack(turn.step.tokens) if token >= 0])
    return found


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 12_000)


@pytest.mark.usefixtures("slow_close")
@pytest.mark.parametrize("name", [name for name in VARIANTS if "speculative_config" not in VARIANTS[name]])
def test_every_decision_stays_and_the_file_replays(tmp_path: Path, name: str) -> None:
    config = with_options(CONFIG, **VARIANTS[name], client_weights={"tenant-canary": 2.0})
    path, out = tmp_path / "a.cap", tmp_path / "red.cap"
    capture(path, config, seed=6, num_steps=80)  # with beam searches
    redacted = redact(CaptureFile(path), str(out))
    assert redacted.num_steps == 80
    assert decisions(out) == decisions(path)
    assert replay_from_each(out) == len(CaptureFile(path).checkpoints)
    assert decode_config(CaptureFile(out).header).client_weights.keys().isdisjoint({"tenant-canary"})


@pytest.mark.usefixtures("slow_close")
@pytest.mark.parametrize("name", ["plain", "deep", "fair", "swap"])
def test_a_file_that_begins_inside_is_redacted_with_its_checkpoint(tmp_path: Path, name: str) -> None:
    config = with_options(CONFIG, **{**VARIANTS[name], "num_blocks_override": 60}, capture_rotate_bytes=9000)
    capture(tmp_path / "a.cap", config, seed=4, num_steps=110, make=make_secret)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    for path in files:
        out = tmp_path / f"{path.name}.red"
        redact(CaptureFile(path), str(out))
        assert decisions(out) == decisions(path)
        replay_from_each(out)
        check_canaries(out)
    inside = [path for path in files if CaptureFile(path).begins_inside]
    added = [start for path in inside for turn in CaptureFile(path).turns() for start in turn.step.added]
    assert sum(cached for *_, cached in added) > 0


def contents(path: Path) -> bytes:
    """All that the records of a file have, its checkpoints' states unpacked."""
    parts = []
    for frame in frames_of(path):
        record = decode_record(frame.tag, frame.payload)
        parts.append(zlib.decompress(record.state) if isinstance(record, Checkpoint) else frame.payload)
    return b"|".join(parts)


def check_canaries(path: Path) -> None:
    data = contents(path)
    assert [canary for canary in CANARIES if canary.encode() in data] == []
    check_roots(data, {root_of_salt("salt-canary"), root_of_salt("", "tenant-canary")})


def check_roots(data: bytes, roots: set[int]) -> None:
    """Whoever guesses a salt and a tenant could compute their root. It may be in a column or in MessagePack."""
    assert not roots & (numbers_in(data, "<i8") | numbers_in(data, ">i8"))


@pytest.mark.usefixtures("slow_close")
def test_a_checkpoint_has_nothing_of_requests_that_have_ended(tmp_path: Path) -> None:
    """Checkpoints inside of what went on for a while: queues name dead requests, rows and blocks have old tokens."""
    num_rows = 0
    for rotate_bytes in range(9400, 10_200, 200):  # other sizes have their checkpoints after other steps
        folder = tmp_path / str(rotate_bytes)
        folder.mkdir()
        num_rows += _check_checkpoints(folder, rotate_bytes)
    assert num_rows > 0


def _check_checkpoints(folder: Path, rotate_bytes: int) -> int:
    """Redact the files of one run, and return how many rows had no named block at their first checkpoints."""
    config = with_options(
        CONFIG,
        async_scheduling=True,
        executor_options=fake_options(vocab_size=30_000),
        num_blocks_override=60,
        max_num_seqs=4,
        capture_rotate_bytes=rotate_bytes,
        enable_lora=True,
        client_weights={"tenant-canary": 2.0},
    )
    adapter, roots = AdapterId("ca" * 16), set[int]()

    def make(number: int, rng: random.Random) -> AddRequest | AddPooling:
        own = np.array([rng.randrange(3000, 29_000) for _ in range(rng.randrange(1, 60))], "<i4").tobytes()
        message = msgspec.structs.replace(make_secret(number, rng), prompt_token_ids=own)
        message = msgspec.structs.replace(message, adapter=adapter) if number % 3 == 0 else message
        roots.update({root_of_message(message)} - {PLAIN_ROOT})
        return message

    capture(folder / "a.cap", config, seed=4, num_steps=110, make=make, prepare=_without_adapters)
    files, pairs, out = sorted(folder.iterdir()), set[int](), folder / "red.cap"
    for path in files:
        change(path, 0, lambda header: _with_modules(header, {"lora-canary": "/path-canary"}))
        for one in tokens_of(path):
            pairs |= {one[i] | one[i + 1] << 32 for i in range(len(one) - 1) if min(one[i:]) > 2000}
    assert len(pairs) > 1500
    inside = [path for path in files if CaptureFile(path).begins_inside]
    assert len(inside) > 2
    for path in files:
        redact(CaptureFile(path), str(out))
        assert decisions(out) == decisions(path)
        replay_from_each(out)
        data = contents(out)
        names = (*CANARIES, adapter.digest, "lora-canary", "path-canary")
        assert [canary for canary in names if canary.encode() in data] == []
        assert len(pairs & numbers_in(data, "<i8")) <= 1, "by chance"
        check_roots(data, roots)
        out.unlink()
    return sum(map(num_rows_that_follow_a_root, inside))


def numbers_in(data: bytes, dtype: str) -> set[int]:
    """Return the numbers of eight bytes that begin anywhere in the data. dtype: with the order of the bytes."""
    columns = [np.frombuffer(data, dtype, (len(data) - begin) // 8, begin) for begin in range(8)]
    return set(np.concatenate(columns).tolist())


def num_rows_that_follow_a_root(path: Path) -> int:
    """How many running requests with a root of their own have no named block yet at a file's first checkpoint."""
    file = CaptureFile(path)
    table = restore(file.checkpoint(file.checkpoints[0]).state)[1].table
    own = (table.num_named_blocks == 0) & (table.content < PLAIN_ROOT)
    return int(own[[request is not None for request in table.request]].sum())


def test_rows_begin_at_their_new_root_and_free_ones_keep_no_old_one() -> None:
    """Both requests are shorter than a block, so their rows have their root. One has ended, the other one runs."""
    executor = load_executor(CONFIG)
    executor.initialize_cache(CONFIG)
    engine = EngineCore(CONFIG, executor)
    inbox = list[tuple[int, AddRequest]]()
    for number, max_tokens in enumerate((1, 9)):
        prompt, params = np.array([8, 9], "<i4").tobytes(), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        inbox.append((0, AddRequest(number, prompt, params, number, cache_salt=f"salt {number}")))
    for step in range(2):
        engine.step([] if step else inbox, 1 + step)
    state = restore(Snapshot(engine.state()).encode())
    table, roots = state[1].table, {root_of_salt("salt 0"), root_of_salt("salt 1")}
    assert [request.number for request in table.request if request] == [1]
    assert roots <= set(table.content.tolist())
    rename_state(state, Renaming(VOCAB, (), ()), {})
    state[1].check_integrity()
    check_roots(zlib.decompress(Snapshot(state).encode()), roots)


def test_images_of_pooling_requests_have_other_digests() -> None:
    uses = [FeatureUse(0, 2, b"a" * 32, is_encoded=True), FeatureUse(2, 1, b"b" * 32)]
    message = AddPooling(1, np.array([-1, -1, -2, 5], "<i4").tobytes(), PoolingParams(task="embed"), features=uses)
    renamed = Renaming(VOCAB, (), ()).message(message)
    assert isinstance(renamed, AddPooling)
    assert [(use.position, use.num_rows) for use in renamed.features] == [(0, 2)], "only images are scheduled"
    assert renamed.features[0].digest != b"a" * 32


@pytest.mark.usefixtures("slow_close")
def test_pooling_requests_find_what_was_cached_before_the_checkpoint(tmp_path: Path) -> None:
    """No other request has their salt, so only they tell what its new name is."""
    config = with_options(CONFIG, num_blocks_override=60, capture_rotate_bytes=4000)

    def make(number: int, rng: random.Random) -> AddRequest | AddPooling:
        if number % 2:
            return make_secret(number, rng)
        prompt = np.array([*SHARED, number], "<i4").tobytes()
        return AddPooling(number, prompt, PoolingParams(task="embed"), cache_salt="salt-canary of embeddings")

    capture(tmp_path / "a.cap", config, seed=4, num_steps=40, make=make)
    files, out, num_found = sorted(tmp_path.iterdir()), tmp_path / "red.cap", 0
    for path in files:
        redact(CaptureFile(path), str(out))
        assert decisions(out) == decisions(path)
        check_canaries(out)
        added = [start for turn in CaptureFile(out).turns() for start in turn.step.added]
        if CaptureFile(out).begins_inside:
            num_found += sum(number % 2 == 0 and cached == len(SHARED) for _, _, number, cached in added)
        out.unlink()
    assert num_found > 3


def _without_adapters(executor: Any) -> None:
    """Let a fake executor take any adapter."""
    executor.adapters.find = lambda digest: None


def _with_modules(record: Record, modules: dict[str, str]) -> Record:
    """A header's engine has loaded these adapters at its start, for which it would have needed their files."""
    assert isinstance(record, Header)
    config = msgspec.structs.replace(decode_config(record), lora_modules=modules)
    return msgspec.structs.replace(record, config=encode_config(config))


@pytest.mark.usefixtures("slow_close")
def test_what_grammars_force_is_not_written(tmp_path: Path) -> None:
    """Forced tokens come as drafts of the executor, in results, in states and in plans in flight."""
    options = {"executor_options": fake_options(vocab_size=VOCAB_SIZE, eos_token_id=EOS), "capture_rotate_bytes": 6000}
    config = with_options(CONFIG, **options)

    def make(number: int, rng: random.Random) -> AddRequest:
        params = SamplingParams(structured_outputs=KINDS[number % len(KINDS)], max_tokens=60)
        return AddRequest(number, make_request(number, rng).prompt_token_ids[:16], params, number)

    def use_tokenizer(executor: Any) -> None:
        executor.grammars.use_files(tokenizer_files())

    capture(tmp_path / "a.cap", config, seed=4, num_steps=120, make=make, prepare=use_tokenizer)
    drafts, after, out = 0, [], tmp_path / "red.cap"
    for path in sorted(tmp_path.iterdir()):
        drafts += sum(len(turn.step.draft_tokens) for turn in CaptureFile(path).turns())
        redact(CaptureFile(path), str(out))
        assert decisions(out) == decisions(path)
        after += [turn.step.draft_tokens.strip(b"\0") for turn in CaptureFile(out).turns()]
        for place in CaptureFile(out).checkpoints:
            for one in Snapshot(restore(CaptureFile(out).checkpoint(place).state)).objects():
                assert not isinstance(one, OfferedDrafts) or not one.__dict__["_tokens"].any()
        replay_from_each(out)
        out.unlink()
    assert drafts > 100
    assert not any(after)


@pytest.mark.usefixtures("slow_close")
def test_an_attacker_finds_no_token(tmp_path: Path) -> None:
    """The attacker has the original, but not the key: neighbours, frequencies, places and guesses say nothing."""
    path, out, again = tmp_path / "a.cap", tmp_path / "red.cap", tmp_path / "again.cap"
    config = with_options(CONFIG, executor_options=fake_options(vocab_size=30_000))
    capture(path, config, seed=3, num_steps=120, make=make_secret)
    redact(CaptureFile(path), str(out))
    redact(CaptureFile(path), str(again))
    check_canaries(out)
    old, new, other = tokens_of(path), tokens_of(out), tokens_of(again)
    data = out.read_bytes()
    for length, least in ((2, 1000), (3, 0)):  # pairs below 1,000 may also be counts, lengths and places in the file
        parts = {tuple(one[i : i + length]) for one in old for i in range(len(one) - length + 1)}
        parts = {part for part in parts if min(part) >= least}
        found = [part for part in parts if np.array(part, "<i4").tobytes() in data]
        assert len(parts) > 100
        assert len(found) <= 1, found  # by chance
    flat = [[token for one in many for token in one] for many in (old, new, other)]
    same = [sum(a == b for a, b in zip(flat[0], x, strict=True)) / len(flat[0]) for x in flat[1:]]
    assert max(same) < 0.02  # ends of requests
    between = sum(a == b for a, b in zip(flat[1], flat[2], strict=True)) / len(flat[0])
    assert between < 0.02  # two redactions have two keys
    most_common = Counter(flat[0]).most_common(1)[0]
    places = [i for i, token in enumerate(flat[0]) if token == most_common[0]]
    assert most_common[1] > 10
    names = Counter(flat[1][i] for i in places)
    prefixes = {tuple(one[: i + 1]) for one in old for i, token in enumerate(one) if token == most_common[0]}
    assert len(names) > len(prefixes) // 3  # a name for each beginning, not one for the token


def test_names_are_equal_as_far_as_the_tokens_are() -> None:
    names = TokenNames(50, {0, 1, 2})
    rng = random.Random(1)
    known = list[tuple[list[int], list[int]]]()
    for _ in range(200):
        tokens = [rng.randrange(47) for _ in range(3)]
        named = names.name_all(names.begin(""), np.array(tokens))[0].tolist()
        assert not {0, 1, 2} & set(named)
        for others, theirs in known:
            shared = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), 3)
            assert named[:shared] == theirs[:shared]
            assert shared == 3 or named[shared] != theirs[shared]
        known.append((tokens, named))
    assert names.begin("a") != names.begin("b")


@pytest.mark.usefixtures("slow_close")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.cap", tmp_path / "red.cap"
    capture(path, CONFIG, seed=3, num_steps=30)
    assert main(["redact", str(path), str(out)]) == 0
    assert "30 steps" in capsys.readouterr().out
    assert main([str(out)]) == 0
    assert main([str(out), "--mode", "full"]) == 4
    assert "it is redacted" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="never overwritten"):
        main(["redact", str(path), str(out)])


def test_what_cannot_be_redacted_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    path, out = tmp_path / "a.cap", tmp_path / "red.cap"
    capture(path, msgspec.structs.replace(CONFIG, speculative_config=settings), seed=1, num_steps=5)
    with pytest.raises(CaptureFileError, match="which tokens repeat"):
        redact(CaptureFile(path), str(out))
    assert not out.exists()


def test_more_tokens_than_names_are_refused() -> None:
    """Names are without reserved ids, which prompts may have."""
    names = TokenNames(5, {0})
    state = names.begin("")
    assert len({names.name(state, token) for token in (1, 2, 3, 4)}) == 4
    with pytest.raises(CaptureFileError, match="more than 4 different tokens follow"):
        names.name(state, 0)


@pytest.mark.usefixtures("slow_close")
def test_features_are_decided_by_their_ids_and_leave_no_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded tokens need no feature; the model would, so a full replay is refused."""
    path, out = tmp_path / "a.cap", tmp_path / "red.cap"

    def make(number: int, rng: random.Random) -> AddRequest | AddPooling:
        message = make_any(number, rng)
        if isinstance(message, AddPooling) or len(message.prompt_token_ids) < 12 or number % 3:
            return message
        ids = np.frombuffer(message.prompt_token_ids, "<i4").copy()
        feature = number % 12 // 3  # two are images
        ids[:2] = -1 - feature
        uses = [FeatureUse(0, 2, b"digest-canary" + bytes([feature]), feature % 2 == 0, feature < 2)]
        return msgspec.structs.replace(message, prompt_token_ids=ids.tobytes(), features=uses)

    config = msgspec.structs.replace(CONFIG, max_num_encoder_input_tokens=2, encoder_cache_size=2)
    capture(path, config, seed=3, num_steps=80, make=make)
    assert b"digest-canary" in path.read_bytes()
    assert main([str(path)]) == 0
    redact(CaptureFile(path), str(out))
    assert decisions(out) == decisions(path)
    assert b"digest-canary" not in out.read_bytes()
    assert main([str(out)]) == 0
    assert main([str(path), "--mode", "full"]) != 0
    assert "has images or prompt_embeds" in capsys.readouterr().err
