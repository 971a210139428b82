"""What is known of one HTTP request: put together while it is answered, by whoever learns it, and read by what tells of requests."""

from dataclasses import dataclass, field

from starlette.types import Scope

_KEY = "snapserve.record"


@dataclass(slots=True)
class RequestRecord:
    """One request. `tenant` is a name for the API key that says nothing of the key, and empty where there are no keys."""

    request_id: str
    tenant: str = ""
    headers: dict[str, str] = field(default_factory=dict)  # to be sent with the answer, whatever becomes of it

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """Return the record of the request that this scope is about."""
        record = scope[_KEY]
        assert isinstance(record, cls)
        return record

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
