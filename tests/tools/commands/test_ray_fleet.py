"""Engines as Ray actors, with a stand-in for Ray; `make ray` runs a real cluster."""

import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engine_core.ray
from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from ipc.errors import ConfigError, EngineStartError, ModelFileError
from ipc.keys.curve import new_keys, write_engine_keys
from ipc.params.sampling_params import SamplingParams
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.placed import PREFIX
from tools.commands.ray_fleet import fleet as fleet_module
from tools.commands.ray_fleet.fleet import Change, RayFleet, RayReplica, deploy

pytestmark = pytest.mark.timeout(60)
FAKE = {"executor": "fake", "executor_options": fake_options(vocab_size=1000), "flight_recorder_bytes": 0}


class ActorError(Exception):
    """Stands in for ray.exceptions.RayActorError."""


class TimeoutOfGet(Exception):
    """Stands in for ray.exceptions.GetTimeoutError."""


class Method:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.remote = call


class Actor:
    """An actor that says what the test lets it say. where: its address; an exception is raised; None: no answer yet."""

    def __init__(self, where: Any) -> None:
        self.where, self.ends = where, 0
        self.address = Method(lambda: [self])
        self.pids = Method(lambda: [(1, 2)])
        self.end = Method(self._end)

    def _end(self) -> list[Any]:
        self.ends += 1
        return [None]


class Ray(types.ModuleType):
    """The parts of Ray that a fleet uses. A ref is a list with what it will give."""

    def __init__(self, addresses: list[Any]) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayActorError=ActorError, GetTimeoutError=TimeoutOfGet)
        self.given: dict[str, Any] = {}
        self.made: list[tuple[Any, ...]] = []
        self.killed: list[Actor] = []
        self.actors = [Actor(address) for address in addresses]
        self.inits: list[dict[str, Any]] = []
        self.is_up = False
        self.num_nodes = 1

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}] * self.num_nodes + [{"Alive": False}]

    def remote(self, kind: type) -> "Ray":
        assert kind is RayReplica
        return self

    def options(self, **options: Any) -> Any:
        self.given = options

        def make(*arguments: Any) -> Actor:
            self.made.append(arguments)
            return self.actors[len(self.made) - 1]

        return types.SimpleNamespace(remote=make)

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs[0], list):
            return [self.get(ref, timeout) for ref in refs]
        (value,) = refs
        found = value.where if isinstance(value, Actor) else value
        if found is None and isinstance(value, Actor):
            raise TimeoutOfGet
        if isinstance(found, Exception):
            raise found
        return found

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if not isinstance(ref[0], Actor) or ref[0].where is not None]
        return ready, [ref for ref in refs if ref not in ready]

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)


