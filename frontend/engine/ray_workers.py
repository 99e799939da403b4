"""RayWorkers: actors of Ray that run an engine's workers (distributed_executor_backend="ray"), and how to reach Ray.

Ray places the actors, by a placement group, and starts them again. Each runs `engine-core worker`, which connects to
the engine. Plans, results and the data between workers travel over our own sockets, not through Ray. Ray is the extra
`ray`, and is imported only when it is used.
"""

import contextlib
import importlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ipc.errors import ConfigError, EngineStartError
from ipc.keys.curve import Keys, new_keys, write_engine_keys
from ipc.machine.child_process import describe_exit, run_package
from ipc.options.config import EngineConfig
from ipc.options.workers import num_workers

OBJECT_STORE_BYTES = 100 << 20  # of a cluster started here; Ray's default is a third of the memory
LOOPBACK = "127.0.0.1"
_END_S = 5.0  # for the actors to end by themselves
_REST_S = 1.0  # before an actor whose worker process has ended is started again


def import_ray() -> Any:
    """Return the module `ray`. Errors: ConfigError that names the extra."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"Ray is not installed ({error}): pip install ray, or engine-core with its extra [ray]"
        ) from None


def connect(ray: Any, address: str | None, *, num_cpus: float) -> bool:
    """Connect to Ray; return whether a cluster was started here. This program's signals stay its own."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics to its makers
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None or os.environ.get("RAY_ADDRESS"):
            ray.init(address=address)
            return False
        own = {"num_cpus": max(num_cpus, os.cpu_count() or 1), "object_store_memory": OBJECT_STORE_BYTES}
        # Without an address Ray would look for a cluster of this machine, and refuse these options if it finds one.
        ray.init(address="local", include_dashboard=False, **own)
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return True


def has_other_nodes(ray: Any) -> bool:
    """Return whether the cluster has more than one node."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) > 1


def node_address() -> str:
    """Return the address of this node of Ray."""
    return str(importlib.import_module("ray").util.get_node_ip_address())


def free_port(host: str) -> int:
    """Return a port that is free now: what listens there keeps its address across restarts."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def make_folder(keys: Keys | None) -> str:
    """Return a new folder of this program's own, with these keys in it."""
    folder = tempfile.mkdtemp(prefix="engine-core-ray-")
    if keys is not None:
        write_engine_keys(folder, keys)
    return folder


def own_keys(folder: Path, keys: tuple[str, str, str]) -> str:
    """Write keys to a folder of an actor's own, and return the part of an address that names them."""
    shutil.rmtree(folder, ignore_errors=True)  # the folder of this actor before it died
    write_engine_keys(str(folder), Keys(*keys))
    return f"?keys={folder}"


