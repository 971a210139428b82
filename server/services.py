"""What routes are given to work with."""

from dataclasses import dataclass
from typing import Protocol

from server.batches.service import Batches
from server.client import EngineClient
from server.grammars import Grammars
from server.renderer import Renderer
from server.settings import ServerSettings


class Exposition(Protocol):
    """Metrics that can be scraped."""

    @property
    def content_type(self) -> str: ...

    def render(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Services:
    client: EngineClient
    renderer: Renderer
    grammars: Grammars
    settings: ServerSettings
    metrics: Exposition
    batches: Batches | None = None
