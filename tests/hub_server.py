"""A Hugging Face Hub and a ModelScope on 127.0.0.1: the calls of their libraries to find and get a model's files."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


def commit_of(repo: str) -> str:
    """Return the commit of a repository's only revision, main."""
    return hashlib.sha1(repo.encode()).hexdigest()


class HubServer:
    """Serves `repos`: repository -> file -> content.

    refusals: repository -> (status, the Hub's error code), for all calls that concern it.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []  # METHOD PATH
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the files whose contents were sent."""
        return [call.rpartition("/")[2] for call in self.calls if call.startswith("GET") and "/resolve/" in call]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that uses this Hub, and a cache below `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        hub = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return kept | hub

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def hub_server(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[HubServer]:
    """Yield a server of these repositories."""
    server = HubServer()
    server.repos = {name: dict(files) for name, files in repos.items()}
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    timeout = 2

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.calls.append(f"{self.command} {path}")
        words = path.strip("/").split("/")
        if words[:3] == ["api", "v1", "models"]:
            self._answer_modelscope(words[3:])
            return
        is_call = words[:2] == ["api", "models"]
        words = words[2:] if is_call else words
        if len(words) < 4:  # what the library asks beside: not a model
            self._refuse(404, "")
            return
        repo, verb, revision = "/".join(words[:2]), words[2], words[3]
        if repo in self.hub.refusals:
            self._refuse(*self.hub.refusals[repo])
        elif repo not in self.hub.repos:
            self._refuse(401, "RepoNotFound")  # to those without a token the Hub does not say that there is none
        elif revision not in ("main", commit_of(repo)):
            self._refuse(404, "RevisionNotFound")
        elif is_call:
            self._send(repo, json.dumps(self._described(repo, verb)).encode(), "application/json")
        elif (content := self.hub.repos[repo].get("/".join(words[4:]))) is not None:
            self._send(repo, content, "application/octet-stream")
        else:
            self._refuse(404, "EntryNotFound")

    def _answer_modelscope(self, words: list[str]) -> None:
        repo, call = "/".join(words[:2]), words[2:]
        files = self.hub.repos.get(repo, {})
        wanted = parse_qs(urlsplit(self.path).query).get("FilePath", [""])[0]
        if call == ["repo", "files"] and files:
            listed = [{"Path": name, "Size": len(one), "Type": "blob"} for name, one in files.items()]
            self._send(repo, json.dumps({"Code": 200, "Data": {"Files": listed}}).encode(), "application/json")
        elif call == ["repo"] and wanted in files:
            self._send(repo, files[wanted], "application/octet-stream")
        else:
            self._refuse(404, "")

    def _described(self, repo: str, verb: str) -> object:
        files = self.hub.repos[repo]
        if verb == "tree":
            return [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
        return {"id": repo, "sha": commit_of(repo), "siblings": [{"rfilename": name} for name in files], "tags": []}

    def _send(self, repo: str, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(repo))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()
