"""Compiles grammars in worker threads and provides their matchers to the engine's thread.

The two threads exchange the grammar's text. The matcher that was compiled to check the text is kept for the
engine, which would otherwise compile it again between two steps. It is not kept for other requests: a lexer
adds states while it matches, copies share them, and their number is limited.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from scheduler.constraints import Allowed, ConstraintError, Matcher
from server.grammar.annotations import occurrences, unenforced_keywords
from server.grammar.structure import Structure, StructureError, StructureLimits, grammar_of
from server.grammar.thinking import Thinking, ThinkingBudget, ThinkingMatcher
from server.grammar.token_rules import TokenChoice, TokenRules, rules_text
from server.http.ignored import ignore
from server.text.renderer import Renderer, UnsupportedTokenizerError
from server.text.stop_regex import StopRegex

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_PREPARED: Final = 32  # compiled matchers that the engine has not used


class GrammarMatcher:
    """The state of one sequence in a grammar: a `scheduler.constraints.Matcher`."""

    def __init__(self, matcher: "LLMatcher", end_token_id: int) -> None:
        self._matcher = matcher
        self._end_token_id = end_token_id

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._end_token_id)

    @property
    def warnings(self) -> Sequence[str]:
        return self._matcher.get_grammar_warnings()

    def allowed(self) -> Allowed:
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        # The scheduler adds the stop tokens where the text may end. They belong to the request.
        mask[self._end_token_id // 8] &= ~(1 << self._end_token_id % 8)
        return Allowed(bytes(mask), self._matcher.is_accepting())

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(_explained(self._matcher.get_error()))


class Grammars:
    """The grammars of a renderer's tokenizer, which may be loaded later. `close` ends the worker threads."""

    def __init__(
        self, renderer: Renderer, limits: StructureLimits | None = None, timeout: float = 5.0
    ) -> None:
        self._renderer = renderer
        self._limits = limits or StructureLimits()
        self._timeout = timeout  # seconds to compile one grammar
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prepared: OrderedDict[str, GrammarMatcher] = OrderedDict()

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def compile(self, structure: Structure) -> str:
        """Compile a structure and return its grammar.

        Keywords of schemas that cannot be enforced are reported as ignored. Raises `StructureError`.
        """
        if isinstance(structure.value, TokenChoice):
            return await self._token_rules(structure.value)
        compiling = asyncio.get_running_loop().run_in_executor(self._workers, self._prepare, structure)
        try:
            grammar, unenforced = await asyncio.wait_for(compiling, self._timeout)
        except TimeoutError as error:
            raise StructureError(
                f"it is too complex: it was not compiled within {self._timeout:g} s"
            ) from error

        for name in unenforced:
            ignore(name)
        return grammar

    async def check_stop_regexes(self, patterns: Sequence[str]) -> None:
        """Compile expressions that end an answer. Raises `StopRegexError`."""
        for pattern in patterns:
            await asyncio.get_running_loop().run_in_executor(self._workers, StopRegex, pattern)

    async def limit_thinking(self, thinking: Thinking, num_tokens: int, grammar: str | None) -> str:
        """Return a grammar with a limit of its reasoning. `grammar` is the answer's own, if it has one."""
        end = await self._renderer.encode(thinking.end, add_special_tokens=False)
        return ThinkingBudget(num_tokens, thinking, end, grammar).text()

    async def _token_rules(self, choice: TokenChoice) -> str:
        num_tokens = len(self._renderer.vocabulary)
        beyond = [token_id for token_id in choice.allowed_token_ids if token_id >= num_tokens]
        if beyond:
            raise StructureError(f"it has token id {beyond[0]}, but the vocabulary has {num_tokens} tokens")
        # A word is another token at a text's start, or after a space.
        spellings = [spelling for word in choice.bad_words for spelling in (word, f" {word.lstrip()}")]
        words = [await self._renderer.encode(text, add_special_tokens=False) for text in spellings]
        return rules_text(choice, sorted({word for word in words if word}), num_tokens)

    def matchers(self, grammar: str, num_matchers: int) -> Sequence[Matcher]:
        """Return `num_matchers` matchers at the grammar's start. Raises `ConstraintError`."""
        budget = ThinkingBudget.parse(grammar)
        if budget is not None:
            answers: Sequence[Matcher | None] = [None] * num_matchers
            if budget.grammar is not None:
                answers = self.matchers(budget.grammar, num_matchers)
            return [ThinkingMatcher(budget, answer, self._renderer.vocabulary) for answer in answers]
        rules = TokenRules.parse(grammar)
        if rules is not None:
            return [rules, *(rules.copy() for _ in range(num_matchers - 1))]
        with self._lock:
            first = self._prepared.pop(grammar, None)
        first = first or self._matcher(grammar)
        return [first, *(first.copy() for _ in range(num_matchers - 1))]

    def _prepare(self, structure: Structure) -> tuple[str, Sequence[str]]:
        """Return a structure's grammar, and the keywords of its schemas that it does not enforce."""
        grammar = grammar_of(structure, self._limits)
        try:
            matcher = self._matcher(grammar)
            # Some grammars compile and are too complex for the first mask.
            must_end = matcher.allowed().must_end
        except (ConstraintError, UnsupportedTokenizerError) as error:
            raise StructureError(str(error)) from error
        if must_end:
            raise StructureError("it allows no text")
        unenforced = _unenforced(structure, matcher.warnings)
        with self._lock:
            self._prepared[grammar] = matcher
            if len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)
        return grammar, unenforced

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
            raise ConstraintError(_explained(matcher.get_error()))
        return GrammarMatcher(matcher, tokenizer.eos_token)

    def _loaded_tokenizer(self) -> "LLTokenizer":
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._renderer.grammar_tokenizer()
            return self._tokenizer


def _unenforced(structure: Structure, warnings: Sequence[str]) -> Sequence[str]:
    """Return the paths of keywords that are not enforced. Raises `StructureError` for a strict schema's."""
    keywords = unenforced_keywords(warnings)
    if not keywords:
        return ()
    found = []
    for named in structure.schemas():
        paths = list(occurrences(named.schema, keywords))
        if paths and named.is_strict:
            message = f"the schema's keywords {', '.join(map(repr, paths[:8]))} are not supported"
            if "oneOf" in keywords:
                message += " (oneOf is where its alternatives exclude each other; use anyOf)"
            raise StructureError(message, named.where)
        found += [f"{named.where}.{path}" for path in paths]
    return found


def _explained(error: str) -> str:
    """Return an error of llguidance in the words of the API."""
    if any(sign in error for sign in ("too many", "too large", "Too many", "too big", "fuel", "max is")):
        return "it is too complex"
    if "NoExtension" in error:
        return "nothing satisfies it"
    return error.partition("\n<")[0][:300].replace("\n", " ")
