"""/v1/load: how much the engine has to do, for routers and for the page."""

from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response
from frontend.http.service import Service


async def get_load(service: Service, request: Request) -> Response:
    """Return open streams, queue, rows and the use of the KV cache.

    age_s: seconds since the engine gave the figures that are its own; null = it has given none yet.
    """
    service.check_model(request, None)
    found, age_s = await service.statistics.read()
    answer: dict[str, object] = {"streams": len(service.pump.replies), "events": service.pump.num_events}
    answer["age_s"] = age_s
    if found is not None:
        answer |= {
            "running": found.num_running,
            "waiting": found.num_waiting,
            "max_running": service.engine.client.welcome.limits.max_num_seqs,
            "kv_used": round(1 - found.num_free_blocks / max(1, found.num_blocks), 4),
            "generated_tokens": found.num_generation_tokens,
            "steps": found.num_steps,
        }
    return Response(json_bytes(answer))
