"""Keys in files: what is made is what is read, and every wrong file is refused by name."""

import os
import stat
from pathlib import Path

import pytest
import zmq

from ipc.errors import AddressError, ConfigError
from ipc.keys.curve import (
    AllowedClient,
    add_client,
    limit_client,
    make_engine_keys,
    read_allowed,
    read_keys,
    remove_client,
)
from ipc.keys.quota import Quota
from ipc.wire.sockets import bind_router, check_address, connect_dealer, keys_of
from tools.cli import main as run_cli


@pytest.fixture
def folder(tmp_path: Path) -> str:
    make_engine_keys(str(tmp_path / "keys"))
    return str(tmp_path / "keys")


def test_keys_are_made_and_read(folder: str, tmp_path: Path) -> None:
    engine = read_keys(folder)
    assert engine.engine == engine.public
    assert read_allowed(folder) == {}
    add_client(folder, "alice", str(tmp_path / "alice"))
    add_client(folder, "bob-2", str(tmp_path / "bob"))
    alice = read_keys(str(tmp_path / "alice"))
    assert zmq.curve_public(alice.secret.encode()).decode() == alice.public
    assert alice.engine == engine.public
    assert [client.name for client in read_allowed(folder).values()] == ["alice", "bob-2"]
    remove_client(folder, "alice")
    assert [client.name for client in read_allowed(folder).values()] == ["bob-2"]
    made = [tmp_path / "alice", *Path(folder).iterdir()]
    assert {stat.S_IMODE(one.stat().st_mode) for one in made} == {0o600}
    assert sorted(one.name for one in made) == ["alice", "allowed", "engine.json"], "no drafts are left"


def test_nothing_is_overwritten(folder: str, tmp_path: Path) -> None:
    before = read_keys(folder)
    with pytest.raises(ConfigError, match=r"no keys can be made in .*: File exists"):
        make_engine_keys(folder)
    add_client(folder, "alice", str(tmp_path / "alice"))
    with pytest.raises(ConfigError, match="allows a client alice already"):
        add_client(folder, "alice", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"cannot be written to .*: File exists"):
        add_client(folder, "carol", str(tmp_path / "alice"))
    assert read_keys(folder) == before
    assert [client.name for client in read_allowed(folder).values()] == ["alice"]


