"""Drives a backend one step at a time. Each test decides which requests share a batch."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from backends.interface import (
    Backend,
    Batch,
    BatchResult,
    DecodeBatch,
    DecodeRow,
    Draw,
    KeptTokens,
    PrefillBatch,
    PrefillRow,
    PrefillShape,
    PromptScore,
    SampledToken,
    SamplingParams,
)
from backends.torch_backend.backend import TorchBackend
from backends.torch_backend.config import (
    DEFAULT_COMPILE_CACHE,
    DeviceName,
    DtypeName,
    Quantization,
    TorchBackendConfig,
)
from cache.policy_options import PolicyOptions
from cache.pool_options import PoolOptions
from tests.reference.votes import ECHO_WEIGHT

GREEDY = SamplingParams(temperature=0.0)


def open_backend(
    path: Path,
    policy: PolicyOptions,
    max_model_len: int,
    num_slots: int = 4,
    prefill_chunk: int = 32,
    compile_cache: Path | None = None,
    quantization: Quantization = Quantization.NONE,
) -> TorchBackend:
    """Load a checkpoint in float32 on the CPU, where numbers can be compared closely.

    With a `compile_cache`, decode is compiled.
    """
    config = TorchBackendConfig(
        model=str(path),
        device=DeviceName.CPU,
        dtype=DtypeName.FLOAT32,
        quantization=quantization,
        pools=(PoolOptions(num_slots, policy),),
        max_model_len=max_model_len,
        num_scratch=2,
        prefill_chunk=prefill_chunk,
        compile=compile_cache is not None,
        compile_cache=compile_cache or DEFAULT_COMPILE_CACHE,
    )
    backend = TorchBackend(config)
    if backend.compiled is not None:
        backend.warmup()
        backend.compiled.wait()
    return backend


@dataclass
class Request:
    """A prompt, the slots that its choices take, and what came of it. No slots: the prompt is only scored."""

    prompt: list[int]
    slots: tuple[int, ...] = (0,)
    sampling: SamplingParams = GREEDY
    first_choice: int = 0
    scratch: int = 0  # used when the prompt does not fit its slot
    num_prompt_logprobs: int | None = None
    num_read: int = 0
    outputs: list[list[SampledToken]] = field(init=False)
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    kept: KeptTokens | None = None  # what its slots hold, once the prompt is read

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in self.slots]

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.prompt)

    @property
    def tokens(self) -> list[int]:
        """The first choice's tokens."""
        return [token.token_id for token in self.outputs[0]]

    def draw(self, choice: int) -> Draw:
        return Draw(self.sampling, choice=self.first_choice + choice, output_index=len(self.outputs[choice]))


