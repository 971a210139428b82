"""Paginated lists: `limit` items after the item `after`, in ascending or descending order."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request

from server.http.errors import invalid_value


class Item(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Item)


def page(request: Request, items: Sequence[T], *, default: int, max_limit: int) -> tuple[list[T], bool]:
    """Return the page that a request's query selects, and whether more items follow.

    `items` are in the order of their creation. `default` is the page's length without a `limit`. Raises
    `ApiError`.
    """
    query = request.query_params
    limit = query.get("limit", str(default))
    order = query.get("order", "desc")
    after = query.get("after")
    # Cut to 20 digits, because `int` raises ValueError beyond 4,300.
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:20]) <= max_limit:
        raise invalid_value(
            f"'limit' must be a whole number from 1 to {max_limit}, got {limit[:32]!r}.", "limit"
        )
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
    end = start + int(limit)
    return ordered[start:end], end < len(ordered)