@pytest.fixture(name="ray")
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray(["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(fleet_module, "_LOOK_S", 0.01)
    return ray


class Members:
    """What a router is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def join(self, address: str) -> None:
        self.told.append(("join", address))

    def leave(self, address: str, *, move_after: float | None = None) -> None:
        assert move_after == 0.0
        self.told.append(("leave", address))


def test_deploy_asks_ray_for_actors_that_it_starts_again(ray: Ray) -> None:
    assert engine_core.ray.deploy is deploy
    with deploy(replicas=2, num_cpus=3, resources={"fast": 1}, **FAKE) as fleet:
        assert fleet.addresses == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"]
        assert fleet.pids() == [(1, 2), (1, 2)]
        assert (ray.given["max_restarts"], ray.given["max_task_retries"]) == (-1, -1)
        assert (ray.given["num_cpus"], ray.given["resources"]) == (3, {"fast": 1})
        options, folder, keys, _ = ray.made[0]
        assert options == {"model": None, "threads": 3, **FAKE}
        assert keys is None, "one node: loopback"
        assert folder != ray.made[1][1]
        assert ray.inits[0]["include_dashboard"] is False
        assert ray.inits[0]["address"] == "local", "not a cluster that happens to run on this machine"
    assert [actor.ends for actor in ray.actors] == [1, 1]
    assert ray.killed == ray.actors
    assert not ray.is_up, "what deploy() has started"
    fleet.close()
    assert len(ray.killed) == 2


def test_a_cluster_of_several_nodes_has_keys_and_stays(ray: Ray) -> None:
    ray.is_up, ray.num_nodes = True, 2
    with deploy(**FAKE) as fleet:
        assert not ray.inits
        address, _, path = fleet.addresses[0].partition("?keys=")
        assert address == "tcp://10.0.0.1:1"
        assert Path(path, "engine.json").stat().st_mode & 0o077 == 0
        assert all(len(key) == 40 for key in ray.made[0][2])
    assert not Path(path).exists()
    assert ray.is_up


def test_those_who_follow_learn_of_each_change_once(ray: Ray) -> None:
    before = set(threading.enumerate())
    fleet, members, changes = deploy(**FAKE), Members(), list[Change]()
    first, second = ray.actors
    assert fleet.look() == []
    first.where = None  # Ray starts it again
    assert fleet.look() == []
    first.where = "tcp://10.0.0.3:3"
    assert fleet.look() == [Change("tcp://10.0.0.1:1", "tcp://10.0.0.3:3")]
    fleet.follow(members, changes.append)
    second.where = ActorError()
    while len(changes) < 1:
        pass
    second.where = "tcp://10.0.0.2:2"
    while len(changes) < 2:
        pass
    fleet.close()
    assert members.told == [("leave", "tcp://10.0.0.2:2"), ("join", "tcp://10.0.0.2:2")]
    assert changes == [Change("tcp://10.0.0.2:2", None), Change(None, "tcp://10.0.0.2:2")]
    assert set(threading.enumerate()) <= before


def test_what_cannot_be_deployed_is_said_and_leaves_nothing(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at least one replica"):
        deploy(replicas=0)
    with pytest.raises(ConfigError, match="unknown option"):
        deploy(nonsense=1)
    ray.actors[1].where = None
    with pytest.raises(EngineStartError, match="ray status"):
        deploy(**FAKE)
    ray.made.clear()
    ray.actors[1].where = ActorError("ModelFileError: no such model")
    with pytest.raises(EngineStartError, match="no such model"):
        deploy(**FAKE)
    assert len(ray.killed) == 4
    assert not ray.is_up
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"with its extra \[ray\]"):
        deploy(**FAKE)


@pytest.fixture(name="replica")
def real_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RayReplica, str]]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(f"{PREFIX}tools.commands.ray_fleet.fleet.node_address", lambda: "127.0.0.1")
    keys = new_keys()
    write_engine_keys(str(tmp_path / "ours"), keys)
    replica = RayReplica(FAKE, "theirs", (keys.public, keys.secret, keys.engine), 60.0)
    yield replica, f"{replica.address()}?keys={tmp_path}/ours"
    replica.end()
    assert not (tmp_path / "theirs").exists()


def test_an_actor_owns_an_engine_that_the_fleet_s_keys_reach(replica: tuple[RayReplica, str]) -> None:
    actor, address = replica
    client = EngineClient(ZmqTransport(address))
    try:
        assert client.welcome.pid == actor.pids()[1]
        number = client.submit([7, 8, 9], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True), seed=0)
        while not (found := client.read(number)).finish:
            pass
        assert found.token_ids.tolist() == fake_tokens([7, 8, 9], 5, 1000, 0)
    finally:
        client.close()


def test_the_errors_of_an_engine_s_start_are_the_actor_s() -> None:
    with pytest.raises(ModelFileError):
        RayReplica({"model": "/nowhere/model"}, "none", None, 60.0)


def test_the_pure_parts_need_no_fleet() -> None:
    fleet = RayFleet(Ray([]), [], "/nowhere", None, owns_ray=False)
    assert fleet.addresses == []
    fleet.close()