class Driver:
    """Reads prompts in chunks of `chunk` tokens and decodes. Each call names the requests of one batch."""

    def __init__(self, backend: Backend, chunk: int, pool: int = 0) -> None:
        self.backend = backend
        self.chunk = chunk
        self.pool = pool

    def run(self, *requests: Request, num_tokens: int, steps_a_launch: int = 1) -> None:
        """Read the prompts and decode until every request has `num_tokens` tokens."""
        self.read(*requests)
        self.decode(*requests, num_steps=num_tokens - 1, steps_a_launch=steps_a_launch)

    def read(self, *requests: Request) -> None:
        """Read the prompts to their ends."""
        while unread := [request for request in requests if not request.is_read]:
            self.read_chunk(*unread)

    def read_chunk(self, *requests: Request) -> None:
        """Read one chunk of each prompt, those that need a scratch in a batch of their own."""
        for needs_scratch in (False, True):
            chosen = [request for request in requests if self._needs_scratch(request) is needs_scratch]
            limit = max(
                shape.num_rows for shape in self.backend.spec.prefill_shapes if shape.num_tokens >= self.chunk
            )
            for first in range(0, len(chosen), limit):
                self._prefill(chosen[first : first + limit])

    def decode(self, *requests: Request, num_steps: int = 1, steps_a_launch: int = 1) -> None:
        """Decode `num_steps` tokens of every choice of every request, `steps_a_launch` in each batch."""
        assert num_steps % steps_a_launch == 0
        choices = [(request, choice) for request in requests for choice in range(len(request.slots))]
        for _ in range(num_steps // steps_a_launch):
            rows = tuple(_decode_row(request, choice) for request, choice in choices)
            result = self._submit(DecodeBatch(rows, steps_a_launch, self.pool))
            for (request, choice), tokens in zip(choices, result.tokens, strict=True):
                assert len(tokens) == steps_a_launch
                request.outputs[choice] += tokens

    def _needs_scratch(self, request: Request) -> bool:
        return not request.slots or len(request.prompt) > self.backend.spec.pools[self.pool].max_direct_tokens

    def _prefill(self, requests: list[Request]) -> None:
        rows = tuple(self._prefill_row(request) for request in requests)
        result = self._submit(PrefillBatch(rows, self._shape(rows), self.pool))
        for position, (request, row) in enumerate(zip(requests, rows, strict=True)):
            request.num_read += len(row.token_ids)
            assert len(result.tokens[position]) == len(row.draws)
            for output, token in zip(request.outputs, result.tokens[position], strict=False):
                output.append(token)
            if row.returns_kept:
                request.kept = result.kept[position]
            if row.score is not None:
                request.prompt_logprobs += result.prompt_logprobs[position]

    def _prefill_row(self, request: Request) -> PrefillRow:
        start, length, scratch = request.num_read, len(request.prompt), self.backend.spec.scratch.layout
        limit = scratch.round_end(start, length) if self._needs_scratch(request) else length
        end = min(start + self.chunk, limit)
        row = PrefillRow(
            request_id=str(id(request)),
            token_ids=tuple(request.prompt[start:end]),
            start=start,
            num_prompt_tokens=length,
            slots=request.slots,
            scratch=request.scratch if self._needs_scratch(request) else None,
            draws=tuple(request.draw(choice) for choice in range(len(request.slots)))
            if end == length
            else (),
            ahead=tuple(request.prompt[length - scratch.num_ahead :]) if end == limit < length else (),
            echo=self._echo(request, num_read=end, limit=limit),
            echo_weight=ECHO_WEIGHT,
            returns_kept=end == length and bool(request.slots),
        )
        if request.num_prompt_logprobs is None:
            return row
        return replace(
            row, score=PromptScore(tuple(request.prompt[start + 1 : end + 1]), request.num_prompt_logprobs)
        )

    def _echo(self, request: Request, num_read: int, limit: int) -> tuple[int, ...]:
        """The prompt's beginning, where it is read in a scratch and its tokens must be chosen."""
        is_chosen = self._needs_scratch(request) and request.slots and num_read == limit
        num_echoed = self.backend.spec.pools[self.pool].policy.num_echoed
        return tuple(request.prompt[:num_echoed]) if is_chosen else ()

    def _shape(self, rows: tuple[PrefillRow, ...]) -> PrefillShape:
        """The smallest shape that the rows fit."""
        longest = max(len(row.token_ids) for row in rows)
        fitting = [
            shape
            for shape in self.backend.spec.prefill_shapes
            if shape.num_tokens >= longest and shape.num_rows >= len(rows)
        ]
        return min(fitting, key=lambda shape: shape.num_tokens * shape.num_rows)

    def _submit(self, batch: Batch) -> BatchResult:
        return self.backend.submit(batch).result()


def _decode_row(request: Request, choice: int) -> DecodeRow:
    output = request.outputs[choice]
    index = len(request.prompt) + len(output) - 1
    return DecodeRow(
        request_id=str(id(request)),
        slot=request.slots[choice],
        token_id=output[-1].token_id,
        index=index,
        num_prompt_tokens=len(request.prompt),
        draw=request.draw(choice),
    )
