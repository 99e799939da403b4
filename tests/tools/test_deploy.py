"""The systemd unit and the container file: what can be checked without installing them."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.fake_tokens import fake_tokens
from tests.tools.test_cli import command, environment
from tools.service.notify import notify

pytestmark = pytest.mark.checkout  # deploy/

ROOT = Path(__file__).resolve().parents[2]
UNIT, CONTAINER = ROOT / "deploy" / "engine-core.service", ROOT / "deploy" / "Containerfile"


def options_of(text: str) -> list[str]:
    """Return the serve command's flags in a file."""
    (line,) = re.findall(r"(?m)^(?:ExecStart=|ENTRYPOINT ).*serve.*$", text)
    return re.findall(r"--[a-z-]+", line)


@pytest.mark.parametrize("file", [UNIT, CONTAINER], ids=lambda file: file.name)
def test_serve_has_the_options_that_are_given(file: Path) -> None:
    done = subprocess.run(command("serve", "--help"), env=environment(), capture_output=True, text=True, check=True)
    options = options_of(file.read_text())
    assert "--listen" in options
    assert [flag for flag in options if flag not in done.stdout] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/engine-core/bin/engine-core", "/bin/true"))  # must exist
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]  # 20: exposure 2.0
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


MANAGED = r"""
set -eu
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system  # else the manager says that the machine was not booted with systemd
/lib/systemd/systemd --user --unit=basic.target --log-target=console --log-level=warning &
until [ -S "$XDG_RUNTIME_DIR/systemd/private" ]; do sleep 0.05; done
show() { systemctl --user show engine-core -p "$1" --value; }
ready() { until [ "$(show NRestarts) $(show SubState)" = "$1 running" ]; do sleep 0.05; done; }
streaming() { until $ENGINE top --connect "$ADDRESS" --once --interval 0.05 | grep -q "running 1/"; do :; done; }
systemctl --user start engine-core
ready 0
$ENGINE generate --connect "$ADDRESS" --max-tokens 7000 --quiet 7 > "$FOLDER/whole" &
STREAM=$!
streaming
kill -9 "$(cat /proc/"$(show MainPID)"/task/*/children | cut -d ' ' -f 1)"
until grep -q "epoch 1" "$FOLDER/err"; do sleep 0.05; done
$ENGINE control upgrade --connect "$ADDRESS" --owner-file "$FOLDER/owner"
until grep -q "epoch 2" "$FOLDER/err"; do sleep 0.05; done
kill -9 "$(show MainPID)"
ready 1
kill -STOP "$(show MainPID)"  # its watchdog ends it
ready 2
wait $STREAM
$ENGINE generate --connect "$ADDRESS" --max-tokens 500 --quiet 7 > "$FOLDER/drained" &
STREAM=$!
streaming
systemctl --user stop engine-core
wait $STREAM
echo "$(show ActiveState) $(show Result)"
"""


def unit_of_a_user(folder: Path, address: str) -> str:
    """Return the unit for a manager that is not the system's: without the user and the protection of that."""
    kept, protection = UNIT.read_text().split("DynamicUser=yes")
    _, install = protection.split("[Install]")
    program = " ".join(command("serve", "--listen", address, "--owner-file", str(folder / "owner")))
    kept = kept.replace("WatchdogSec=30", "WatchdogSec=3")
    kept = re.sub(r"(?m)^ExecStart=.*json", f"ExecStart={program} --log-format json", kept)
    arguments = "ENGINE_CORE_ARGS=--executor fake --executor-option step_us=3000 --executor-option max_model_len=100000"
    added = f'Environment=PYTHONPATH={ROOT}\nEnvironment="{arguments}"\nStandardError=append:{folder}/err\n'
    return f"{kept}{added}[Install]{install}"


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/lib/systemd/systemd").exists() or os.geteuid() != 0, reason="needs systemd and root")
def test_a_systemd_manager_runs_it(tmp_path: Path) -> None:
    """In namespaces of its own: start, kill -9 of the engine, upgrade, kill -9 and SIGSTOP of the supervisor, stop."""
    units, runtime, address = tmp_path / "units", tmp_path / "run", f"ipc://{tmp_path}/s"
    units.mkdir()
    runtime.mkdir(mode=0o700)
    (units / UNIT.name).write_text(unit_of_a_user(tmp_path, address))
    paths = {"XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_UNIT_PATH": f"{units}:/usr/lib/systemd/user"}
    names = {"ENGINE": " ".join(command()), "ADDRESS": address, "FOLDER": str(tmp_path), "HOME": str(tmp_path)}
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "bash", "-c", MANAGED]
    done = subprocess.run(inside, env=environment() | paths | names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "inactive success"
    expected = [str(token) for token in fake_tokens([7], 7000, vocab_size=32_000)]
    assert (tmp_path / "whole").read_text().split() == expected
    assert (tmp_path / "drained").read_text().split() == expected[:500]


def test_serve_tells_the_service_manager(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(20)
        with subprocess.Popen(
            command("serve", "--executor", "fake", "--listen", f"ipc://{tmp_path}/e"),
            env=environment() | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "100000"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server:
            states = [manager.recv(1000).decode()]
            while "READY=1" not in states[-1]:
                states.append(manager.recv(1000).decode())
            assert [manager.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            server.terminate()
            while (state := manager.recv(1000)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            assert server.wait(20) == 0
    assert states[0].startswith("STATUS=starting: ")
    assert "STATUS=ready at" in states[-1]


def test_no_manager_and_a_dead_one_are_no_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
