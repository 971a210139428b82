"""Short requests before a load find the model's name and the form of prompts that each server accepts."""

import random
from collections.abc import Sequence

from commands.loadtest.answer import Answer, Failure
from commands.loadtest.config import Load, PromptFormat
from commands.loadtest.prompts import Form, Prompt, WordScale, random_token_ids, random_words
from commands.loadtest.target import Target, TargetError

PROBE_TOKENS = 16
PROBE_WORDS = (32, 256)
_REFUSALS = (
    "HTTP 400",
    "HTTP 422",
    "HTTP 500",
)  # servers' answers to a form of prompt that they do not accept


async def probe(targets: Sequence[Target], load: Load) -> list[Form]:
    """Return the form of each server's random prompts: token ids if all servers accept them, else words.

    Raises `TargetError` for a server that fails a short request.
    """
    for target in targets:
        await target.find_model()
    if load.dataset_path is not None:
        return [None] * len(targets)
    if load.prompt_format is not PromptFormat.TEXT and not any(target.address.is_chat for target in targets):
        refusals = [
            refusal for target in targets if (refusal := await _token_refusal(target, load)) is not None
        ]
        if not refusals:
            return [None] * len(targets)
        if load.prompt_format is PromptFormat.TOKENS:
            raise TargetError(refusals[0])
    return [await _word_scale(target, load) for target in targets]


async def _token_refusal(target: Target, load: Load) -> str | None:
    """Return a server's error message about token ids, or None if it accepts them.

    Raises `TargetError` for any other failure.
    """
    token_ids = random_token_ids(PROBE_TOKENS, load.vocab_size, random.Random(load.seed))
    outcome = await target.ask(Prompt(token_ids, 1))
    if isinstance(outcome, Answer):
        return None
    if outcome.reason not in _REFUSALS:
        raise _error(target, outcome)
    return str(_error(target, outcome))


async def _word_scale(target: Target, load: Load) -> WordScale:
    """Measure the tokens per random word, by two short requests of different length."""
    source = random.Random(load.seed)
    counts: list[int] = []
    for num_words in PROBE_WORDS:
        outcome = await target.ask(Prompt(random_words(num_words, source), 1))
        if isinstance(outcome, Failure):
            raise _error(target, outcome)
        counts.append(outcome.num_input_tokens)
    if counts[1] <= counts[0]:
        raise TargetError(
            f"{target.address.base_url} counts {counts[0]} tokens for {PROBE_WORDS[0]} words "
            f"and {counts[1]} for {PROBE_WORDS[1]}: more words must have more tokens"
        )
    return WordScale.through((PROBE_WORDS[0], counts[0]), (PROBE_WORDS[1], counts[1]))


def _error(target: Target, failure: Failure) -> TargetError:
    address = target.address
    message = f"{address.base_url}{address.endpoint} fails a short request: {failure.reason} {failure.detail}"
    return TargetError(message.rstrip())
