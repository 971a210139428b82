"""How many requests and tokens an API key may ask for in a minute: a bucket each, that fills evenly and holds a minute's worth.

Tokens are reserved before a request's work begins, by what it may cost, and settled when it has ended, by what it did cost. Nothing here
knows of queues or engines. There is one pair of buckets a key, and one for all requests where there are no keys.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ApiError
from server.http.record import RequestRecord
from server.options.settings import RateLimit

DEFAULT_MAX_TOKENS = (
    256  # reserved for an answer whose request does not limit it; whatever it is longer is settled at its end
)
_ROUNDING = 1e-6  # sums of floats must not decide


class Bucket:
    """So many of a kind a minute. It goes below empty when more was used than had been reserved."""

    def __init__(self, kind: str, limit: int, now: Callable[[], float]) -> None:
        self.kind = kind
        self.limit = limit
        self._now = now
        self._level, self._time = float(limit), now()

    @property
    def level(self) -> float:
        now = self._now()
        self._level, self._time = min(self.limit, self._level + (now - self._time) * self.limit / 60), now
        return self._level

    def seconds_until(self, level: float) -> float:
        return max(level - self.level, 0) * 60 / self.limit

    def take(self, amount: int) -> None:
        """Take what is asked for, or nothing. Raises `ApiError`."""
        if amount > self.level + _ROUNDING:
            raise self._refusal(amount)
        self._level -= amount

    def settle(self, num_reserved: int, num_used: int) -> None:
        self._level = min(self.limit, self.level + num_reserved - num_used)

    def headers(self) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(max(math.floor(self.level), 0)),
            f"x-ratelimit-reset-{self.kind}": duration(self.seconds_until(self.limit)),
        }

    def _refusal(self, amount: int) -> ApiError:
        """Return the answer to a request for which there is not enough now, or would never be."""
        limit = f"{self.kind} per min: Limit {self.limit}, Requested {amount}"
        if amount > self.limit:
            message = f"Request too large for the limit on {limit}. Please reduce the input or the output asked for."
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
        """Return how the account stands, as OpenAI tells it."""
        return {
            name: value
            for bucket in (self.requests, self.tokens)
            if bucket is not None
            for name, value in bucket.headers().items()
        }


class RateQuota:
    """What one request takes from its account; the account's state is told in the headers of the answer."""

    def __init__(self, account: Account, record: RequestRecord) -> None:
        self._account, self._record = account, record
        self._num_reserved = 0
        self.refused_by: str | None = None  # the kind of the limit that the request ran into
        self._tell()

    def admit(self) -> None:
        """Count the request, before any work is done for it. Raises `ApiError`, also when the key has no tokens left."""
        account = self._account
        if account.tokens is not None and account.tokens.level < 1:
            self._take(account.tokens, 1)
        if account.requests is not None:
            self._take(account.requests, 1)
        self._tell()

    def reserve(self, num_tokens: int) -> None:
        """Reserve what the request may cost. Raises `ApiError`."""
        if self._account.tokens is not None:
            self._take(self._account.tokens, num_tokens)
            self._num_reserved = num_tokens
            self._tell()

    def settle(self) -> None:
        """Give back what was reserved and not used, or take what was used beyond it."""
        if self._account.tokens is not None:
            self._account.tokens.settle(
                self._num_reserved, self._record.num_prompt_tokens + self._record.num_output_tokens
            )

    def _take(self, bucket: Bucket, amount: int) -> None:
        self.refused_by = bucket.kind
        bucket.take(amount)
        self.refused_by = None

    def _tell(self) -> None:
        self._record.headers.update(self._account.headers())


class RateObserver(Protocol):
    def rate_limited(self, kind: str) -> None:
        """A request was refused by the limit of this kind."""
        ...


class RateLimits:
    """Middleware that gives every request a quota of its key's account. Accounts are as many as there are keys."""

    def __init__(
        self,
        app: ASGIApp,
        default: RateLimit,
        by_tenant: Mapping[str, RateLimit],
        now: Callable[[], float],
        observer: RateObserver,
    ) -> None:
        self._app, self._observer = app, observer
        self._default, self._by_tenant, self._now = default, by_tenant, now
        self._accounts: dict[str, Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        quota = record.quota = RateQuota(self._account(record.tenant), record)
        try:
            await self._app(scope, receive, send)
        finally:
            record.when_done(quota.settle)
            if quota.refused_by is not None:
                self._observer.rate_limited(quota.refused_by)

    def _account(self, tenant: str) -> Account:
        if tenant not in self._accounts:
            self._accounts[tenant] = Account(self._by_tenant.get(tenant, self._default), self._now)
        return self._accounts[tenant]


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 0s, 20ms, 8.64s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    text = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
