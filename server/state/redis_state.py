"""The state that replicas share, in one Redis.

Scripts run in Redis one at a time, so that replicas do not change the same thing at once. Times are those of
Redis, since the clocks of replicas differ.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from server.options.settings import StorageLimits
from server.state.interface import LEASE, RunningResponse, StateError, StateObserver, StoredResponse
from server.state.memory import ROUNDING, MemoryBuckets

logger: Final = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX: Final = "snapserve:"
TIMEOUT: Final = 1.0  # seconds of one command, and of the wait for a connection
MAX_CONNECTIONS: Final = 32  # at once, of those that the process may open beside its clients'
WINDOW: Final = 60  # seconds; tokens of the window before the last are forgotten
SHOWN_AS_FAILED: Final = 3600.0  # seconds; a response of a replica that has died
PAUSE: Final = 5.0  # seconds without a command after a failure, so that no request waits for another timeout

_NOW = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
"""

_TAKE = (
    _NOW
    + """
local key, limit, amount, must = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local level = limit
local old = redis.call('HMGET', key, 'level', 'time')
if old[1] then
    level = math.min(limit, tonumber(old[1]) + math.max(0, now - tonumber(old[2])) * limit / 60)
end
if not must and amount > level + tonumber(ARGV[4]) then
    return {tostring(level), 0}
end
level = math.min(limit, level - amount)
redis.call('HSET', key, 'level', tostring(level), 'time', string.format('%.6f', now))
redis.call('EXPIRE', key, math.ceil((limit - level) * 60 / limit) + 1)
return {tostring(level), 1}
"""
)

_EXCHANGE = (
    _NOW
    + """
local seconds = tonumber(ARGV[1])
local window = math.floor(now / seconds)
local key = KEYS[1] .. window
for index = 2, #ARGV, 2 do redis.call('HINCRBY', key, ARGV[index], ARGV[index + 1]) end
redis.call('EXPIRE', key, 3 * seconds)
return {window, redis.call('HGETALL', KEYS[1] .. (window - 1)), redis.call('HGETALL', key)}
"""
)

# `sizes`, `deadlines`: of all responses, whose name is their owner's and their id.
# `of:OWNER`: the owner's ids by deadline. `counts`, `bytes`: by owner.
_DROP = (
    _NOW
    + """
local prefix, owner, id = KEYS[1], ARGV[1], ARGV[2]
local function drop(owner, id)
    local name = owner .. ' ' .. id
    local size = redis.call('HGET', prefix .. 'sizes', name)
    if not size then return 0 end
    redis.call('HDEL', prefix .. 'sizes', name)
    redis.call('ZREM', prefix .. 'deadlines', name)
    redis.call('ZREM', prefix .. 'of:' .. owner, id)
    redis.call('ZINCRBY', prefix .. 'counts', -1, owner)
    redis.call('ZINCRBY', prefix .. 'bytes', -size, owner)
    redis.call('INCRBY', prefix .. 'num_bytes', -size)
    redis.call('DEL', prefix .. 'response:' .. name)
    return 1
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now)) do
    local split = string.find(name, ' ', 1, true)
    drop(string.sub(name, 1, split - 1), string.sub(name, split + 1))
end
"""
)

_COUNTS = """
local num_bytes = redis.call('GET', prefix .. 'num_bytes') or 0
return {done, redis.call('ZCARD', prefix .. 'deadlines'), tonumber(num_bytes)}
"""

_DELETE = _DROP + "local done = drop(owner, id)" + _COUNTS

