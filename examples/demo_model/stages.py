"""The curriculum: what each stage of the training is like, and when it counts as learned."""

from dataclasses import dataclass, replace

from commands.eval.tasks import words
from examples.demo_model.corpus import FULL, Difficulty

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: what the text is like, and when it counts as learned."""

    name: str
    difficulty: Difficulty
    num_facts: int
    num_fillers: int
    num_questions: int
    batch_size: int
    max_steps: int
    target: float = 0.97  # the running accuracy of first answer tokens at which the stage ends
    is_varied: bool = True  # with system prompts, small talk, documents read a turn before they are asked about, and text to predict
    max_shrink: int = (
        1  # batches are of shorter documents, up to this many times, and of as many more of them
    )
    max_position: int = (
        0  # positions skip ahead at random up to about this one, so that far distances are met in short texts
    )
    rate: float = LEARNING_RATE
    final_rate: float = LEARNING_RATE  # the learning rate goes from `rate` to this over `max_steps`

    def shrunk(self, times: int) -> "Stage":
        """The same amount of text in shorter documents."""
        facts = max(4, self.num_facts // times)
        return replace(
            self, num_facts=facts, num_fillers=self.num_fillers // times, batch_size=self.batch_size * times
        )


def _words(share: int, templates: int) -> Difficulty:
    return Difficulty(
        share, min(share, len(words.ADJECTIVES)), share, templates, templates, one_topic_share=1.0
    )


def _templates(number: int) -> Difficulty:
    return Difficulty(num_statements=number, num_questions=number)


STAGES: tuple[Stage, ...] = (
    Stage("64 words, 4 facts", _words(64, 1), 4, 0, 8, 16, 2000, is_varied=False),
    Stage("64 words, 8 facts", _words(64, 2), 8, 2, 16, 8, 2000, is_varied=False),
    Stage("128 words, 8 facts", _words(128, 2), 8, 4, 16, 8, 2000),
    Stage("all words, 8 facts", _templates(2), 8, 4, 16, 8, 2000),
    Stage("all words, 16 facts", _templates(4), 16, 16, 32, 4, 2000, max_position=1024),
    Stage(
        "all templates, 32 facts, 900 tokens", FULL, 32, 64, 32, 3, 600, 0.96, max_shrink=4, max_position=2048
    ),
    Stage(
        "64 facts, 2,300 tokens",
        FULL,
        64,
        180,
        32,
        1,
        300,
        0.98,
        max_shrink=8,
        max_position=6000,
        rate=8e-4,
        final_rate=6e-4,
    ),
    Stage(
        "110 facts, 4,000 tokens",
        FULL,
        110,
        320,
        48,
        1,
        150,
        0.995,
        max_shrink=16,
        max_position=9000,
        rate=6e-4,
        final_rate=4.2e-4,
    ),
    Stage(
        "128 facts, 8,000 tokens",
        FULL,
        128,
        760,
        48,
        1,
        70,
        1.0,
        max_shrink=8,
        max_position=12000,
        rate=4.2e-4,
        final_rate=0.0,
    ),
)
