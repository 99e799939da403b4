"""`serve --log-format json`: the supervisor's news are JSON lines too, as all lines of the log."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from frontend.client.client import EngineClient
from frontend.client.transport import ZmqTransport
from tests.tools.test_cli import environment


def test_the_news_of_a_restart_are_json(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    command = [sys.executable, "-m", "engine_core", "serve", "--executor", "fake", "--log-format", "json"]
    command += ["--listen", address, "--owner-file", str(tmp_path / "owner")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as serve:
        assert serve.stdout is not None
        assert serve.stderr is not None
        assert "ready" in json.loads(serve.stdout.readline())["message"]
        client = EngineClient(ZmqTransport(address))
        os.kill(client.welcome.pid, signal.SIGKILL)
        client.close()
        said = ""
        while "ready again" not in said:
            said = json.loads(serve.stderr.readline())["message"]
        serve.send_signal(signal.SIGKILL)
