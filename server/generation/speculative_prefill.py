"""Speculative prefill: a draft scores a long prompt, and the model that answers reads only its best parts.

It shortens text, not tokens, so the two models may have different tokenizers. A prompt that it cannot serve
is read whole, and the header `HEADER` says why. So is one for which the draft fails.
"""

import asyncio
import enum
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from backends.interface import Importance, SamplingParams
from scheduler.admission import RefusedError, admit, route
from scheduler.messages import Add, AdmittedAdd, StopCriteria
from server.generation.task import Rendered, Source, Task
from server.http.errors import unsupported_parameter
from server.options.speculative_prefill import DraftQueries
from server.protocol.completions import CompletionRequest
from server.services import Services
from server.text.draft import Draft
from server.text.question import asks, first_paragraph
from server.text.renderer import FramedText
from server.text.shortening import SEPARATOR, Passage, Shortening, Span, chunk_spans, joined

HEADER: Final = "x-speculative-prefill"
CHUNK_TOKENS: Final = 32
_NUM_AHEAD = 8  # the paper's number of look-ahead tokens
_HEAD_TOKENS = 32  # of the last user message, always kept
_TAIL_TOKENS = 256  # at its end, and at most a quarter of what is kept
_LEAST_TAIL_TOKENS = 64
_ASKING_CHARS = 200  # of the last user message's end, in which a question mark shows that it asks
_MAX_ROUNDS = 8  # of dropping chunks until a prompt has few enough tokens


class Outcome(enum.StrEnum):
    SHORTENED = "shortened"
    UNCHANGED = "unchanged"  # nothing could be left out
    SKIPPED = "skipped"  # not possible for this request
    FAILED = "failed"  # the draft or what follows it failed, and the whole prompt was read


class Skipped(enum.StrEnum):
    """Why a prompt that is long enough is not shortened."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    EMBEDDING = "embedding"
    TOKEN_IDS = "token_ids"
    SEVERAL_PROMPTS = "several_prompts"
    NUM_PREFILL_TOKENS = "num_prefill_tokens"
    RETURN_KEPT_TOKENS = "return_kept_tokens"
    REQUIRE_EXACT = "require_exact"
    TRUNCATION = "truncation"
    NO_TEXT = "no_text"  # that may be cut
    DRAFT_CONTEXT = "draft_context"  # too long for the draft


@dataclass(frozen=True, slots=True)
class Drafting:
    """A prompt to shorten: `whole` is the request as it would be without a draft."""

    whole: AdmittedAdd
    draft_add: AdmittedAdd
    draft: Draft
    source: Source
    framed: FramedText
    keep: float
    key: bytes  # of the prompt's scores
    services: Services
    chooses_pool: bool  # the shorter prompt may go to another pool

    @property
    def remembered(self) -> tuple[float, ...] | None:
        """The scores of the prompt's chunks, if the draft has read it lately."""
        return self.draft.remembered(self.key)

    async def shortened(self, scores: Sequence[float]) -> AdmittedAdd | None:
        """Return the request with the shortened prompt; None if nothing can be left out.

        Raises `RenderError`, `RefusedError` and the errors of the template.
        """
        num_whole = len(self.whole.prompt_token_ids)
        passages = self.source.passages
        short = await asyncio.to_thread(shortening, passages, self.framed, scores, self.keep)
        num_kept = num_kept_chunks(short.num_chunks, self.keep, num_whole)
        prompt = await self._prompt(short, num_kept)
        for _ in range(_MAX_ROUNDS):
            if self.keep <= 1 or len(prompt) <= self.keep or num_kept == 0:
                break
            num_kept = min(int(num_kept * self.keep / len(prompt)), num_kept - 1)
            prompt = await self._prompt(short, num_kept)
        if len(prompt) >= num_whole:
            return None
        spec = self.services.client.spec
        max_tokens = self.whole.stop.max_tokens
        pool = route(len(prompt), 0, max_tokens, spec) if self.chooses_pool else self.whole.pool
        return admit(replace(self.whole, prompt_token_ids=prompt, pool=pool), spec)

    async def _prompt(self, short: Shortening, num_kept: int) -> tuple[int, ...]:
        texts = await asyncio.to_thread(short.texts, num_kept)
        return await self.source.render(texts)


def shortening(
    passages: Sequence[Passage], framed: FramedText, scores: Sequence[float], keep: float
) -> Shortening:
    """Return the passages with the scores of their chunks, and with what is always kept of them.

    `framed` are `joined(passages)` in the draft's tokens. Of the last user message, the beginning and the end
    are always kept.
    """
    length = len(joined(passages))
    num_tokens = len(framed.token_ids)
    chunks = chunk_spans(framed.offsets, framed.num_before, num_tokens, CHUNK_TOKENS, length)
    num_kept = keep * num_tokens if keep <= 1 else keep
    num_last = max(min(_TAIL_TOKENS, int(num_kept / 4)), _LEAST_TAIL_TOKENS)
    protected: list[Span] = []
    start = 0
    for passage in passages:
        end = start + len(passage.text)
        if passage.is_question:
            own = [span for span in framed.offsets if span[0] >= start and span[1] <= end]
            parts = own[:_HEAD_TOKENS], own[-num_last:]
            protected = [(part[0][0], part[-1][1]) for part in parts if part]
        start = end + len(SEPARATOR)
    return Shortening(passages, chunks, scores, protected)


