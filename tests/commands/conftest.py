"""Commands are tested against the server of the server's own tests, with the kernels of the backends'."""

from tests.backends.conftest import built_kernels, compile_cache, warm_builder
from tests.server.conftest import renderer, running

__all__ = ["built_kernels", "compile_cache", "renderer", "running", "warm_builder"]
