"""The draft of a server: its tokenizer, its options, and the scores of the prompts that it read last."""

from collections import OrderedDict
from dataclasses import dataclass, field

from server.options.speculative_prefill import SpeculativePrefill
from server.text.renderer import Renderer

_MAX_REMEMBERED = 64  # prompts


@dataclass(slots=True)
class Draft:
    """Used by the event loop. The renderer is loaded with the models.

    Clients send a prompt again when they retry, or for another answer. Its scores are remembered by a key of
    its tokens and of all else that they depend on.
    """

    options: SpeculativePrefill
    renderer: Renderer = field(default_factory=Renderer)
    _scores: OrderedDict[bytes, tuple[float, ...]] = field(default_factory=OrderedDict)

    def remembered(self, key: bytes) -> tuple[float, ...] | None:
        """Return a prompt's scores, if they are known."""
        scores = self._scores.get(key)
        if scores is not None:
            self._scores.move_to_end(key)
        return scores

    def remember(self, key: bytes, scores: tuple[float, ...]) -> None:
        """Keep a prompt's scores, in place of the oldest."""
        self._scores[key] = scores
        self._scores.move_to_end(key)
        while len(self._scores) > _MAX_REMEMBERED:
            self._scores.popitem(last=False)
