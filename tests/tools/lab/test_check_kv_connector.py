"""check-kv-connector: the connectors of this package pass, and each fault is named."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from core.tiers.block_file import BlockToLoad, BlockToStore
from ipc.errors import ConfigError
from ipc.options.block_stores import KVTransferConfig
from tools.cli import main
from tools.lab.check_kv_connector import __main__ as checks
from tools.lab.check_kv_connector.__main__ import Finding, check_kv_connector

pytestmark = pytest.mark.timeout(120)
NAMES = ["stored", "gaps", "sizes", "damage", "overwritten", "restart"]


def test_the_folder_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-kv-connector", "folder"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in lines[:-1]] == [["ok", name] for name in NAMES]
    assert lines[-1].startswith("  seen  faults of the server: not checked")
    assert last == "KV connector folder: every check passed"


def test_what_cannot_be_checked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["peers"], "stores no blocks"),
        (["nowhere"], "there is no KV connector 'nowhere'; available: folder, peers; a plug-in registers"),
        (["folder", "--kv-connector-extra-config", "{"], "must be a JSON object"),
        (["folder", "--server-option", "address"], "must name an option with HOST:PORT; its value is 'None'"),
    ):
        assert main(["check-kv-connector", *words]) == 1
        assert text in capsys.readouterr().err


class Shelf:
    """A connector as it should be, over a dict that outlives it."""

    def __init__(self, blocks: dict[bytes, bytes]) -> None:
        self.blocks = blocks

    def open(self) -> None:
        """There is nothing to open."""

    def close(self) -> None:
        """There is nothing to close."""

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self.blocks), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        for block in blocks:
            if (data := self.blocks.get(block.name)) is None:
                return
            if not block.take(data):
                del self.blocks[block.name]

    def store(self, block: BlockToStore) -> bool:
        data = block.pack()
        if data is None or block.name in self.blocks:
            return False
        self.blocks[block.name] = bytes(data)
        return True


class Claiming(Shelf):
    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        return sum(name in self.blocks for name in names)


class Forgetful(Shelf):
    def store(self, block: BlockToStore) -> bool:
        return super().store(block) and self.blocks.pop(block.name) is not None


class Raising(Shelf):
    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        for block in blocks:
            if not block.take(self.blocks[block.name]):
                raise ValueError("bad block")


class Keeping(Shelf):
    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        for block in blocks:
            if (data := self.blocks.get(block.name)) is None:
                return
            block.take(data)


class Hasty(Shelf):
    def store(self, block: BlockToStore) -> bool:
        is_new = block.name not in self.blocks
        self.blocks.setdefault(block.name, bytes(block.pack() or b"x"))
        return is_new


class Slow(Shelf):
    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        threading.Event().wait(0.05)
        return super().find(lookup, names)


class Mute(Shelf):
    def store(self, block: BlockToStore) -> Any:
        super().store(block)


def findings_of(monkeypatch: pytest.MonkeyPatch, kind: type[Shelf]) -> dict[str, Finding]:
    blocks: dict[bytes, bytes] = {}
    monkeypatch.setattr(checks, "create_connector", lambda config: kind(blocks))
    return {one.name: one for one in check_kv_connector(KVTransferConfig(kv_connector="shelf"))}


def test_a_connector_as_it_should_be_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings_of(monkeypatch, Shelf)
    assert all(found[name].is_right for name in NAMES), found


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (Claiming, "gaps", "find() counts 4 blocks, but the third is missing"),
        (Forgetful, "stored", "0 of 128 blocks are found after they were stored"),
        (Raising, "gaps", "load() has raised KeyError instead of OSError"),
        (Keeping, "damage", "a damaged block stays: remove it if take() returns False"),
        (Hasty, "overwritten", "counts as stored"),
        (Slow, "stored", "find() took 0.0"),
        (Mute, "stored", "store() has returned None, not whether the block is new"),
    ],
)
def test_a_fault_is_named(monkeypatch: pytest.MonkeyPatch, kind: type[Shelf], name: str, text: str) -> None:
    if kind is Slow:
        monkeypatch.setattr(checks, "LOOK_S", 0.01)
        monkeypatch.setattr(checks, "_SLACK_S", 0.0)
    found = findings_of(monkeypatch, kind)
    first = next(one for one in found.values() if one.is_right is False)
    assert first.name == name
    assert text in first.text


class Server:
    """A server over TCP that keeps values: S<name><length><data>, F<name>, answered by one byte or length and data."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as file, contextlib.suppress(OSError):
            while kind := file.read(1):
                name = file.read(16)
                if kind == b"S":
                    data = file.read(int.from_bytes(file.read(4), "little"))
                    if len(data):
                        self.blocks[name] = data
                value = self.blocks.get(name, b"")
                client.sendall(len(value).to_bytes(4, "little") + value)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Remote(Shelf):
    """A connector to such a server. It waits for `patience` seconds."""

    patience = 0.5

    def __init__(self, address: str) -> None:
        super().__init__({})
        host, _, port = address.rpartition(":")
        self._address = host, int(port)

    def _ask(self, question: bytes) -> bytes:
        with socket.create_connection(self._address, self.patience) as server, server.makefile("rb") as file:
            server.sendall(question)
            head = file.read(4)
            size = int.from_bytes(head, "little")
            data = file.read(min(size, 1 << 22))
            if len(head) < 4 or len(data) < size:
                raise ConnectionError("the server has ended")
            return data

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        for count, name in enumerate(names):
            if not self._ask(b"F" + name):
                return count
        return len(names)

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        for block in blocks:
            data = self._ask(b"F" + block.name)
            if not data:
                return
            if not block.take(data):
                self._ask(b"S" + block.name + (1).to_bytes(4, "little") + b"x")

    def store(self, block: BlockToStore) -> bool:
        if len(self._ask(b"F" + block.name)) > 1:
            return False
        data = block.pack()
        if data is None:
            return False
        self._ask(b"S" + block.name + len(data).to_bytes(4, "little") + bytes(data))
        return True


