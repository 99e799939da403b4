"""An engine's workers as Ray's actors, with a stand-in for Ray; `make ray` runs a real cluster of two nodes."""

import gc
import os
import select
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.engine import ray_workers
from frontend.engine.process import EngineProcess
from frontend.engine.ray_workers import RayMachine, RayWorkers
from ipc.errors import ConfigError, EngineStartError
from ipc.options.config import EngineConfig
from ipc.options.given_options import config_from_options

pytestmark = pytest.mark.timeout(60)


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class Actor:
    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.ends = arguments, 0
        self.pids, self.node, self.end = Method(lambda: (1, 2)), Method(lambda: "node"), Method(self._end)

    def _end(self) -> None:
        self.ends += 1


class Group:
    def __init__(self, bundles: list[dict[str, float]], strategy: str, is_placed: bool) -> None:
        self.bundles, self.strategy, self._is_placed = bundles, strategy, is_placed

    def wait(self, timeout: float) -> bool:
        return self._is_placed


class Ray(types.ModuleType):
    """The parts of Ray that workers use."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[Actor] = []
        self.options: list[dict[str, Any]] = []
        self.killed: list[Actor] = []
        self.groups: list[Group] = []
        self.num_nodes, self.is_up, self.is_placed = 1, False, True

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> None:
        self.is_up = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does, in its way

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}] * self.num_nodes + [{"Alive": False}]

    def remote(self, kind: type) -> Any:
        assert kind is RayMachine

        def with_options(**options: Any) -> Any:
            self.options.append(options)
            return types.SimpleNamespace(remote=self._make)

        return types.SimpleNamespace(options=with_options)

    def _make(self, *arguments: Any) -> Actor:
        self.actors.append(Actor(*arguments))
        return self.actors[-1]

    def get(self, refs: list[Any]) -> list[Any]:
        return refs

    def wait(self, refs: list[Any], **_: Any) -> None:
        """All have ended."""

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        self.groups.append(Group(bundles, strategy, self.is_placed))
        return self.groups[-1]


@pytest.fixture(name="ray")
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    ray = Ray()
    placement, scheduling = types.ModuleType("placement"), types.ModuleType("scheduling")
    placement.placement_group = ray.placement_group  # type: ignore[attr-defined]
    placement.remove_placement_group = ray.groups.remove  # type: ignore[attr-defined]
    scheduling.PlacementGroupSchedulingStrategy = lambda **options: options  # type: ignore[attr-defined]
    for name, module in (
        ("ray", ray),
        ("ray.util", types.ModuleType("util")),
        ("ray.util.placement_group", placement),
        ("ray.util.scheduling_strategies", scheduling),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray_workers, "node_address", lambda: "127.0.0.1")
    before = signal.getsignal(signal.SIGTERM)
    yield ray
    assert signal.getsignal(signal.SIGTERM) == before, "a program's signals are its own"


def config_of(**options: Any) -> EngineConfig:
    return config_from_options(worker_use_ray=True, **options)


def test_one_machine_holds_all_ranks_unless_more_are_wanted(ray: Ray) -> None:
    placed = RayWorkers(config_of(tensor_parallel_size=3, threads=2), 1.0)
    assert [(group.bundles, group.strategy) for group in ray.groups] == [([{"CPU": 6.0}], "PACK")]
    (options,) = ray.options
    assert (options["num_cpus"], options["max_restarts"], options["max_task_retries"]) == (6.0, -1, -1)
    assert options["scheduling_strategy"]["placement_group_bundle_index"] == 0
    address, number, keys, _ = ray.actors[0].arguments
    assert address == placed.config.master_addr
    assert address.startswith("tcp://127.0.0.1:")
    assert (number, keys) == (1, None)
    assert (placed.pids(), placed.nodes()) == ([(1, 2)], ["node"])
    placed.close()
    placed.close()
    assert ray.actors[0].ends == 1
    assert ray.killed == ray.actors
    assert ray.groups == []
    assert not ray.is_up, "what was started here"


def test_machines_are_nodes_of_their_own_and_have_keys(ray: Ray) -> None:
    ray.is_up, ray.num_nodes = True, 2
    placed = RayWorkers(config_of(tensor_parallel_size=3, nnodes=2), 1.0)
    assert [(group.bundles, group.strategy) for group in ray.groups] == [
        ([{"CPU": 2.0}, {"CPU": 1.0}], "STRICT_SPREAD")
    ]
    plain, _, path = str(placed.config.master_addr).partition("?keys=")
    assert [actor.arguments[:2] for actor in ray.actors] == [(plain, 1), (plain, 2)]
    assert all(len(key) == 40 for key in ray.actors[1].arguments[2])
    assert Path(path, "engine.json").stat().st_mode & 0o077 == 0
    placed.close()
    assert not Path(path).exists()
    assert ray.is_up, "it was there before"


def test_an_address_that_is_given_is_taken(ray: Ray) -> None:
    placed = RayWorkers(config_of(master_addr="tcp://10.0.0.1:5?keys=/shared/keys"), 1.0)
    assert placed.config.master_addr == placed.given_address == "tcp://10.0.0.1:5?keys=/shared/keys"
    assert ray.actors[0].arguments[0] == placed.given_address
    placed.close()


def test_what_ray_cannot_place_is_said_and_leaves_nothing(ray: Ray) -> None:
    ray.is_placed = False
    with pytest.raises(EngineStartError, match="they need 2 nodes with 4, 4 CPUs; `ray status` shows"):
        RayWorkers(config_of(pipeline_parallel_size=2, nnodes=2, threads=4), 1.0)
    assert (ray.groups, ray.actors, ray.is_up) == ([], [], False)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    process = EngineProcess(config_of(executor="fake"))
    with pytest.raises(ConfigError, match=r"Ray is not installed .* its extra \[ray\]"):
        process.start()


def test_all_processes_of_an_engine_have_the_same_workers(ray: Ray) -> None:
    process = EngineProcess(config_of(executor="fake"))
    for _ in range(2):
        process.start()
        address = process.config.master_addr
        process.close()
    assert process.ray_workers is not None
    assert (len(ray.actors), ray.actors[0].ends) == (1, 0)
    assert ray.actors[0].arguments[0] == address == process.ray_workers.config.master_addr
    process.release()
    process.release()
    assert ray.actors[0].ends == 1
    assert process.config.master_addr is None, "the next start asks Ray again"
    process.start()
    process.close()
    del process
    gc.collect()
    assert [actor.ends for actor in ray.actors] == [1, 1], "an engine that nobody holds has no workers"


def wait_for_end(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 30)[0])


def test_an_actor_s_worker_process_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exits: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ray_workers, "_REST_S", 0.0)
    monkeypatch.setattr(ray_workers.os, "_exit", exits.append)
    machine = RayMachine("tcp://127.0.0.1:9", 1, None, "own")
    actor, worker = machine.pids()
    assert actor == os.getpid()
    pidfd = os.pidfd_open(worker)
    machine.end()
    assert wait_for_end(pidfd)
    os.close(pidfd)
    assert exits == [], "its end was wanted"
    machine = RayMachine("tcp://127.0.0.1:9", 1, None, "own")
    pidfd = os.pidfd_open(machine.pids()[1])
    os.close(machine._lease)  # as the kernel does when the actor is killed
    assert wait_for_end(pidfd)
    os.close(pidfd)
    machine._watcher.join(30)
    assert exits == [1], "an actor without its process makes room for a new one"