class RayWorkers:
    """The actors of one engine, until close().

    config: the engine's, with the address at which they join. given_address: the one that it had before.
    """

    def __init__(self, config: EngineConfig, timeout: float) -> None:
        """Reserve resources for all workers, and start an actor on each of config.nnodes nodes.

        Without master_addr, the engine listens on this node's address, with keys that only these actors have, or on
        loopback if there is no other node. timeout: seconds for the resources. Errors: ConfigError, EngineStartError.
        """
        ray, per_rank = import_ray(), float(config.threads or 1)
        count, self.given_address = num_workers(config), config.master_addr
        self._ray, self._owns_ray = ray, connect(ray, None, num_cpus=count * per_rank)
        self._actors: list[Any] = []
        self._group: Any = None
        self._folder = ""
        try:
            keys = self._listen(config)
            # As many ranks as core/workers/wires.py puts on each machine.
            ranks = [
                sum(rank * config.nnodes // count == node for rank in range(count)) for node in range(config.nnodes)
            ]
            self._place([per_rank * num for num in ranks], timeout)
            self._start(keys)
        except BaseException:
            self.close()
            raise

    def _listen(self, config: EngineConfig) -> tuple[str, str, str] | None:
        """Set the address. Return its keys if they are made here."""
        if config.master_addr is not None:
            self.config, self._folder = config, make_folder(None)
            return None
        keys = new_keys() if has_other_nodes(self._ray) else None
        host, suffix = LOOPBACK, ""
        self._folder = make_folder(keys)
        if keys is not None:
            host, suffix = node_address(), f"?keys={self._folder}"
        bracketed = f"[{host}]" if ":" in host else host
        address = f"tcp://{bracketed}:{free_port(host)}{suffix}"
        self.config = msgspec.structs.replace(config, master_addr=address)
        return None if keys is None else (keys.public, keys.secret, keys.engine)

    def _place(self, num_cpus: list[float], timeout: float) -> None:
        placement = importlib.import_module("ray.util.placement_group")
        strategy = "STRICT_SPREAD" if len(num_cpus) > 1 else "PACK"
        self._group = placement.placement_group([{"CPU": number} for number in num_cpus], strategy=strategy)
        self._num_cpus = num_cpus
        if not self._group.wait(timeout):
            raise EngineStartError(
                f"Ray has not placed the workers within {timeout:g} s: they need {len(num_cpus)} nodes with "
                f"{', '.join(f'{number:g}' for number in num_cpus)} CPUs; `ray status` shows what the cluster has"
            )

    def _start(self, keys: tuple[str, str, str] | None) -> None:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        address, name = str(self.config.master_addr), f"engine-core-ray-{secrets.token_hex(8)}"
        plain = address.partition("?")[0] if keys is not None else address
        for number, num_cpus in enumerate(self._num_cpus):
            bundle = scheduling.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            )
            kind = self._ray.remote(RayMachine).options(
                num_cpus=num_cpus, max_restarts=-1, max_task_retries=-1, scheduling_strategy=bundle
            )
            # Machine 0 is the engine's, which runs no worker.
            self._actors.append(kind.remote(plain, number + 1, keys, f"{name}-{number}"))

    def pids(self) -> list[tuple[int, int]]:
        """Return the process ids (actor, `engine-core worker`) of each machine, on its node."""
        return [tuple(pair) for pair in self._ray.get([actor.pids.remote() for actor in self._actors])]

    def nodes(self) -> list[str]:
        """Return the id of each machine's node of Ray."""
        return [str(node) for node in self._ray.get([actor.node.remote() for actor in self._actors])]

    def close(self) -> None:
        """End all actors, release what was reserved, and end the Ray that was started here."""
        actors, self._actors = self._actors, []
        refs = [actor.end.remote() for actor in actors]
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=_END_S)
        for actor in actors:
            self._ray.kill(actor, no_restart=True)
        group, self._group = self._group, None
        if group is not None:
            importlib.import_module("ray.util.placement_group").remove_placement_group(group)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._owns_ray:
            self._owns_ray = False
            self._ray.shutdown()


class RayMachine:
    """An actor: a machine of an engine that runs `engine-core worker`, which joins at an address.

    number: the machine's. keys: of the address; None: it has none, or names them itself. folder: name of its own folder
    on any node. If the process ends, the actor ends too, and Ray starts both again, possibly on another node.
    """

    def __init__(self, address: str, number: int, keys: tuple[str, str, str] | None, folder: str) -> None:
        self._folder, suffix = Path(tempfile.gettempdir(), folder), ""
        if keys is not None:
            suffix = own_keys(self._folder, keys)
        lease, self._lease = os.pipe()  # it ends with this actor, however that ends
        words = ["worker", "--connect", f"{address}{suffix}", "--node-rank", str(number), "--lease-fd", str(lease)]
        try:
            self._process = run_package("tools.cli", words, [lease], {})
        finally:
            os.close(lease)
        self._is_ending = False
        self._watcher = threading.Thread(target=self._watch, name="worker-end", daemon=True)
        self._watcher.start()

    def pids(self) -> tuple[int, int]:
        """Return the process ids of this actor and of its worker process."""
        return os.getpid(), self._process.pid

    def node(self) -> str:
        """Return the id of this actor's node of Ray."""
        return str(importlib.import_module("ray").get_runtime_context().get_node_id())

    def end(self) -> None:
        """End the worker process."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            os.close(self._lease)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._is_ending:
            text = f"engine-core: engine-core worker {describe_exit(code)}; its actor ends, and Ray starts it again"
            os.write(2, f"{text}\n".encode())
            time.sleep(_REST_S)
            os._exit(1)
