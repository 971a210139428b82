"""Rate limits of each API key, in requests and tokens a minute: token buckets that hold a minute's worth.

The cost of a request in tokens is known only at its end. So tokens are reserved before the work starts, by
the most that it may cost, and settled at the end: the difference to the real cost is refunded, or charged. A
key without tokens left is refused before any work.

Each key has a pair of buckets. Without keys, all requests share one pair. The module does not depend on
queues or engines.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ApiError
from server.http.record import RequestRecord
from server.options.settings import RateLimit

DEFAULT_MAX_TOKENS = 256  # reserved for an answer without a limit; tokens beyond are charged at its end
_ROUNDING = 1e-6  # the rounding of sums must not decide


class Bucket:
    """`limit` requests or tokens a minute.

    The level is negative after more was used than had been reserved.
    """

    def __init__(self, kind: str, limit: int, now: Callable[[], float]) -> None:
        self.kind = kind
        self.limit = limit
        self._now = now
        self._level = float(limit)
        self._time = now()  # of `_level`

    @property
    def level(self) -> float:
        """The amount that may be taken now."""
        now = self._now()
        refill = (now - self._time) * self.limit / 60
        self._level = min(self.limit, self._level + refill)
        self._time = now
        return self._level

    def seconds_until(self, level: float) -> float:
        return max(level - self.level, 0) * 60 / self.limit

    def take(self, amount: int) -> None:
        """Take `amount`, or nothing and raise `ApiError`."""
        if amount > self.level + _ROUNDING:
            raise self._refusal(amount)
        self._level -= amount

    def settle(self, num_reserved: int, num_used: int) -> None:
        """Replace a reservation by the amount that was used."""
        self._level = min(self.limit, self.level + num_reserved - num_used)

    def headers(self) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(max(math.floor(self.level), 0)),
            f"x-ratelimit-reset-{self.kind}": duration(self.seconds_until(self.limit)),
        }

    def _refusal(self, amount: int) -> ApiError:
        """Return the error for a request that exceeds the current level, or even the limit."""
        limit = f"{self.kind} per min: Limit {self.limit}, Requested {amount}"
        if amount > self.limit:
            message = f"Request too large for the limit on {limit}. Please reduce input or requested output."
            return ApiError(
                429, "rate_limit_exceeded", message, kind=self.kind, headers={"x-should-retry": "false"}
            )
        seconds = self.seconds_until(amount)
        used = self.limit - math.floor(self.level)
        message = f"Rate limit reached on {limit}, Used {used}. Please try again in {duration(seconds)}."
        headers = {
            "Retry-After": str(max(math.ceil(seconds), 1)),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
        }
        return ApiError(429, "rate_limit_exceeded", message, kind=self.kind, headers=headers)


class Account:
    """The buckets of one key."""

    def __init__(self, limit: RateLimit, now: Callable[[], float]) -> None:
        self.requests = None if limit.requests is None else Bucket("requests", limit.requests, now)
        self.tokens = None if limit.tokens is None else Bucket("tokens", limit.tokens, now)

    def headers(self) -> dict[str, str]:
        """Return the state of the buckets in OpenAI's headers."""
        headers: dict[str, str] = {}
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                headers |= bucket.headers()
        return headers


class RateQuota:
    """The use that one request makes of its account.

    The account's state goes into the headers of the answer.
    """

    def __init__(self, account: Account, record: RequestRecord) -> None:
        self._account = account
        self._record = record
        self._num_reserved = 0
        self.refused_by: str | None = None  # the kind of the limit that refused the request
        self._update_headers()

    def admit(self) -> None:
        """Count the request before any work is done for it.

        Raises `ApiError`, also when no tokens are left.
        """
        account = self._account
        if account.tokens is not None and account.tokens.level < 1:
            self._take(account.tokens, 1)  # raises: the level is too low
        if account.requests is not None:
            self._take(account.requests, 1)
        self._update_headers()

    def reserve(self, num_tokens: int) -> None:
        """Reserve the tokens that the request may cost. Raises `ApiError`."""
        if self._account.tokens is not None:
            self._take(self._account.tokens, num_tokens)
            self._num_reserved = num_tokens
            self._update_headers()

    def settle(self) -> None:
        """Refund the reserved tokens that were not used, or charge those used beyond the reservation."""
        if self._account.tokens is not None:
            num_used = self._record.num_prompt_tokens + self._record.num_output_tokens
            self._account.tokens.settle(self._num_reserved, num_used)

    def _take(self, bucket: Bucket, amount: int) -> None:
        self.refused_by = bucket.kind
        bucket.take(amount)
        self.refused_by = None

    def _update_headers(self) -> None:
        self._record.headers.update(self._account.headers())


class RateObserver(Protocol):
    def rate_limited(self, kind: str) -> None:
        """The rate limit `kind` refused a request."""
        ...


class Accounts:
    """The accounts of all keys, one for each: clients' requests and lines of batches share them."""

    def __init__(
        self, default: RateLimit, by_tenant: Mapping[str, RateLimit], now: Callable[[], float]
    ) -> None:
        self._default = default
        self._by_tenant = by_tenant
        self._now = now
        self._accounts: dict[str, Account] = {}  # by tenant

    def of(self, tenant: str) -> Account:
        if tenant not in self._accounts:
            self._accounts[tenant] = Account(self._by_tenant.get(tenant, self._default), self._now)
        return self._accounts[tenant]


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
        quota = RateQuota(self._accounts.of(record.tenant), record)
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
