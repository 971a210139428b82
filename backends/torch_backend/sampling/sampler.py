"""Samples the next token of every slot, on the device of the logits.

It runs over the first slots at once, live or not, row by row: a slot's draw depends on its own logits and
parameters only. The state of a slot is the set of its prompt's tokens, the counts of its output tokens, and
its `logit_bias`.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from backends.interface import Draw, SamplingParams
from backends.torch_backend.native.kernels import Kernels, draw_tokens
from backends.torch_backend.sampling.filtering import score_threshold
from backends.torch_backend.sampling.logprobs import Sampled, log_probabilities
from backends.torch_backend.sampling.philox import uniform

_IDLE = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SlotParams:
    """The sampling parameters of all slots, as tensors [slot]."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    top_k: Tensor
    seed: Tensor
    choice: Tensor

    @classmethod
    def build(cls, held: Sequence[tuple[SamplingParams, int]], device: torch.device) -> "SlotParams":
        """Return the tensors for each slot's parameters and choice."""
        numbers = torch.tensor(
            [
                (
                    p.temperature,
                    p.top_p,
                    p.min_p,
                    p.presence_penalty,
                    p.frequency_penalty,
                    p.repetition_penalty,
                )
                for p, _ in held
            ],
            dtype=torch.float32,
            device=device,
        )
        integers = torch.tensor(
            [(p.top_k, _signed(p.seed), choice) for p, choice in held], dtype=torch.int64, device=device
        )
        # With their widths, which a pool without slots does not show.
        return cls(*numbers.view(-1, 6).unbind(1), *integers.view(-1, 3).unbind(1))

    def copy_(self, other: "SlotParams") -> None:
        """Copy the values of `other` in place: captured steps read these tensors."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def of(self, slots: Tensor) -> "SlotParams":
        """Return the parameters of some slots, [row]."""
        return SlotParams(*(getattr(self, field.name)[slots] for field in fields(self)))

    def first(self, num_slots: int) -> "SlotParams":
        """Return the parameters of the first slots."""
        return SlotParams(*(getattr(self, field.name)[:num_slots] for field in fields(self)))


def _signed(seed: int) -> int:
    """Return the int64 that has the low 64 bits of `seed`."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


