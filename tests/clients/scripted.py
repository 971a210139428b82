"""A server whose answers a test writes: a real one, but its backend draws the tokens of a script."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from backends.fake import FakeBackend, _Contents
from backends.interface import Draw, PrefillRow, SampledToken
from server.options.models import DEMO_MODEL
from server.text.renderer import Renderer
from server.text.tokenizer import Tokenizer
from tests.server.serving import RunningServer, serve, settings, spec

MODEL = "scripted"
MAX_MODEL_LEN = 65_536
END = 2  # the token that ends an answer


@dataclass
class _ScriptedContents(_Contents):
    """A slot whose answer is the script's."""

    write_answer: Callable[[Sequence[int]], list[int]] = list  # from a prompt, all in token ids
    answer: list[int] = field(default_factory=list)

    def copy(self) -> "_ScriptedContents":
        return replace(self, token_ids=self.token_ids.copy())

    def sample(self, draw: Draw, vocab_size: int) -> SampledToken:
        if not self.answer:
            self.answer = [*self.write_answer(self.token_ids[: self.num_prompt_tokens]), END]
        is_over = draw.output_index >= len(self.answer)  # a launch of several steps goes beyond
        token_id = END if is_over else self.answer[draw.output_index]
        assert token_id < vocab_size
        mask = draw.allowed_mask
        assert mask is None or mask[token_id // 8] >> token_id % 8 & 1, (
            f"the answer's form forbids token {token_id}, at {draw.output_index}"
        )
        return SampledToken(token_id)


@contextlib.contextmanager
def scripted(script: Callable[[str], str]) -> Iterator[RunningServer]:
    """Run a server of long contexts until the block ends. `script` makes an answer of a prompt."""
    tokenizer = Tokenizer.load(str(DEMO_MODEL))
    renderer = Renderer(tokenizer)

    def write_answer(prompt: Sequence[int]) -> list[int]:
        return list(tokenizer.encode(script(tokenizer.decode(prompt)), add_special_tokens=False))

    class ScriptedBackend(FakeBackend):
        def _begin(self, row: PrefillRow, slots: dict[int, _Contents]) -> None:
            super()._begin(row, slots)
            store, index = self._target(row, slots)
            held = store[index]
            store[index] = _ScriptedContents(
                held.num_prompt_tokens, held.num_forced, held.state, held.token_ids, write_answer
            )

    own_spec = spec(max_model_len=MAX_MODEL_LEN, vocab_size=4096)
    with serve(renderer, settings(model_names=(MODEL,)), own_spec, make_backend=ScriptedBackend) as server:
        yield server
    renderer.close()