class Impatient(Remote):
    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        try:
            return super().find(lookup, names)
        except OSError as error:
            raise RuntimeError(str(error)) from error


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


Create = Callable[[Any], Remote]
FAULTS = ["dead server", "silent server", "connection cut", "damaged reply", "reply in pieces"]


@pytest.mark.parametrize(("kind", "wrong"), [(Remote, []), (Impatient, FAULTS[:2])])
def test_faults_of_a_server_reach_the_connector(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: type[Remote], wrong: list[str]
) -> None:
    def create(config: Any) -> Remote:
        return kind(config.kv_transfer_config.kv_connector_extra_config["address"])

    monkeypatch.setattr(checks, "create_connector", create)
    monkeypatch.setattr(checks, "_SLACK_S", 30.0)  # of busy machines, where a server in Python is slow
    monkeypatch.setattr(checks, "_BACK_S", 60.0)
    settings = KVTransferConfig(kv_connector="remote", kv_connector_extra_config={"address": server.address})
    found = {one.name: one for one in check_kv_connector(settings, "address")}
    assert [name for name in FAULTS if not found[name].is_right][:2] == wrong, found
    if kind is Remote:
        assert "3 of 3 calls raised OSError" in found["dead server"].text
        assert "3 of 3 calls raised OSError" in found["silent server"].text
        assert "0 of 3 calls raised OSError" in found["reply in pieces"].text


def test_without_a_server_it_says_so(server: Server) -> None:
    server.close()
    settings = KVTransferConfig(kv_connector="folder", kv_connector_extra_config={"address": server.address})
    with pytest.raises(ConfigError, match=f"there is no server at {server.address}"):
        list(check_kv_connector(settings, "address"))