class DrawKind(enum.Enum):
    """The draws that need the slots' parameters only, as those of most requests do."""

    GREEDY = enum.auto()
    RANDOM = enum.auto()
    FILTERED = enum.auto()  # random, with a top_k, top_p or min_p


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The draws of one batch, over the first slots. A step skips the work that no draw needs."""

    params: SlotParams
    is_live: Tensor  # bool [slot]
    output_index: Tensor  # [slot]: of the first step's draw
    banned: tuple[Tensor, Tensor] | None  # slots and tokens
    forbidden: Tensor | None  # bool [slot, token]: not in the mask
    forced: tuple[Tensor, ...]  # [slot] for each step: the forced token, or −1 to draw one
    filtered: Tensor | None  # the slots whose draw has a top_k, top_p or min_p
    is_random: bool
    has_penalties: bool
    has_bias: bool
    num_logprobs: int | None
    named: Tensor | None  # [slot, token]: the tokens whose log-probabilities are returned too, then zeros

    @property
    def kind(self) -> DrawKind | None:
        """The common kind of the draws. None if one of them needs more than parameters."""
        needs_more = (
            self.banned is not None
            or self.forbidden is not None
            or self.forced
            or self.has_penalties
            or self.has_bias
        )
        if needs_more or self.num_logprobs is not None:
            return None
        if self.filtered is not None:
            return DrawKind.FILTERED
        return DrawKind.RANDOM if self.is_random else DrawKind.GREEDY


class Sampler:
    """Draws tokens for `num_slots` slots."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._held = [(_IDLE, 0)] * num_slots
        self._params = SlotParams.build(self._held, device)
        self._is_in_prompt = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._bias: Tensor | None = None  # [slot, token]; allocated by the first request with a bias

    def begin(self, slots: Sequence[int]) -> None:
        """Clear the state of the slots' last sequences."""
        for slot in slots:
            self._is_in_prompt[slot].zero_()
            self._counts[slot].zero_()

    def read_prompt(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Record a part of the slots' prompt."""
        tokens = torch.tensor(token_ids, device=self._device)
        for slot in slots:
            self._is_in_prompt[slot].index_fill_(0, tokens, True)

    def plan(self, draws: Mapping[int, Draw], num_slots: int | None = None) -> DrawPlan:
        """Return the plan for the draws of these slots, one for each step of the batch.

        The logits will be those of the first `num_slots` slots; None: all.
        """
        for draw in draws.values():
            check_token_ids(draw.banned_token_ids + draw.forced_token_ids, self._vocab_size)
        self._hold(draws)
        params = [draw.sampling for draw in draws.values()]
        num_slots = len(self._held) if num_slots is None else num_slots
        output_index = [0] * num_slots
        is_live = [False] * num_slots
        for slot, draw in draws.items():
            output_index[slot] = draw.output_index
            is_live[slot] = True
        num_logprobs = [
            *(p.num_logprobs for p in params),
            *(draw.num_forced_logprobs for draw in draws.values()),
        ]
        return DrawPlan(
            params=self._params.first(num_slots),
            is_live=torch.tensor(is_live, device=self._device),
            output_index=torch.tensor(output_index, device=self._device),
            banned=self._pairs(
                [(slot, token) for slot, draw in draws.items() for token in draw.banned_token_ids]
            ),
            forbidden=self._forbidden(
                {slot: d.allowed_mask for slot, d in draws.items() if d.allowed_mask is not None}, num_slots
            ),
            forced=self._forced({slot: draw.forced_token_ids for slot, draw in draws.items()}, num_slots),
            filtered=self._slots([slot for slot, draw in draws.items() if _is_filtered(draw.sampling)]),
            is_random=not all(p.is_greedy for p in params),
            has_penalties=any(p.has_penalties for p in params),
            has_bias=any(p.logit_bias for p in params),
            num_logprobs=max((number for number in num_logprobs if number is not None), default=None),
            named=self._named(
                {slot: draw.sampling.logprob_token_ids for slot, draw in draws.items()}, num_slots
            ),
        )

    def verifying_plan(self, rows: Sequence[tuple[int, Draw]]) -> DrawPlan:
        """Return the plan of plain draws (`Draw.is_plain`), of which a slot may have several."""
        self._hold(dict(rows))
        slots = torch.tensor([slot for slot, _ in rows], device=self._device)
        draws = [draw for _, draw in rows]
        return DrawPlan(
            params=self._params.of(slots),
            is_live=torch.ones_like(slots, dtype=torch.bool),
            output_index=torch.tensor([draw.output_index for draw in draws], device=self._device),
            banned=None,
            forbidden=None,
            forced=(),
            filtered=self._slots([row for row, draw in enumerate(draws) if _is_filtered(draw.sampling)]),
            is_random=not all(draw.sampling.is_greedy for draw in draws),
            has_penalties=False,
            has_bias=False,
            num_logprobs=None,
            named=None,
        )

    def verify(self, logits: Tensor, best: Tensor | None, plan: DrawPlan) -> Tensor:
        """Draw a token for each row of `logits` [row, token], as `sample` would. `best` is as there.

        Only some of them will be tokens of the answers. None is counted: plain draws depend on no counts.
        """
        if best is not None and plan.kind is DrawKind.GREEDY:
            return best
        return self._choose(logits, plan, 0)

    def plan_of_kind(self, kind: DrawKind, is_live: Tensor, output_index: Tensor) -> DrawPlan:
        """Return the plan of one kind of draws in the first slots, for capture.

        Replays use the current parameters.
        """
        num_slots = len(output_index)
        return DrawPlan(
            params=self._params.first(num_slots),
            is_live=is_live,
            output_index=output_index,
            banned=None,
            forbidden=None,
            forced=(),
            # Neutral values keep all tokens of slots without filters.
            filtered=torch.arange(num_slots, device=self._device) if kind is DrawKind.FILTERED else None,
            is_random=kind is not DrawKind.GREEDY,
            has_penalties=False,
            has_bias=False,
            num_logprobs=None,
            named=None,
        )

    def sample(self, logits: Tensor, plan: DrawPlan, step: int = 0, best: Tensor | None = None) -> Sampled:
        """Draw the tokens of one step of a plan from `logits` [slot, token].

        `best` is the likeliest token of each slot, if it is known.
        """
        if best is not None and plan.kind is DrawKind.GREEDY:
            self._count(best, plan.is_live)
            return Sampled(best)
        token_ids = self._choose(self._adjusted(logits, plan), plan, step)
        is_output = plan.is_live
        if step < len(plan.forced):
            is_forced = plan.forced[step] >= 0
            token_ids = torch.where(is_forced, plan.forced[step], token_ids)
            is_output = is_output & ~is_forced
            is_in_prompt = self._is_in_prompt[: len(logits)]
            is_in_prompt.scatter_(
                1, token_ids[:, None], is_in_prompt.gather(1, token_ids[:, None]) | is_forced[:, None]
            )
        sampled = Sampled(token_ids)
        if plan.num_logprobs is not None:
            sampled = log_probabilities(logits, token_ids, plan.num_logprobs, plan.named)
        self._count(token_ids, is_output)  # last: a step that fails before can be drawn again
        return sampled

    def _count(self, token_ids: Tensor, is_output: Tensor) -> None:
        self._counts[: len(token_ids)].scatter_add_(1, token_ids[:, None], is_output[:, None].int())

    def _hold(self, draws: Mapping[int, Draw]) -> None:
        """Update the slots' parameters. They change with a slot's sequence, and rarely between two steps."""
        changed = [
            slot
            for slot, d in draws.items()
            if self._held[slot][0] is not d.sampling or self._held[slot][1] != d.choice
        ]
        for slot in changed:
            check_token_ids((token for token, _ in draws[slot].sampling.logit_bias), self._vocab_size)
        for slot in changed:
            bias = draws[slot].sampling.logit_bias
            if bias or self._held[slot][0].logit_bias:
                self._write_bias(slot, bias)
            self._held[slot] = draws[slot].sampling, draws[slot].choice
        if changed:
            self._params.copy_(SlotParams.build(self._held, self._device))

    def _write_bias(self, slot: int, bias: Sequence[tuple[int, float]]) -> None:
        if self._bias is None:
            self._bias = torch.zeros(len(self._held), self._vocab_size, device=self._device)
        self._bias[slot].zero_()
        for token, value in bias:
            self._bias[slot, token] = value

    def _adjusted(self, logits: Tensor, plan: DrawPlan) -> Tensor:
        """Return the logits after penalties, bias, masks and bans."""
        scores = self._penalised(logits.float(), plan.params) if plan.has_penalties else logits
        if plan.has_bias:
            assert self._bias is not None, "`_hold` writes the bias of a slot that has one"
            scores = scores + self._bias[: len(scores)]
        if plan.forbidden is not None:
            scores = scores.masked_fill(plan.forbidden, -torch.inf)
        if plan.banned is not None:
            scores = scores.index_put(plan.banned, scores.new_full((), -torch.inf))
        return scores

    def _penalised(self, scores: Tensor, params: SlotParams) -> Tensor:
        """Return penalised scores. Repetition counts prompt and output, the other two count output."""
        counts = self._counts[: len(scores)]
        is_in_prompt = self._is_in_prompt[: len(scores)]
        repetition = params.repetition_penalty[:, None]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(is_in_prompt | (counts > 0), repeated, scores)
        return (
            scores
            - params.frequency_penalty[:, None] * counts
            - params.presence_penalty[:, None] * (counts > 0)
        )

    def _choose(self, scores: Tensor, plan: DrawPlan, step: int) -> Tensor:
        """Return one token for each slot: the likeliest at temperature 0."""
        params = plan.params
        if self._kernels.are_used:
            return draw_tokens(
                scores,
                plan.is_live,
                temperature=params.temperature,
                top_p=params.top_p,
                min_p=params.min_p,
                top_k=params.top_k,
                seed=params.seed,
                choice=params.choice,
                output_index=plan.output_index,
                step=step,
            )
        best = scores.argmax(dim=-1)
        if not plan.is_random:
            return best
        return torch.where(params.temperature > 0, self._draw(scores.float(), plan, step), best)

    def _draw(self, scores: Tensor, plan: DrawPlan, step: int) -> Tensor:
        """Return one token for each slot by inversion: the first whose cumulative probability exceeds u.

        Tokens are in the order of the vocabulary, so other slots' filters do not change the result. Sums are
        float64, whose rounding does not matter.
        """
        params = plan.params
        temperature = torch.where(params.temperature > 0, params.temperature, 1.0)[:, None]
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
        if plan.filtered is not None:
            chosen = scores[plan.filtered]
            limits = [values[plan.filtered] for values in (params.top_k, params.top_p, params.min_p)]
            threshold = score_threshold(chosen, *limits)
            scores = scores.index_copy(0, plan.filtered, chosen.masked_fill(chosen < threshold, -torch.inf))
        distribution = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        u = uniform(params.seed, params.choice, plan.output_index + step)
        return (distribution <= u[:, None] * distribution[:, -1:]).sum(dim=-1)

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        if not pairs:
            return None
        slots, tokens = torch.tensor(pairs, device=self._device).unbind(1)
        return slots, tokens

    def _forbidden(self, masks: Mapping[int, bytes], num_slots: int) -> Tensor | None:
        """Unpack the masks' bits. A slot without a mask can draw any token."""
        if not masks:
            return None
        num_bytes = -(-self._vocab_size // 8)
        packed = bytearray(b"\xff" * (num_bytes * num_slots))
        for slot, mask in masks.items():
            packed[slot * num_bytes : (slot + 1) * num_bytes] = mask[:num_bytes].ljust(num_bytes, b"\0")
        rows = torch.frombuffer(packed, dtype=torch.uint8).to(self._device).view(num_slots, num_bytes, 1)
        bits = rows.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=self._device)) & 1
        return (bits == 0).flatten(1)[:, : self._vocab_size]

    def _forced(self, forced: Mapping[int, Sequence[int]], num_slots: int) -> tuple[Tensor, ...]:
        num_steps = max(map(len, forced.values()), default=0)
        rows = [list(forced.get(slot, ())) for slot in range(num_slots)]
        padded = [row + [-1] * (num_steps - len(row)) for row in rows]
        return torch.tensor(padded, device=self._device).unbind(1) if num_steps else ()

    def _named(self, named: Mapping[int, Sequence[int]], num_slots: int) -> Tensor | None:
        most = max(map(len, named.values()), default=0)
        if most == 0:
            return None
        rows = [[0] * most for _ in range(num_slots)]
        for slot, token_ids in named.items():
            rows[slot][: len(token_ids)] = token_ids
        return torch.tensor(rows, device=self._device)

    def _slots(self, slots: Sequence[int]) -> Tensor | None:
        return torch.tensor(slots, device=self._device) if slots else None


def check_token_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError for an unknown token. On a CUDA device it would be an error that ends the process."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is not in the vocabulary of {vocab_size}")


def _is_filtered(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
