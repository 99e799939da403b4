"""A cluster of two nodes of Ray on this machine: in two network namespaces if this user may make them, or on loopback.

In namespaces each node has an address of its own and nothing but a wire between them, which can be cut.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_NET = "10.213.77"
_PORT = 26_079
_JOIN_S = 120.0
_OBJECT_STORE_BYTES = 100 << 20


def own_token() -> dict[str, str]:
    """The environment of a cluster with a token of its own, which Ray would otherwise keep in the user's home."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class TwoNodes:
    """The running cluster. Programs of node 0 run by command(), with this environment."""

    def __init__(self, namespaces: list[str], environment: dict[str, str]) -> None:
        self.namespaces, self.environment = namespaces, environment

    @property
    def kind(self) -> str:
        """What stands for two machines."""
        return "two network namespaces" if self.namespaces else "two nodes on loopback"

    def command(self, *words: str) -> list[str]:
        """The command line of a program of the first node."""
        return [*_inside(self.namespaces, 0), sys.executable, *words]

    def cut(self, seconds: float) -> None:
        """Cut the wire between the nodes for a while."""
        link = [*_inside(self.namespaces, 1), "ip", "link", "set", "ec-wire"]
        subprocess.run([*link, "down"], check=True)
        time.sleep(seconds)
        subprocess.run([*link, "up"], check=True)


@contextlib.contextmanager
def two_nodes(folder: Path, num_cpus: int) -> Iterator[TwoNodes]:
    """Start the cluster; end it and its namespaces."""
    with contextlib.ExitStack() as stack:
        namespaces = _namespaces(stack)
        hosts = [f"{_NET}.1", f"{_NET}.2"] if namespaces else ["127.0.0.1", "127.0.0.1"]
        address, environment = f"{hosts[0]}:{_PORT}", {**os.environ, **own_token()}
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
        ray += ["--num-cpus", str(num_cpus), "--object-store-memory", str(_OBJECT_STORE_BYTES)]
        for node, host in enumerate(hosts):
            head = ["--head", "--port", str(_PORT), "--temp-dir", str(folder / "ray")]
            where = head if node == 0 else ["--address", address]
            command = [*_inside(namespaces, node), *ray, *where, "--node-ip-address", host]
            stack.enter_context(_ray(command, environment, folder / f"ray{node}.log"))
        yield TwoNodes(namespaces, {**environment, "RAY_ADDRESS": address})


def _inside(namespaces: list[str], node: int) -> list[str]:
    return ["ip", "netns", "exec", namespaces[node]] if namespaces else []


def _namespaces(stack: contextlib.ExitStack) -> list[str]:
    """Return the names of two namespaces with a wire between them; none: this user may not make them."""
    names = [f"ec-ray-{os.getpid()}-{node}" for node in range(2)]
    for name in names:
        made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
        if made.returncode:
            return []
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
    first, second = names
    ends = ["name", "ec-wire", "netns", first, "type", "veth", "peer", "name", "ec-wire", "netns", second]
    subprocess.run(["ip", "link", "add", *ends], check=True)
    for node, name in enumerate(names):
        address = ["ip", "-n", name, "address", "add", f"{_NET}.{node + 1}/24", "dev", "ec-wire"]
        subprocess.run(address, check=True)
        for link in ("lo", "ec-wire"):
            subprocess.run(["ip", "-n", name, "link", "set", link, "up"], check=True)
    return names


@contextlib.contextmanager
def _ray(command: list[str], environment: dict[str, str], file: Path) -> Iterator[None]:
    """Run one node of Ray in the foreground of a process group of its own."""
    log = file.open("wb")
    with log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + _JOIN_S
        while b"Ray runtime started" not in (said := Path(log.name).read_bytes()):
            assert process.poll() is None, said.decode(errors="replace")
            assert time.monotonic() < end, said.decode(errors="replace")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