def num_kept_chunks(num_chunks: int, keep: float, num_prompt_tokens: int) -> int:
    """Return how many chunks to keep: a share, or as many as a number of the prompt's tokens are likely to
    have.
    """
    share = keep if keep <= 1 else min(keep / num_prompt_tokens, 1)
    return math.ceil(share * num_chunks)


async def drafting(
    task: Task, rendered: Rendered, adds: Sequence[AdmittedAdd], services: Services, *, chooses_pool: bool
) -> Drafting | Skipped | None:
    """Return how a request's prompt is shortened, or why it is not; None: it is not to be shortened.

    Raises `ApiError` for a request that names the draft of a server that has none.
    """
    draft = services.draft
    options = task.options
    if draft is None:
        for param in ("speculative_prefill", "speculative_prefill_keep"):
            if getattr(options, param):
                raise unsupported_parameter(param, "needs a server with --speculative-prefill-model")
        return None
    threshold = 0 if options.speculative_prefill else draft.options.speculative_prefill_threshold
    num_tokens = max(len(add.prompt_token_ids) for add in adds)
    if options.speculative_prefill is False or num_tokens < threshold:
        return None
    source = rendered.source
    skipped = _skipped(task, rendered)
    if skipped is not None or source is None:
        return skipped or Skipped.TOKEN_IDS
    if not any(passage.may_be_cut and passage.text for passage in source.passages):
        return Skipped.NO_TEXT
    text = joined(source.passages)
    framed = await draft.renderer.encode_framed(text, in_template=source.is_chat)
    draft_add = await _draft_add(task, adds[0], source, framed, draft, len(services.client.spec.pools))
    try:
        admitted = admit(draft_add, services.client.spec)
    except RefusedError:
        return Skipped.DRAFT_CONTEXT
    keep = options.speculative_prefill_keep or draft.options.speculative_prefill_keep
    return Drafting(adds[0], admitted, draft, source, framed, keep, _key(admitted), services, chooses_pool)


def _skipped(task: Task, rendered: Rendered) -> Skipped | None:
    options = task.options
    reasons = {
        Skipped.EMBEDDING: task.pooling is not None,
        Skipped.ECHO: isinstance(options, CompletionRequest) and bool(options.echo),
        Skipped.PROMPT_LOGPROBS: task.num_prompt_logprobs is not None,
        Skipped.SEVERAL_PROMPTS: len(rendered.prompts) > 1,
        Skipped.NUM_PREFILL_TOKENS: options.num_prefill_tokens is not None,
        Skipped.RETURN_KEPT_TOKENS: task.returns_kept_tokens,
        Skipped.REQUIRE_EXACT: bool(options.require_exact),
        Skipped.TRUNCATION: task.truncates,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


async def _draft_add(
    task: Task, whole: AdmittedAdd, source: Source, framed: FramedText, draft: Draft, pool: int
) -> Add:
    looks_ahead = draft.options.speculative_prefill_queries is DraftQueries.LOOK_AHEAD
    wanted = Importance(CHUNK_TOKENS)
    question: tuple[int, ...] = ()
    weight = 1.0
    if looks_ahead:
        wanted = Importance(CHUNK_TOKENS, _NUM_AHEAD, draft.renderer.stop_token_ids)
    elif source.question:
        message = {"role": "user", "content": source.question}
        asked = await draft.renderer.encode_question([message])
        beginning = () if asked is None else asked.beginning
        paragraph = first_paragraph(beginning, draft.renderer.vocabulary, CHUNK_TOKENS)
        # A beginning that asks nothing must not compete with a question at the end.
        if paragraph.weight == 1 or not asks(source.question[-_ASKING_CHARS:]):
            question, weight = paragraph.token_ids, paragraph.weight
    return Add(
        request_id=f"{task.id}-draft",
        prompt_token_ids=framed.token_ids,
        sampling=SamplingParams(temperature=0.0),
        stop=StopCriteria(max_tokens=0),
        arrival_time=whole.arrival_time,
        priority=whole.priority,
        queue_timeout=whole.queue_timeout,
        timeout=whole.timeout,
        question_token_ids=question,
        question_weight=weight,
        importance=wanted,
        pool=pool,
        is_background=whole.is_background,
        tenant=whole.tenant,
        cache_salt=whole.cache_salt,
    )


def _key(add: Add) -> bytes:
    """Return what the scores depend on. Requests that share no stored prompts share no scores either."""
    parts = (add.cache_salt, add.prompt_token_ids, add.question_token_ids)
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