def test_wrong_files_are_refused_by_name(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allows no client dave; it allows: nobody"):
        remove_client(folder, "dave")
    with pytest.raises(ConfigError, match=r"a client's name has 1 to 64 letters"):
        add_client(folder, "a b", str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(str(tmp_path / "missing"))
    bad = tmp_path / "bad"
    bad.write_text("{}")
    with pytest.raises(ConfigError, match=r"other users may read the keys .*: chmod 600"):
        read_keys(str(bad))
    os.chmod(bad, 0o600)
    with pytest.raises(ConfigError, match="is not a file of `engine-core keys`"):
        read_keys(str(bad))
    bad.write_text('{"public": "x", "secret": "y", "engine": "z"}')
    with pytest.raises(ConfigError, match="40 characters of Z85"):
        read_keys(str(bad))
    Path(folder, "allowed").write_text("# people\n\nalice short\n")
    with pytest.raises(ConfigError, match=r"allowed:3: a line is NAME PUBLIC_KEY"):
        read_allowed(folder)


def test_the_keys_of_one_name_have_one_quota(folder: str) -> None:
    file, keys = Path(folder, "allowed"), ("k" * 40, "m" * 40)
    file.write_text(f"bob {keys[0]} rpm=5\nbob {keys[1]} rpm=5\n")
    assert set(read_allowed(folder).values()) == {AllowedClient("bob", Quota(rpm=5))}
    limit_client(folder, "bob", Quota(concurrent=1))
    assert file.read_text() == f"bob {keys[0]} concurrent=1\nbob {keys[1]} concurrent=1\n"
    file.write_text(f"bob {keys[0]} rpm=5\nbob {keys[1]} rpm=6\n")
    with pytest.raises(ConfigError, match=r"allowed:2: the keys of bob share one quota"):
        read_allowed(folder)
    file.write_text(f"bob {keys[0]}\n")
    with pytest.raises(ConfigError, match="allows no client carol; it allows: bob"):
        limit_client(folder, "carol", Quota())


def test_the_list_keeps_what_others_wrote_in_it(folder: str, tmp_path: Path) -> None:
    file, key = Path(folder, "allowed"), "k" * 40
    file.write_bytes(f"# from Zürich\n\nbob {key}\n  # who comes and goes".encode())
    before = file.read_bytes()
    add_client(folder, "alice", str(tmp_path / "alice"))
    assert file.read_bytes().startswith(before + b"\nalice ")
    remove_client(folder, "alice")
    assert file.read_bytes() == before + b"\n"
    file.write_text(f"old {key}\nbob {key}\n# both are one key\n")
    remove_client(folder, "bob")
    assert file.read_text() == "# both are one key\n"


def test_a_list_that_is_too_long_is_refused_and_stays(folder: str, tmp_path: Path) -> None:
    file = Path(folder, "allowed")
    for size in ((1 << 20) + 1, (1 << 20) - 9):
        file.write_text("bob " + "k" * 40 + "\n" + "#" * (size - 45))
        with pytest.raises(ConfigError, match=r"allowed is too long; at most 1048576 bytes are allowed"):
            add_client(folder, "alice", str(tmp_path / "alice"))
        assert file.stat().st_size == size
        assert not (tmp_path / "alice").exists()
    assert read_allowed(folder) == {"k" * 40: AllowedClient("bob")}


@pytest.mark.parametrize("binding", [True, False])
def test_an_address_outside_this_machine_needs_keys(binding: bool) -> None:
    with pytest.raises(
        AddressError, match=r"is reachable from other machines, so it needs keys: make them with `engine-core keys`"
    ):
        check_address("tcp://192.0.2.7:5555", binding=binding)
    check_address("tcp://192.0.2.7:5555?keys=/k", binding=binding)
    assert keys_of("tcp://192.0.2.7:5555?keys=/a b/k") == "/a b/k"
    assert keys_of("tcp://127.0.0.1:1") is None
    assert keys_of("ipc:///tmp/x?keys=/k") is None


def test_sockets_refuse_keys_that_are_not_theirs(folder: str, tmp_path: Path) -> None:
    add_client(folder, "alice", str(tmp_path / "alice"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(AddressError, match="an engine listens with a folder made by `engine-core keys new`"):
        bind_router(context, f"tcp://127.0.0.1:0?keys={tmp_path}/alice")
    with pytest.raises(AddressError, match="cannot be read: No such file"):
        connect_dealer(context, f"tcp://127.0.0.1:1?keys={tmp_path}/nobody")
    context.term()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert run_cli(["keys", "new", folder]) == 0
    assert run_cli(["keys", "add", folder, "alice", str(tmp_path / "alice")]) == 0
    assert run_cli(["keys", "limit", folder, "alice", "--rpm", "60", "--concurrent", "2"]) == 0
    assert run_cli(["keys", "add", folder, "bob", str(tmp_path / "bob"), "--tpm", "5000"]) == 0
    assert run_cli(["keys", "list", folder]) == 0
    assert capsys.readouterr().out == "alice concurrent=2 rpm=60\nbob tpm=5000\n"
    assert run_cli(["keys", "limit", folder, "bob"]) == 0
    assert run_cli(["keys", "limit", folder, "alice", "--rpm", "0"]) == 1
    assert "'rpm=0' is not a limit of a client" in capsys.readouterr().err
    assert run_cli(["keys", "list", folder]) == 0
    assert capsys.readouterr().out == "alice concurrent=2 rpm=60\nbob\n"
    assert run_cli(["keys", "remove", folder, "alice"]) == 0
    assert run_cli(["keys", "remove", folder, "alice"]) == 1
    assert "allows no client alice" in capsys.readouterr().err
