"""Lists in OpenAI's form: what their queries say, and one page of them."""

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.request import Request


def read_query(request: Request) -> Mapping[str, str]:
    """Return the parameters of a request's query, the last of each name. Errors: HttpError 400."""
    try:
        found = parse_qs(request.query.decode("ascii"), keep_blank_values=True, max_num_fields=32)
    except ValueError as error:
        raise HttpError(400, f"the query cannot be read: {error}") from None
    return {name: values[-1] for name, values in found.items()}


def read_number(query: Mapping[str, str], name: str, default: int, *, low: int, high: int) -> int:
    """Return a whole number of a query. Errors: HttpError 400."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 17 or not low <= int(text) <= high:
        raise HttpError(400, f"{name} must be a whole number from {low} to {high}; got {text!r:.40}", param=name)
    return int(text)


def read_order(query: Mapping[str, str]) -> bool:
    """Return whether a list is asked for in ascending order; it is descending otherwise. Errors: HttpError 400."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise HttpError(400, f"order must be asc or desc; got {order!r:.40}", param="order")
    return order == "asc"


def page_of(items: Sequence[Json], after: str | None, limit: int) -> Json:
    """Return the page of a list that begins behind the item `after`. Errors: HttpError 400 if it is not there."""
    if after is not None:
        at = next((at for at, item in enumerate(items) if item.get("id") == after), None)
        if at is None:
            raise HttpError(400, f"after: the list has no item {after!r:.80}", param="after")
        items = items[at + 1 :]
    page = items[:limit]
    first, last = (page[0].get("id"), page[-1].get("id")) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
