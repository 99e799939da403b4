"""run_remote: a file of requests as a batch of a running server (docs/http.md, Batches)."""

import hashlib
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frontend.http.openai.batch_files import read_requests
from ipc.errors import ConfigError
from tools.service.server_call import ServerError, call_server, open_server

_POLL_S = 1.0
_AWAY_S = 600.0  # for which a server may be away
_PIECE = 1 << 20
#: Names a batch's input in its metadata, so that a command that is run again finds its batch.
_INPUT = "engine-core-input"
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def run_remote(url: str, source: Path, target: Path, on_count: Callable[[int], None]) -> int:
    """Answer a file by a server's batch, and write the answers to `target`; return how many failed.

    If the server has a batch of the same file that is not cancelled, failed or expired, it is that one. on_count:
    called with the number of answers so far. Errors: ConfigError.
    """
    endpoint, digest = _endpoint(source), _digest(source)
    batch = _found(url, digest, endpoint) or _begun(url, source, digest, endpoint)
    away_since: float | None = None
    while batch["status"] in _UNFINISHED:
        time.sleep(_POLL_S)
        try:
            batch = call_server(url, "GET", f"/v1/batches/{batch['id']}")
        except ServerError as error:
            away_since = away_since or time.monotonic()
            if not error.may_pass or time.monotonic() - away_since > _AWAY_S:
                raise
            continue
        away_since = None
        on_count(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])
    _save(url, batch, target)
    if batch["status"] != "completed":
        problems = [one["message"] for one in (batch["errors"] or {}).get("data", ())]
        text = "; ".join(problems) or f"its answers so far are in {target}"
        raise ConfigError(f"the batch {batch['id']} at {url} is {batch['status']}: {text}")
    return int(batch["request_counts"]["failed"])


def _endpoint(source: Path) -> str:
    urls = {request.url for request in read_requests(source)}
    if len(urls) > 1:
        text = "a server's batch has one: make a file for each, or answer this one without --url"
        raise ConfigError(f"{source} has requests to {', '.join(sorted(urls))}; {text}")
    return urls.pop()


def _digest(source: Path) -> str:
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _found(url: str, digest: str, endpoint: str) -> Any:
    """Return the newest batch of this input that has answers, or will have them; None if there is none."""
    for batch in call_server(url, "GET", "/v1/batches?limit=100")["data"]:
        is_ours = (batch["metadata"] or {}).get(_INPUT) == digest and batch["endpoint"] == endpoint
        if is_ours and batch["status"] in ("validating", "in_progress", "finalizing", "completed"):
            return batch
    return None


def _begun(url: str, source: Path, digest: str, endpoint: str) -> Any:
    """Send the file, and begin a batch."""
    edge = secrets.token_hex(16)
    field = "--%s\r\ncontent-disposition: form-data; name=%s\r\n\r\n"
    name = json.dumps(source.name.encode("ascii", "replace").decode())
    head = field % (edge, '"purpose"') + "batch\r\n" + field % (edge, f'"file"; filename={name}')
    first, last = head.encode(), f"\r\n--{edge}--\r\n".encode()

    def parts() -> Iterator[bytes]:
        yield first
        with open(source, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        yield last

    size = len(first) + source.stat().st_size + len(last)
    headers = {"content-type": f"multipart/form-data; boundary={edge}", "content-length": str(size)}
    with open_server(url, "POST", "/v1/files", parts(), headers) as answer:
        uploaded = json.load(answer)
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
    return call_server(url, "POST", "/v1/batches", {**body, "metadata": {_INPUT: digest}})


def _save(url: str, batch: Any, target: Path) -> None:
    """Write a batch's answers, and then the failed ones, as one file. Errors: ConfigError."""
    new = target.with_name(target.name + ".new")
    try:
        with open(new, "wb") as file:
            for name in filter(None, (batch["output_file_id"], batch["error_file_id"])):
                with open_server(url, "GET", f"/v1/files/{name}/content", None, {}) as content:
                    while piece := content.read(_PIECE):
                        file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except http.client.HTTPException as error:
        raise ConfigError(f"the answers at {url} cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from None
