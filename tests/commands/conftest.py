"""Commands are tested against the server of the server's own tests."""

from tests.server.conftest import renderer, running

__all__ = ["renderer", "running"]
