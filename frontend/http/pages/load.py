"""/v1/load: the engine's load, for routers and the chat page."""

from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response
from frontend.http.service import Service


async def get_load(service: Service, request: Request) -> Response:
    """Return open streams, queue, rows and the use of the KV cache.

    age_s: seconds since the engine's own figures; null = there are none yet.
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
