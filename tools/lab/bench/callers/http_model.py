"""What HTTP costs a model: the same requests through the Python client and as streams over HTTP, on one engine.

Both take turns, so that they see the same machine. The ratio is of medians: the client's seconds / the seconds over
HTTP.
The caller runs in this process; the HTTP server and the engine have processes of their own.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from frontend.engine.process import EngineProcess
from frontend.http.process.options import HttpOptions
from frontend.http.process.worker import HttpWorker
from frontend.http.wire.listen import bind_http
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tools.commands.http import check_installed
from tools.lab.bench.costs.wire import connect, post
from tools.lab.bench.workloads import Workload, make_workload

_WORKLOADS = ("batch32", "lat1")
_ROUNDS = 3


def measure_http_model(config: EngineConfig, *, rep: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each workload. Errors: ConfigError without the extra; those of the engine."""
    check_installed()
    with EngineProcess(config) as engine, bind_http("127.0.0.1:0") as bound:
        worker = HttpWorker(engine.address, [bound], HttpOptions())
        worker.start()
        try:
            with LLM(connect=engine.address, skip_tokenizer_init=True) as llm:
                for name in _WORKLOADS:
                    yield {"workload": f"http {name}", "rep": rep, **_compare(llm, bound.getsockname()[1], name)}
        finally:
            worker.stop()


def _compare(llm: LLM, port: int, name: str) -> dict[str, Any]:
    """Return the seconds of both ways, of _ROUNDS rounds after a warm-up round."""
    workload = make_workload(name)
    client: list[float] = []
    over_http: list[float] = []
    for round_ in range(_ROUNDS + 1):
        client.append(time_client(llm, workload.shifted(2 * round_)))
        over_http.append(uvloop.run(time_http(port, workload.shifted(2 * round_ + 1))))
    client_s, http_s = statistics.median(client[1:]), statistics.median(over_http[1:])
    return {
        "requests": len(workload.requests),
        "out_tok": workload.num_output_tokens,
        "client_out_tok_s": round(workload.num_output_tokens / client_s, 1),
        "http_out_tok_s": round(workload.num_output_tokens / http_s, 1),
        "ratio": round(client_s / http_s, 3),
        "rounds": _ROUNDS,
    }


def time_client(llm: LLM, workload: Workload) -> float:
    """Return the seconds in which the Python client has all answers."""
    prompts: Any = [{"prompt_token_ids": request.prompt} for request in workload.requests]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True) for request in workload.requests
    ]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


async def time_http(port: int, workload: Workload) -> float:
    """Return the seconds in which all streams of the HTTP server have ended."""
    peers = [await connect(port) for _ in workload.requests]
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{**fixed, "prompt": one.prompt, "max_tokens": one.max_tokens} for one in workload.requests]
    begin = time.perf_counter()
    asked = [peer.ask(post("/v1/completions", body)) for peer, body in zip(peers, bodies, strict=True)]
    await asyncio.gather(*asked)
    seconds = time.perf_counter() - begin
    for peer in peers:
        peer.close()
    return seconds
