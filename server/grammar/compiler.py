"""Grammars between the two threads that deal with them: compiled in a worker's, followed in the engine's.

What crosses is the grammar's text. A matcher that was compiled to check it is kept for the engine, which would otherwise spend that time
again between two steps; an engine in another process would just do so. A matcher is not kept for other requests: its lexer learns states as
it goes, copies share them, and their number is limited.
"""

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from scheduler.constraints import Allowed, ConstraintError
from server.grammar.structure import Structure, StructureError, StructureLimits, grammar_of
from server.text.renderer import Renderer, UnsupportedTokenizerError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_PREPARED: Final = 32  # matchers that no engine has asked for yet


class GrammarMatcher:
    """One sequence's place in a grammar, as the scheduler sees it."""

    def __init__(self, matcher: "LLMatcher", end_token_id: int) -> None:
        self._matcher, self._end_token_id = matcher, end_token_id

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._end_token_id)

    def allowed(self) -> Allowed:
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        mask[self._end_token_id // 8] &= ~(1 << self._end_token_id % 8)
        return Allowed(bytes(mask), self._matcher.is_accepting())

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(told(self._matcher.get_error()))


class Grammars:
    """The grammars of a renderer's tokenizer. It may be made before the tokenizer is loaded. `close` it at the end."""

    def __init__(
        self, renderer: Renderer, limits: StructureLimits | None = None, timeout: float = 5.0
    ) -> None:
        self._renderer = renderer
        self._limits = limits or StructureLimits()
        self._timeout = timeout  # seconds that a client's grammar may take to be compiled
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prepared: OrderedDict[str, GrammarMatcher] = OrderedDict()

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def compile(self, structure: Structure) -> str:
        """Return the grammar of a structure, once it is known to be one that can be followed. Raises `StructureError`."""
        compiling = asyncio.get_running_loop().run_in_executor(self._workers, self._prepare, structure)
        try:
            return await asyncio.wait_for(compiling, self._timeout)
        except TimeoutError as error:
            raise StructureError(
                f"it is too complex: it was not compiled within {self._timeout:g} s"
            ) from error

    def matchers(self, grammar: str, number: int) -> Sequence[GrammarMatcher]:
        """Return so many matchers at the grammar's start. Raises `ConstraintError`."""
        with self._lock:
            first = self._prepared.pop(grammar, None)
        first = first or self._matcher(grammar)
        return [first, *(first.copy() for _ in range(number - 1))]

    def _prepare(self, structure: Structure) -> str:
        grammar = grammar_of(structure, self._limits)
        try:
            matcher = self._matcher(grammar)
            must_end = (
                matcher.allowed().must_end
            )  # the first mask shows what else a grammar is too complex for
        except (ConstraintError, UnsupportedTokenizerError) as error:
            raise StructureError(str(error)) from error
        if must_end:
            raise StructureError("it allows no text")
        with self._lock:
            self._prepared[grammar] = matcher
            if len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)
        return grammar

    def _matcher(self, grammar: str) -> GrammarMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=30_000,
            max_grammar_size=50_000,
            verbose_errors=False,
        )
        tokenizer = self._loaded_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConstraintError(told(matcher.get_error()))
        return GrammarMatcher(matcher, tokenizer.eos_token)

    def _loaded_tokenizer(self) -> "LLTokenizer":
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._renderer.grammar_tokenizer()
            return self._tokenizer


def told(error: str) -> str:
    """Return the library's error in words that help a client."""
    unimplemented = re.match(r"Unimplemented keys: (\[.*?\])", error)
    if unimplemented is not None:
        return f"the schema's keywords {unimplemented[1]} are not supported"
    if "oneOf constraints" in error:
        return "the schema's keyword 'oneOf' is supported only where its alternatives exclude each other; use 'anyOf'"
    if any(sign in error for sign in ("too many", "too large", "Too many", "too big", "fuel", "max is")):
        return "it is too complex"
    if "NoExtension" in error:
        return "nothing satisfies it"
    return error.partition("\n<")[0][:300].replace("\n", " ")