_PUT = (
    _DROP
    + """
local body, items, ttl = ARGV[3], ARGV[4], tonumber(ARGV[5])
local max_responses, max_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local name, size = owner .. ' ' .. id, #body + #items
drop(owner, id)
redis.call('HSET', prefix .. 'response:' .. name, 'body', body, 'items', items)
redis.call('PEXPIRE', prefix .. 'response:' .. name, math.ceil(ttl * 1000))
redis.call('HSET', prefix .. 'sizes', name, size)
redis.call('ZADD', prefix .. 'deadlines', now + ttl, name)
redis.call('ZADD', prefix .. 'of:' .. owner, now + ttl, id)
redis.call('ZINCRBY', prefix .. 'counts', 1, owner)
redis.call('ZINCRBY', prefix .. 'bytes', size, owner)
redis.call('INCRBY', prefix .. 'num_bytes', size)
local function drop_oldest(of_most)
    local most = redis.call('ZREVRANGE', prefix .. of_most, 0, 0)[1]
    local oldest = most and redis.call('ZRANGE', prefix .. 'of:' .. most, 0, 0)[1]
    if not oldest then
        error('keys of stored responses are missing: Redis must not evict any')
    end
    drop(most, oldest)
end
while redis.call('ZCARD', prefix .. 'deadlines') > max_responses do drop_oldest('counts') end
while tonumber(redis.call('GET', prefix .. 'num_bytes')) > max_bytes do drop_oldest('bytes') end
redis.call('ZREMRANGEBYSCORE', prefix .. 'counts', '-inf', 0)
redis.call('ZREMRANGEBYSCORE', prefix .. 'bytes', '-inf', 0)
local done = redis.call('HEXISTS', prefix .. 'sizes', name)
"""
    + _COUNTS
)


class RedisState:
    """The state at a Redis URL. Belongs to one event loop."""

    def __init__(self, url: str, limits: StorageLimits, observer: StateObserver) -> None:
        """Raises ValueError for a wrong URL. Connects at the first command."""
        self._observer = observer
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT,
            socket_timeout=TIMEOUT,
            socket_connect_timeout=TIMEOUT,
            # For a connection that Redis has closed. After a timeout, a command may have run: not again.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        )
        self._client = redis.asyncio.Redis.from_pool(pool)
        self._paused_until = 0.0
        self.buckets = RedisBuckets(self)
        self.responses = RedisResponses(self, limits)
        self.served = RedisServed(self)

    def script(self, text: str) -> "Script":
        return Script(self, self._client.register_script(text))

    @property
    def client(self) -> "redis.asyncio.Redis":
        return self._client

    async def done(self, command: Awaitable[T]) -> T:
        """Return what a command returns. Raises `StateError`."""
        if time.monotonic() < self._paused_until:
            cast(Any, command).close()
            raise StateError("Redis could not be reached a moment ago")
        try:
            return await command
        except ResponseError as error:  # Redis answers: it has no memory left, or keys are missing
            logger.error("the shared state refused a command: %s", error)
            self._observer.lost_state()
            raise StateError(str(error)) from error
        except (RedisError, OSError) as error:
            self._paused_until = time.monotonic() + PAUSE
            self._observer.lost_state()
            logger.error("the shared state cannot be reached; next try in %g s: %s", PAUSE, error)
            raise StateError(str(error)) from error

    async def close(self) -> None:
        await self.buckets.close()
        await self._client.aclose()


class Script:
    def __init__(self, state: RedisState, script: Any) -> None:
        self._state = state
        self._script = script

    async def __call__(self, key: str, *arguments: str | bytes | float) -> Any:
        return await self._state.done(self._script(keys=[key], args=arguments))


class RedisBuckets:
    """The buckets of all replicas. While Redis cannot be reached, each replica has its own."""

    def __init__(self, state: RedisState) -> None:
        self._script = state.script(_TAKE)
        self._own = MemoryBuckets()
        self._settling = set[asyncio.Task[None]]()

    async def take(self, name: str, limit: int, amount: int) -> tuple[float, bool]:
        try:
            level, is_taken = await self._run(name, limit, amount, must=False)
        except StateError:
            return await self._own.take(name, limit, amount)
        return level, is_taken

    def settle(self, name: str, limit: int, amount: int) -> None:
        task = asyncio.create_task(self._settle(name, limit, amount))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._settling)

    async def _settle(self, name: str, limit: int, amount: int) -> None:
        try:
            await self._run(name, limit, amount, must=True)
        except StateError:
            self._own.settle(name, limit, amount)

    async def _run(self, name: str, limit: int, amount: int, *, must: bool) -> tuple[float, bool]:
        level, is_taken = await self._script(f"{PREFIX}bucket:{name}", limit, amount, int(must), ROUNDING)
        return float(level), bool(is_taken)


