"""/v1/conversations: the handlers."""

import time
from typing import Any

import msgspec

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.openai.responses_bodies import check_items, with_ids
from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response, new_id
from frontend.http.served import Served
from frontend.http.service import check_values, tenant_of
from frontend.http.stored.batch_pages import check_metadata
from frontend.http.stored.conversations import Conversation, ConversationStore
from frontend.http.stored.lists import page_of, read_number, read_order, read_query

_MAX_ADDED = 20  # items of one request
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


class ConversationBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/conversations, and of one of them, which takes no items."""

    items: list[Json] | None = None
    metadata: dict[str, Any] | None = None


class ItemsBody(msgspec.Struct, kw_only=True):
    """The body of POST /v1/conversations/{name}/items."""

    items: list[Json]


_decoder = msgspec.json.Decoder(ConversationBody)
_items_decoder = msgspec.json.Decoder(ItemsBody)


async def create_conversation(served: Served, request: Request) -> Response:
    """Begin a conversation, maybe with items."""
    store = conversations_of(served)
    await check_values(served.shared.turns, request)
    body = request.decode(_decoder)
    check_metadata(body.metadata)
    items = _new_items(body.items or [])
    tenant, most = tenant_of(request), served.shared.most_stored(request.key)
    await store.database.check_room(tenant, most)
    made = Conversation(f"conv_{new_id()}", tenant, int(time.time()), body.metadata or {})
    await store.put(made, items, most)
    return Response(json_bytes(made.shown()))


async def get_conversation(served: Served, request: Request) -> Response:
    """Describe a conversation."""
    return Response(json_bytes((await conversations_of(served).get(request.target, tenant_of(request))).shown()))


async def update_conversation(served: Served, request: Request) -> Response:
    """Replace the metadata of a conversation."""
    store = conversations_of(served)
    await check_values(served.shared.turns, request)
    body = request.decode(_decoder)
    if body.items is not None:
        raise HttpError(400, "items are added at /v1/conversations/ID/items", param="items")
    check_metadata(body.metadata)
    found = await store.get(request.target, tenant_of(request))
    found.metadata = body.metadata or {}
    await store.change(found)
    return Response(json_bytes(found.shown()))


async def delete_conversation(served: Served, request: Request) -> Response:
    """Delete a conversation with its items. Responses that were made in it stay."""
    await conversations_of(served).delete(request.target, tenant_of(request))
    return Response(json_bytes({"id": request.target, "object": "conversation.deleted", "deleted": True}))


async def create_items(served: Served, request: Request) -> Response:
    """Add items to a conversation."""
    store = conversations_of(served)
    await check_values(served.shared.turns, request)
    body = request.decode(_items_decoder)
    items, tenant = _new_items(body.items), tenant_of(request)
    await store.add(request.target, tenant, items, served.shared.most_stored(request.key))
    return Response(json_bytes(page_of(items, None, len(items))))


async def list_items(served: Served, request: Request) -> Response:
    """List the items of a conversation."""
    query = read_query(request)
    limit = read_number(query, "limit", _DEFAULT_LIMIT, low=1, high=_MAX_LIMIT)
    is_ascending = read_order(query)
    items = await _items(served, request, request.target)
    return Response(json_bytes(page_of(items if is_ascending else items[::-1], query.get("after"), limit)))


async def get_item(served: Served, request: Request) -> Response:
    """Return an item of a conversation."""
    conversation_id, item_id = request.target.split("/")
    for item in await _items(served, request, conversation_id):
        if item["id"] == item_id:
            return Response(json_bytes(item))
    raise HttpError(404, f"the conversation has no item {item_id!r:.80}")


async def delete_item(served: Served, request: Request) -> Response:
    """Delete an item of a conversation; return the conversation."""
    store, tenant = conversations_of(served), tenant_of(request)
    conversation_id, item_id = request.target.split("/")
    await store.delete_item(conversation_id, tenant, item_id)
    return Response(json_bytes((await store.get(conversation_id, tenant)).shown()))


def conversations_of(served: Served) -> ConversationStore:
    """Return the store of conversations. Errors: HttpError 404 if there is none."""
    if served.shared.conversations is None:
        raise HttpError(404, "nothing is stored here: the server was started without --store")
    return served.shared.conversations


async def _items(served: Served, request: Request, conversation_id: str) -> list[Any]:
    most = served.shared.options.max_body_bytes
    return (await conversations_of(served).history(conversation_id, tenant_of(request), most))[0]


def _new_items(items: list[Json]) -> list[Json]:
    """Return the items with ids. Errors: HttpError 400."""
    if len(items) > _MAX_ADDED:
        raise HttpError(400, f"{len(items)} items; at most {_MAX_ADDED} are added at once", param="items")
    check_items(items)
    return with_ids(items, new_id)
