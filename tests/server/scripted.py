"""A fake backend whose answers a test writes, for clients that go on with what a model answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.fake import FakeBackend, _Contents
from backends.interface import BackendSpec, Batch, DecodeRow, PrefillRow, SampledToken
from server.text.renderer import Renderer


class ScriptedBackend(FakeBackend):
    """`answer` returns the tokens that follow a prompt's; then the answer ends with `end`."""

    def __init__(
        self,
        spec: BackendSpec,
        answer: Callable[[Sequence[int]], Sequence[int]],
        end: int,
        step_time: Callable[[Batch], float],
    ) -> None:
        super().__init__(spec, step_time=step_time)
        self._answer = answer
        self._end = end
        self._answers: dict[tuple[int, ...], Sequence[int]] = {}  # by prompt

    def _read(self, row: PrefillRow, slots: dict[int, _Contents]) -> tuple[SampledToken, ...]:
        tokens = super()._read(row, slots)
        if not tokens:
            return ()
        return tuple(self._scripted(slots[slot], tokens[:1])[0] for slot in row.slots)

    def _decode_row(
        self, row: DecodeRow, pool: dict[int, _Contents], num_steps: int
    ) -> tuple[SampledToken, ...]:
        num_before = len(pool[row.slot].token_ids) + 1 - row.num_prompt_tokens
        tokens = super()._decode_row(row, pool, num_steps)
        return self._scripted(pool[row.slot], tokens, num_before)

    def _scripted(
        self, held: _Contents, tokens: Sequence[SampledToken], start: int = 0
    ) -> tuple[SampledToken, ...]:
        """Return the answer's tokens from number `start` on, in the place of those that were drawn."""
        prompt = tuple(held.token_ids[: held.num_prompt_tokens])
        if prompt not in self._answers:
            self._answers[prompt] = self._answer(prompt)
        answer = self._answers[prompt]
        ids = [
            answer[index] if index < len(answer) else self._end for index in range(start, start + len(tokens))
        ]
        return tuple(replace(token, token_id=new) for token, new in zip(tokens, ids, strict=True))


def scripted_by(renderer: Renderer, reply: Callable[[str], str]) -> Callable[..., ScriptedBackend]:
    """Return a maker of backends that answer a prompt's text with `reply`'s text."""
    vocabulary = renderer.vocabulary
    encode = renderer._tokenizer._tokenizer.encode

    def answer(prompt: Sequence[int]) -> Sequence[int]:
        ids: list[int] = encode(reply(vocabulary.decode(list(prompt))), add_special_tokens=False)
        return ids

    def make(spec: BackendSpec, *, step_time: Callable[[Batch], float], **_: object) -> ScriptedBackend:
        return ScriptedBackend(spec, answer, min(renderer.stop_token_ids), step_time)

    return make