class RedisServed:
    """The weighted tokens served to each tenant, in a hash for each `WINDOW`."""

    def __init__(self, state: RedisState) -> None:
        self._script = state.script(_EXCHANGE)
        self._seen: dict[tuple[int, bytes], int] | None = None  # by window and tenant; None at first

    async def exchange(self, own: Mapping[str, int]) -> Mapping[str, int]:
        arguments: list[bytes | int] = [WINDOW]
        for tenant, amount in own.items():
            arguments += [tenant.encode(errors="surrogatepass"), amount]  # a client's `user` may be any text
        window, *hashes = await self._script(f"{PREFIX}served:", *arguments)
        before, self._seen = self._seen, {}
        others = Counter[str]()
        for number, pairs in zip((window - 1, window), hashes, strict=True):
            for tenant, amount in zip(pairs[::2], pairs[1::2], strict=True):
                self._seen[number, tenant] = int(amount)
                # What was served before this replica began is of no concern.
                if before is not None:
                    others[tenant.decode(errors="surrogatepass")] += int(amount) - before.get(
                        (number, tenant), 0
                    )
        others.subtract(own if before is not None else {})
        return {tenant: amount for tenant, amount in others.items() if amount > 0}


class RedisResponses:
    """The stored responses of all replicas, with the limits of `MemoryResponses` over all of them."""

    def __init__(self, state: RedisState, limits: StorageLimits) -> None:
        self._state = state
        self._client = state.client
        self._limits = limits
        self._put = state.script(_PUT)
        self._delete = state.script(_DELETE)
        # Of all replicas, after this one's last response.
        self.num_responses = 0
        self.num_bytes = 0

    async def put(self, owner: str, response: StoredResponse) -> bool:
        limits = self._limits
        if response.num_bytes > limits.max_bytes or limits.max_responses == 0:
            return False
        content = (response.body, response.input_items)
        numbers = (limits.ttl, limits.max_responses, limits.max_bytes)
        try:
            return await self._run(self._put, owner, response.response_id, *content, *numbers)
        except StateError:
            return False

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        key = f"{PREFIX}response:{owner} {response_id}"
        body, items = await self._state.done(cast(Any, self._client.hmget(key, ["body", "items"])))
        return None if body is None else StoredResponse(response_id, body, items)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._run(self._delete, owner, response_id)

    async def _run(self, script: Script, *arguments: str | bytes | float) -> bool:
        done, self.num_responses, self.num_bytes = await script(PREFIX, *arguments)
        return bool(done)

    async def announce(self, owner: str, response_id: str, body: bytes | None) -> bool:
        name = f"{owner} {response_id}"
        async with self._client.pipeline() as pipeline:
            if body is not None:
                pipeline.set(f"{PREFIX}running:{name}", body)
            # Of a replica that has died, it is shown as failed for a while.
            pipeline.pexpire(
                f"{PREFIX}running:{name}",
                math.ceil(1000 * max(LEASE, min(self._limits.ttl, SHOWN_AS_FAILED))),
            )
            pipeline.set(f"{PREFIX}lease:{name}", b"", px=math.ceil(LEASE * 1000))
            pipeline.exists(f"{PREFIX}cancelled:{name}")
            results = await self._state.done(pipeline.execute())
        return not results[-1]

    async def withdraw(self, owner: str, response_id: str) -> None:
        name = f"{owner} {response_id}"
        keys = (f"{PREFIX}{kind}:{name}" for kind in _OF_RUNNING)
        with contextlib.suppress(StateError):  # then its lease ends
            await self._state.done(cast(Any, self._client.delete(*keys)))

    async def running(self, owner: str, response_id: str) -> RunningResponse | None:
        name = f"{owner} {response_id}"
        body, lease = await self._state.done(
            cast(Any, self._client.mget(f"{PREFIX}running:{name}", f"{PREFIX}lease:{name}"))
        )
        return None if body is None else RunningResponse(body, lease is not None)

    async def cancel(self, owner: str, response_id: str) -> None:
        key = f"{PREFIX}cancelled:{owner} {response_id}"
        await self._state.done(cast(Any, self._client.set(key, b"", px=math.ceil(LEASE * 1000))))


_OF_RUNNING = ("running", "lease", "cancelled")
