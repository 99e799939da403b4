"""explain, control, KV events and weights through real processes: an engine with the fake executor."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frontend.async_llm import AsyncLLM
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from frontend.engine.process import EngineProcess
from ipc.errors import CallFailedError, ConfigError, EngineDeadError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksStored
from ipc.wire.messages import PauseMode
from ipc.wire.pin_messages import Pin
from ipc.wire.scheduling_messages import Reason, SchedulingState
from tests.fake_options import fake_options
from tests.placed import PREFIX
from tests.tools.test_cli import run, serving
from tools.cli import main
from tools.commands.control import read_owner_file, write_owner_file
from tools.commands.explain import describe_all, read_request

CONFIG = EngineConfig(
    executor="fake", num_blocks_override=200, max_num_seqs=2, executor_options=fake_options(max_model_len=3000)
)
LONG = SamplingParams(max_tokens=29_000, ignore_eos=True, temperature=0)


@contextlib.contextmanager
def engine(**options: object) -> Iterator[EngineProcess]:
    names = EngineConfig.__struct_fields__
    process = EngineProcess(EngineConfig(**{name: getattr(CONFIG, name) for name in names} | options))
    with process:
        yield process


def connected(process: EngineProcess, name: str = "", token: bytes = b"") -> EngineClient:
    return EngineClient(ZmqTransport(process.address, pidfd=process.pidfd), name=name, owner_token=token)


def test_the_programs(tmp_path: Path) -> None:
    """What an operator does: pause, look, ask about one request, resume, drain."""
    owner_file = tmp_path / "owner"
    options = ("--owner-file", str(owner_file), "--num-blocks-override", "100", "--max-num-seqs", "4")
    with serving(f"ipc://{tmp_path}/s", *options) as (server, address):
        assert oct(owner_file.stat().st_mode)[-3:] == "600"
        steer = ("--connect", address, "--owner-file", str(owner_file))
        assert run("control", "pause", *steer).returncode == 0
        client = EngineClient(ZmqTransport(address))
        number = client.submit([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), seed=0)
        (own,) = client.explain(number).requests
        assert (own.state, own.reason, own.num_prompt_tokens) == (SchedulingState.WAITING, Reason.PAUSED, 3)
        name = f"{own.session}/{number}"
        table = run("explain", "--connect", address).stdout
        assert "paused: no request begins; running ones continue" in table
        assert f"{name}  waiting" in table
        one = run("explain", "--connect", address, name)
        assert f"request {name}: waiting - the engine's owner has paused it" in one.stdout, one.stderr
        report = json.loads(run("explain", "--connect", address, "--json").stdout)
        assert [(entry["number"], entry["reason"]) for entry in report["requests"]] == [(number, "paused")]
        gone = run("explain", "--connect", address, "1/4000000000")
        assert (gone.returncode, "no live request 1/4000000000" in gone.stderr) == (1, True)
        stranger = run("control", "resume", "--connect", address)
        assert (stranger.returncode, "PERMISSION_DENIED" in stranger.stderr) == (1, True)
        assert run("control", "resume", *steer).stdout == "resume: done\n"
        while not client.read(number).finish:
            client.take_ready()
            time.sleep(0.01)
        with pytest.raises(CallFailedError, match="it has ended, or never arrived"):
            client.explain(number)
        client.close()
        assert run("control", "drain", *steer).returncode == 0
        assert server.wait(20) == 0
    assert list(tmp_path.iterdir()) == []


def test_explain_and_top_show_pins() -> None:
    with engine() as process, contextlib.closing(connected(process)) as client:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        number = client.submit(list(range(64)), params, seed=0, pins=[Pin("s", 60_000)])
        client.wait(np.array([number]), 30.0)
        assert describe_all(client.explain())[1].endswith("; pins hold 4 of at most 99")
        shown = run("top", "--connect", process.address, "--interval", "0.05")
        assert ", 4 pinned by 1" in shown.stdout, shown.stdout


@pytest.mark.parametrize("text", ["3", "a/b", "3/", "-1/2", "1/2/3", "3/99999999999"])
def test_a_requests_name(text: str) -> None:
    assert read_request("3/17") == (3, 17)
    with pytest.raises(ConfigError, match="SESSION/NUMBER"):
        read_request(text)


def test_owner_files(tmp_path: Path) -> None:
    path = str(tmp_path / "owner")
    os.close(write_owner_file(path, b"longer than the next"))  # its process was killed
    os.chmod(path, 0o644)
    lock = write_owner_file(path, b"\0secret")
    assert read_owner_file(path) == b"\0secret"
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="is in use by a running"):
        write_owner_file(path, b"x")
    os.close(lock)
    (tmp_path / "owner").write_text("no hex")
    with pytest.raises(ConfigError, match="exists and is not an owner file"):
        write_owner_file(path, b"x")
    assert (tmp_path / "owner").read_text() == "no hex"
    with pytest.raises(ConfigError, match="was not written by"):
        read_owner_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_owner_file(path + "x")


def test_weights_by_name_and_the_replay_of_calls(tmp_path: Path) -> None:
    """One token a step: the client of weight 3 gets three of four. The capture replays, weights, calls and all."""
    path = tmp_path / "run.cap"
    options = {"scheduling_policy": "fair", "fair_quantum": 0, "max_num_batched_tokens": 1}
    options |= {
        "num_blocks_override": 4000,
        "executor_options": fake_options(max_model_len=30_000),
    }  # neither ends while it is looked at
    with engine(client_weights={"heavy": 3.0}, capture=str(path), **options) as process:
        light, heavy = connected(process, "light"), connected(process, "heavy")
        owner = connected(process, token=process.owner_token)
        owner.pause(PauseMode.ALL)
        stream = light.follow_kv_events()
        for client in (light, heavy):
            client.submit([1], LONG, seed=0)
        while owner.statistics().num_waiting < 2:
            time.sleep(0.01)
        assert {one.reason for one in owner.explain().requests} == {Reason.PAUSED}
        owner.resume()
        while True:
            tokens = [one.num_tokens for one in owner.explain().requests]
            assert len(tokens) == 2, "both run"
            if max(tokens) > 400:
                break
        assert 0.3 <= min(tokens) / max(tokens) <= 0.37
        assert {one.reason for one in owner.explain().requests} <= {Reason.NONE, Reason.SKIPPED_BUDGET}
        assert stream.get(10) is not None
        for client in (light, heavy, owner):
            client.close()
    assert main(["replay", str(path)]) == 0


def test_a_stream_of_kv_events() -> None:
    """AsyncLLM's iterator: what was cached before, what comes, a reset; ends with the engine's session."""

    async def follow(address: str) -> None:
        async with await AsyncLLM.create(connect=address, client_name="router") as llm:
            params = SamplingParams(max_tokens=1)
            async for _ in llm.generate({"prompt_token_ids": list(range(33))}, params):
                pass
            events = llm.kv_events()
            cached = await anext(events)
            assert [type(event) for event in cached.events] == [KVBlocksCleared, KVBlocksStored]
            async for _ in llm.generate({"prompt_token_ids": list(range(48))}, params):
                pass
            new = await anext(events)
            ((stored,), before) = new.events, cached.events[1]
            assert isinstance(stored, KVBlocksStored)
            assert isinstance(before, KVBlocksStored)
            assert np.frombuffer(before.token_ids, "<i4").tolist() == list(range(32))
            assert np.frombuffer(stored.token_ids, "<i4").tolist() == list(range(32, 48))
            assert stored.parents == before.contents[-8:]
            await llm.reset_prefix_cache()
            assert [type(event) for event in (await anext(events)).events] == [KVBlocksCleared]
            assert (cached.sequence, new.sequence) == (0, 1)
            await events.aclose()

    with engine() as process:
        asyncio.run(follow(process.address))


def test_a_stream_whose_reader_sleeps_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PREFIX}frontend.client.kv_event_stream.MAX_UNREAD", 2)
    with engine() as process:
        client = connected(process)
        stream = client.follow_kv_events()
        number = client.submit(list(range(100)), SamplingParams(max_tokens=200, ignore_eos=True), seed=0)
        client.wait(np.array([number]), 20)
        while not stream.is_broken:
            time.sleep(0.01)
        known: set[int] = set()
        message = stream.get(10)
        assert message is not None
        assert isinstance(message.events[0], KVBlocksCleared)
        for event in message.events[1:]:
            assert isinstance(event, KVBlocksStored)
            known |= set(np.frombuffer(event.contents, "<i8").tolist())
        assert len(known) == 299 // 16
        assert stream.get(0.05) is None
        stream.close()
        assert stream.get() is None
        assert list(stream) == []
        second = client.follow_kv_events()
        process.stop()
        with pytest.raises(EngineDeadError):
            list(second)
        client.close()
