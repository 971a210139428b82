"""The integer model of the fake backend, which tests use for the expected tokens.

A sequence is hashed into one number, its state, token by token. The state selects the most likely token. The
`_NUM_LEADERS` token ids from there on have falling logits, and all others have logit 0. A missing, doubled or
foreign token therefore changes all tokens after it.
"""

import math
from collections import Counter
from collections.abc import Sequence

from backends.interface import Draw, SampledToken, SamplingParams

_NUM_LEADERS = 24
_LOGIT_STEP = 0.5
_NUM_ASKING = 16
_MASK = (1 << 64) - 1


def fold(state: int, token_ids: Sequence[int]) -> int:
    """Return the state after these tokens. The state of an empty sequence is 0."""
    for token_id in token_ids:
        state = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
    return state


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    *,
    vocab_size: int,
    choice: int = 0,
    min_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the first `num_tokens` tokens of an answer that nothing ends.

    Stop tokens are banned until `min_tokens`.
    """
    state = fold(0, prompt)
    token_ids = list(prompt)
    for index in range(num_tokens):
        banned = tuple(stop_token_ids) if index < min_tokens else ()
        token_ids.append(
            choose(state, Draw(sampling, choice, index, banned), vocab_size, token_ids, len(prompt))
        )
        state = fold(state, token_ids[-1:])
    return token_ids[len(prompt) :]


def choose(state: int, draw: Draw, vocab_size: int, token_ids: Sequence[int], num_prompt_tokens: int) -> int:
    """Return the id of the token that follows `token_ids`, whose state is `state`."""
    sampling = draw.sampling
    is_free = draw.allowed_mask is None and not draw.banned_token_ids
    if is_free and sampling.is_greedy and not (sampling.logit_bias or sampling.has_penalties):
        return _leader(state, vocab_size)
    logits = _adjusted_logits(state, draw, vocab_size, token_ids, num_prompt_tokens)
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if sampling.is_greedy:
        return ranked[0]
    weights = _truncated(
        [math.exp((logits[token] - logits[ranked[0]]) / sampling.temperature) for token in ranked], sampling
    )
    return ranked[_invert(weights, _uniform(state, draw))]


def with_logprobs(
    state: int, token_id: int, num_top: int, vocab_size: int, named: Sequence[int] = ()
) -> SampledToken:
    """Return a token with its log-probability and those of the most likely tokens and of the named ones."""
    num_leaders = min(_NUM_LEADERS, vocab_size)
    mass = (
        sum(math.exp((_NUM_LEADERS - rank) * _LOGIT_STEP) for rank in range(num_leaders))
        + vocab_size
        - num_leaders
    )
    leader = _leader(state, vocab_size)
    top = [(leader + rank) % vocab_size for rank in range(min(num_top, vocab_size))]

    def pairs(tokens: Sequence[int]) -> tuple[tuple[int, float], ...]:
        return tuple((token, _logit(state, token, vocab_size) - math.log(mass)) for token in tokens)

    return SampledToken(token_id, pairs([token_id])[0][1], pairs(top), pairs(named))


def hidden_state(state: int, size: int) -> tuple[float, ...]:
    """Return the vector of a state in pooled prompts. Its numbers are from −1 to 1."""
    return tuple((fold(state, (index,)) >> 11) / (1 << 52) - 1 for index in range(size))


def importance(
    token_ids: Sequence[int], question: Sequence[int], question_weight: float, chunk_tokens: int
) -> tuple[float, ...]:
    """Return each chunk's mean: a token of the prompt's end counts 1, one of the question its weight."""
    score = dict.fromkeys(question, question_weight) | dict.fromkeys(token_ids[-_NUM_ASKING:], 1.0)
    chunks = [token_ids[first : first + chunk_tokens] for first in range(0, len(token_ids), chunk_tokens)]
    return tuple(sum(score.get(token_id, 0.0) for token_id in chunk) / len(chunk) for chunk in chunks)


def _leader(state: int, vocab_size: int) -> int:
    return (state >> 16) % vocab_size


def _logit(state: int, token_id: int, vocab_size: int) -> float:
    rank = (token_id - _leader(state, vocab_size)) % vocab_size
    return (_NUM_LEADERS - rank) * _LOGIT_STEP if rank < _NUM_LEADERS else 0.0


def _adjusted_logits(
    state: int, draw: Draw, vocab_size: int, token_ids: Sequence[int], num_prompt_tokens: int
) -> dict[int, float]:
    """Return logits after penalties and bias, by token.

    They are those of the allowed tokens. Without a mask, they are those of the leaders and of more tokens
    than can be banned or penalised.
    """
    sampling = draw.sampling
    counts = Counter(token_ids[num_prompt_tokens:] if sampling.has_penalties else ())
    seen = set(token_ids if sampling.has_penalties else ())
    bias = dict(sampling.logit_bias)
    num_leaders = min(_NUM_LEADERS + len(bias) + len(draw.banned_token_ids) + len(seen), vocab_size)
    leader = _leader(state, vocab_size)
    logits = {}
    tokens = {(leader + rank) % vocab_size for rank in range(num_leaders)} | bias.keys()
    if draw.allowed_mask is not None:
        tokens = _allowed_tokens(draw.allowed_mask)
    for token in tokens - set(draw.banned_token_ids):
        logit = _logit(state, token, vocab_size)
        if token in seen:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * counts[token] + (
            sampling.presence_penalty if token in counts else 0.0
        )
        logits[token] = logit + bias.get(token, 0.0)
    return logits


def _allowed_tokens(mask: bytes) -> set[int]:
    return {8 * index + bit for index, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}


def _truncated(weights: list[float], sampling: SamplingParams) -> list[float]:
    """Leave out, from falling weights, what top_k, top_p and min_p exclude."""
    if sampling.top_k > 0:
        weights = weights[: sampling.top_k]
    total = sum(weights)
    mass = 0.0
    num_kept = 0
    for weight in weights:
        if num_kept > 0 and mass >= sampling.top_p * total:
            break
        mass += weight
        num_kept += 1
    return [weight for weight in weights[:num_kept] if weight >= sampling.min_p * weights[0]]


def _invert(weights: Sequence[float], uniform: float) -> int:
    threshold = uniform * sum(weights)
    for position, weight in enumerate(weights):
        threshold -= weight
        if threshold < 0:
            return position
    return len(weights) - 1


def _uniform(state: int, draw: Draw) -> float:
    key = fold(state, (draw.sampling.seed & _MASK, draw.choice, draw.output_index))
    return (key >> 11) / (1 << 53)
