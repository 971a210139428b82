"""The parts of the server that routes use."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from server.batches.service import Batches
from server.engine.client import EngineClient
from server.grammar.compiler import Grammars
from server.metrics.metrics import Totals, WatchedResponses
from server.options.settings import ServerSettings
from server.state.interface import SharedState
from server.text.draft import Draft
from server.text.renderer import Renderer


class Exposition(Protocol):
    """Metrics that can be scraped."""

    @property
    def content_type(self) -> str: ...

    def render(self) -> bytes: ...

    def totals(self) -> Totals:
        """Return the sums from which rates follow."""
        ...

    def ignored_parameter(self) -> None:
        """A parameter of a request was ignored."""
        ...

    def drafted(self, outcome: str, num_removed: int) -> None:
        """A prompt was to be shortened by a draft, which removed `num_removed` of its tokens."""
        ...

    def watch_responses(self, store: WatchedResponses) -> None:
        """Report the size of the store at every scrape."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    client: EngineClient
    renderer: Renderer
    grammars: Grammars
    settings: ServerSettings
    metrics: Exposition
    state: SharedState
    batches: Batches | None = None
    draft: Draft | None = None  # None: prompts are read as they are
    # Tasks that no request waits for, which use the state until they end.
    endings: set[asyncio.Task[None]] = field(default_factory=set)
