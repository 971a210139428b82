"""The server as an ASGI application, for runners such as uvicorn, gunicorn, Ray and KServe.

    uvicorn server.asgi:app                       # or: uvicorn --factory server.asgi:create_app

Its options are the variables SNAPSERVE_…. The application loads the model before it says that it has started.
At its end, it lets running requests finish. The runner has the address, the connections and the signals, so
the options about these have no effect. Each worker process of a runner loads its own model.
"""

import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from server.instance import Instance
from server.options.serve import Config, environment_config, with_flags
from server.serve import open_batches, prepare


class Application:
    """Creates its server when the runner starts it, and answers requests from then on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None:
            raise RuntimeError("the runner has not started the application: it must send lifespan events")
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Load, answer until the runner's end, drain and close."""
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                batches = stack.enter_context(open_batches(self._config.server))
                instance = Instance(self._config, batches)
                stack.push_async_callback(instance.close)
                instance.start()
                health = await instance.wait_loaded()
                if not health.is_ready:
                    raise RuntimeError(with_flags(health.detail))
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            self._app = instance.app
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await instance.drain()
        await send({"type": "lifespan.shutdown.complete"})


def create_app(config: Config | None = None) -> Application:
    """Return the application of a configuration, by default that of the environment. Raises `OptionError`."""
    if config is None:
        config = environment_config()
    prepare(config)
    return Application(config)


def __getattr__(name: str) -> Application:
    """Make `app` when a runner asks for it: an import of this module reads no environment."""
    if name != "app":
        raise AttributeError(name)
    return create_app()
