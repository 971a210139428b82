"""Lists that are given out page by page: after an item, so many, in one order or the other."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request

from server.http.errors import invalid_value


class Item(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Item)


def page(request: Request, items: Sequence[T], *, default: int, most: int) -> tuple[list[T], bool]:
    """Return the page that a request's query asks for, of items in the order of their making, and whether there are more.

    Raises `ApiError`.
    """
    query = request.query_params
    limit, order, after = query.get("limit", str(default)), query.get("order", "desc"), query.get("after")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:20]) <= most:
        raise invalid_value(f"'limit' must be a whole number from 1 to {most}, got {limit[:32]!r}.", "limit")
    if order not in ("asc", "desc"):
        raise invalid_value(f"'order' must be 'asc' or 'desc', got {order[:32]!r}.", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        start = next((index for index, item in enumerate(ordered, start=1) if item.id == after), 0)
        if start == 0:
            raise invalid_value(
                f"'after' must be the id of an item of the list, got {after[:128]!r}.", "after"
            )
    return ordered[start : start + int(limit)], start + int(limit) < len(ordered)
