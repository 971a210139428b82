"""Rate limits of each API key, in requests and tokens a minute: token buckets that hold a minute's worth.

The cost of a request in tokens is known only at its end. So tokens are reserved before the work starts, by
the most that it may cost, and settled at the end: the difference to the real cost is refunded, or charged. A
key without tokens left is refused before any work.

Each key has a pair of buckets. Without keys, all requests share one pair. The module does not depend on
queues or engines.
"""

import math
from collections.abc import Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ApiError
from server.http.record import RequestRecord
from server.options.settings import RateLimit
from server.state.interface import Buckets

DEFAULT_MAX_TOKENS = 256  # reserved for an answer without a limit; tokens beyond are charged at its end


class Bucket:
    """A request's view of one of its key's buckets, of `limit` requests or tokens a minute.

    `level` is the amount that could be taken at the last look. It is negative after more was used than had
    been reserved.
    """

    def __init__(self, kind: str, limit: int, tenant: str, buckets: Buckets) -> None:
        self.kind = kind
        self.limit = limit
        self.level = float(limit)
        self._name = f"{tenant}:{kind}"
        self._buckets = buckets

    async def look(self) -> None:
        await self._take(0)

    async def take(self, amount: int) -> None:
        """Take `amount`, or nothing and raise `ApiError`."""
        if not await self._take(amount):
            raise self.refusal(amount)

    def settle(self, num_reserved: int, num_used: int) -> None:
        """Replace a reservation by the amount that was used."""
        self._buckets.settle(self._name, self.limit, num_used - num_reserved)

    def headers(self) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(max(math.floor(self.level), 0)),
            f"x-ratelimit-reset-{self.kind}": duration(self._seconds_until(self.limit)),
        }

    def refusal(self, amount: int) -> ApiError:
        """Return the error for a request that exceeds the current level, or even the limit."""
        limit = f"{self.kind} per min: Limit {self.limit}, Requested {amount}"
        if amount > self.limit:
            message = f"Request too large for the limit on {limit}. Please reduce input or requested output."
            return ApiError(
                429, "rate_limit_exceeded", message, kind=self.kind, headers={"x-should-retry": "false"}
            )
        seconds = self._seconds_until(amount)
        used = self.limit - math.floor(self.level)
        message = f"Rate limit reached on {limit}, Used {used}. Please try again in {duration(seconds)}."
        headers = {
            "Retry-After": str(max(math.ceil(seconds), 1)),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
        }
        return ApiError(429, "rate_limit_exceeded", message, kind=self.kind, headers=headers)

    async def _take(self, amount: int) -> bool:
        self.level, is_taken = await self._buckets.take(self._name, self.limit, amount)
        return is_taken

    def _seconds_until(self, level: float) -> float:
        return max(level - self.level, 0) * 60 / self.limit


class RateQuota:
    """The use that one request makes of its key's buckets.

    Their state goes into the headers of the answer.
    """

    def __init__(self, limit: RateLimit, record: RequestRecord, buckets: Buckets) -> None:
        def bucket(kind: str, limit: int | None) -> Bucket | None:
            return None if limit is None else Bucket(kind, limit, record.tenant, buckets)

        self._requests = bucket("requests", limit.requests)
        self._tokens = bucket("tokens", limit.tokens)
        self._record = record
        self._num_reserved = 0
        self.refused_by: str | None = None  # the kind of the limit that refused the request

    async def look(self) -> None:
        """Report the buckets before anything is taken."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                await bucket.look()
        self._update_headers()

    async def admit(self) -> None:
        """Count the request before any work is done for it, after `look`.

        Raises `ApiError`, also when no tokens are left.
        """
        if self._tokens is not None and self._tokens.level < 1:
            self.refused_by = self._tokens.kind
            raise self._tokens.refusal(1)
        if self._requests is not None:
            await self._take(self._requests, 1)
        self._update_headers()

    async def reserve(self, num_tokens: int) -> None:
        """Reserve the tokens that the request may cost. Raises `ApiError`."""
        if self._tokens is not None:
            await self._take(self._tokens, num_tokens)
            self._num_reserved = num_tokens
            self._update_headers()

    def settle(self) -> None:
        """Refund the reserved tokens that were not used, or charge those used beyond the reservation."""
        if self._tokens is not None:
            num_used = self._record.num_prompt_tokens + self._record.num_output_tokens
            self._tokens.settle(self._num_reserved, num_used)

    async def _take(self, bucket: Bucket, amount: int) -> None:
        self.refused_by = bucket.kind
        await bucket.take(amount)
        self.refused_by = None

    def _update_headers(self) -> None:
        """Put the state of the buckets into OpenAI's headers."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                self._record.headers.update(bucket.headers())


class RateObserver(Protocol):
    def rate_limited(self, kind: str) -> None:
        """The rate limit `kind` refused a request."""
        ...


class Accounts:
    """The limits and buckets of all keys: clients' requests and lines of batches share them."""

    def __init__(self, default: RateLimit, by_tenant: Mapping[str, RateLimit], buckets: Buckets) -> None:
        self._default = default
        self._by_tenant = by_tenant
        self._buckets = buckets

    def quota(self, record: RequestRecord) -> RateQuota:
        return RateQuota(self._by_tenant.get(record.tenant, self._default), record, self._buckets)


class RateLimits:
    """Middleware that gives each POST request a quota on its key's account.

    Without an observer, refusals are not reported: a batch's lines wait and are sent again.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, observer: RateObserver | None) -> None:
        self._app = app
        self._accounts = accounts
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        quota = self._accounts.quota(record)
        await quota.look()
        record.quota = quota
        try:
            await self._app(scope, receive, send)
        finally:
            # A background response has used its tokens only when its work ends, after the answer.
            record.when_done(quota.settle)
            if quota.refused_by is not None and self._observer is not None:
                self._observer.rate_limited(quota.refused_by)


def duration(seconds: float) -> str:
    """Return a time in OpenAI's format: 0s, 20ms, 8.64s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    text = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
