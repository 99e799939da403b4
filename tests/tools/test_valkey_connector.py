"""A plug-in KV connector as its users have it: built, installed, and serving an engine from a real Valkey or Redis."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.inputs import BlocksArrived, BlocksFound, BlocksStored
from core.kv.orders import Look
from core.tiers import block_store, connector
from core.tiers.block_store import BlockStore
from core.tiers.connector import Guard, Tier
from ipc.options.block_stores import KVTransferConfig
from ipc.options.config import EngineConfig
from tests.core.tiers.test_block_store import TOKENS, Parts, fetch
from tools.lab.bench.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "plugin_kv_connector"
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytest.importorskip("valkey")

pytestmark = [
    pytest.mark.checkout,  # it is built from the checkout's files
    pytest.mark.timeout(180),
    pytest.mark.skipif(SERVER is None, reason="apt-get install valkey-server, or redis-server"),
]

#: One engine: its blocks are stored and found again, damaged, silent with the server, and lost with it.
PROGRAM = """
import os, signal, sys, time
import valkey
from engine_core import LLM
from ipc.options.block_stores import make_key_file
from tests.frontend.test_kv_dir import SIZES, answers

folder, pid, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
make_key_file(f"{folder}/key")
settings = {"kv_connector": "valkey", "kv_connector_extra_config": {"address": f"127.0.0.1:{port}"}}
client = valkey.Valkey(port=port)
with LLM(f"{folder}/tiny", **SIZES, kv_key_file=f"{folder}/key", kv_transfer_config=settings) as llm:
    def again(is_over=lambda: True):
        end = time.monotonic() + 60  # a busy machine may be slow, and is not asked for a while then
        while time.monotonic() < end:
            llm.reset_prefix_cache()
            found = answers(llm)
            assert found[0] == first[0], "other tokens"
            if is_over():
                break
        return found[1][:2], llm.statistics().num_fetched_blocks - before

    before = 0
    first = answers(llm, stores=True)
    print(first[1], client.dbsize() >= 80)
    cached, num_fetched = again(lambda: llm.statistics().num_fetched_blocks >= 40)
    print(cached, num_fetched >= 40)
    before = llm.statistics().num_fetched_blocks
    count = client.dbsize()
    for name in client.scan_iter(count=1000):
        value = bytearray(client.get(name))
        value[len(value) // 2] ^= 1
        client.set(name, bytes(value))
    print(*again(lambda: client.dbsize() < count))
    os.kill(pid, signal.SIGSTOP)
    print(*again())
    os.kill(pid, signal.SIGKILL)
    print(*again())
"""


class Server:
    """The server, which forgets everything when it ends."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._folder = folder
        self.start()

    def start(self) -> None:
        words = [str(SERVER), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self.process = subprocess.Popen([*words, "--loglevel", "warning"], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed the package."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(PACKAGE)], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def test_it_passes_the_check(environment: dict[str, str], server: Server) -> None:
    options = f'{{"address": "127.0.0.1:{server.port}"}}'
    words = ["check-kv-connector", "valkey", "--kv-connector-extra-config", options, "--server-option", "address"]
    checked = run(environment, "-m", "engine_core", *words)
    assert checked.stdout.endswith("KV connector valkey: every check passed\n"), checked.stdout + checked.stderr
    assert checked.stdout.count("    ok  ") == 11


def test_its_own_options_are_its_own_to_check(environment: dict[str, str]) -> None:
    for options, text in (
        ('{"colour": "red"}', "connector 'valkey' has the options address, password_file, prefix; got 'colour'"),
        ('{"address": "nowhere"}', "connector 'valkey': address must be HOST:PORT; got 'nowhere'"),
        ('{"address": "127.0.0.1:1"}', "the connector cannot be opened: the server: "),
    ):
        words = ["check-kv-connector", "valkey", "--kv-connector-extra-config", options]
        refused = run(environment, "-m", "engine_core", *words)
        assert refused.returncode == 1
        assert text in refused.stderr


def test_no_fault_of_the_server_changes_a_token(environment: dict[str, str], server: Server, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    ran = run(environment, "-c", PROGRAM, str(tmp_path), str(server.process.pid), str(server.port))
    assert ran.stdout.splitlines() == [
        "[0, 0, 0, 0] True",
        "[160, 160] True",
        *["[0, 0] 0"] * 3,  # damaged, silent, killed
    ], ran.stderr
    assert "kv_transfer_config: valkey: it has given a damaged or forged KV block, which is computed" in ran.stderr
    assert "kv_transfer_config: valkey: OSError: the server: " in ran.stderr
    assert "it is not asked for 5 s" in ran.stderr


def test_a_server_that_comes_back_empty_is_filled_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    create = importlib.import_module("engine_core_valkey.connector").create
    extra = {"address": f"127.0.0.1:{server.port}"}
    settings = KVTransferConfig(kv_connector="valkey", kv_connector_extra_config=extra)
    inner = create(EngineConfig(kv_transfer_config=settings, kv_key_file="key", kv_host_bytes=2**20))
    now, parts = [100.0], Parts(tmp_path / "kv")
    monkeypatch.setattr(connector.log, "say", lambda text: None)
    monkeypatch.setattr(connector, "LOOK_S", 60.0)  # busy machines are slow, which other tests are about
    monkeypatch.setattr(block_store.time, "monotonic", lambda: now[0])
    tier = Tier("kv_transfer_config", Guard("valkey", inner, lambda: now[0]))
    parts.store = BlockStore([tier], parts.names, parts.blocks, parts.contents, parts.evictions)
    parts.store.open()
    look = Look(1, -1, TOKENS, 0)
    parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 3)]
    assert parts.store.carry_out(look) == BlocksFound(1, 3)
    server.kill()
    assert parts.store.carry_out(fetch()) == BlocksArrived(7, 0)
    assert parts.store.carry_out(look) == BlocksFound(1, 0)
    server.start()
    now[0] += 61
    assert parts.store.carry_out(look) == BlocksFound(1, 0)
    parts.store.carry_out(parts.leave())
    assert parts.save() == [BlocksStored(0, 3)]
    assert parts.store.carry_out(fetch()) == BlocksArrived(7, 3)
    parts.store.close()
