"""The demo model's curriculum: the text of each stage, and the accuracy at which the stage ends."""

from dataclasses import dataclass, replace

from commands.eval.tasks import words
from examples.demo_model.corpus import FULL, Difficulty
from examples.training import stage


@dataclass(frozen=True, kw_only=True)
class Stage(stage.Stage):
    """One stage of the curriculum."""

    difficulty: Difficulty
    num_facts: int
    num_fillers: int
    num_questions: int
    batch_size: int
    # The running accuracy of first answer tokens at which the stage ends.
    target: float = 0.97
    # Adds system prompts, small talk, documents given a turn before the questions, and text to predict.
    is_varied: bool = True
    # A batch may have documents shorter by up to this factor, and more of them by the same factor.
    max_shrink: int = 1

    def shrunk(self, factor: int) -> "Stage":
        """Return the stage with the same amount of text in shorter documents."""
        return replace(
            self,
            num_facts=max(4, self.num_facts // factor),
            num_fillers=self.num_fillers // factor,
            batch_size=self.batch_size * factor,
        )


def _words(num_words: int, num_templates: int) -> Difficulty:
    return Difficulty(
        num_names=num_words,
        num_adjectives=min(num_words, len(words.ADJECTIVES)),
        num_nouns=num_words,
        num_statements=num_templates,
        num_questions=num_templates,
        one_topic_share=1.0,
    )


def _templates(num_templates: int) -> Difficulty:
    return Difficulty(num_statements=num_templates, num_questions=num_templates)


STAGES: tuple[Stage, ...] = (
    Stage(
        name="64 words, 4 facts",
        difficulty=_words(64, 1),
        num_facts=4,
        num_fillers=0,
        num_questions=8,
        batch_size=16,
        max_steps=2000,
        is_varied=False,
    ),
    Stage(
        name="64 words, 8 facts",
        difficulty=_words(64, 2),
        num_facts=8,
        num_fillers=2,
        num_questions=16,
        batch_size=8,
        max_steps=2000,
        is_varied=False,
    ),
    Stage(
        name="128 words, 8 facts",
        difficulty=_words(128, 2),
        num_facts=8,
        num_fillers=4,
        num_questions=16,
        batch_size=8,
        max_steps=2000,
    ),
    Stage(
        name="all words, 8 facts",
        difficulty=_templates(2),
        num_facts=8,
        num_fillers=4,
        num_questions=16,
        batch_size=8,
        max_steps=2000,
    ),
    Stage(
        name="all words, 16 facts",
        difficulty=_templates(4),
        num_facts=16,
        num_fillers=16,
        num_questions=32,
        batch_size=4,
        max_steps=2000,
        max_position=1024,
    ),
    Stage(
        name="all templates, 32 facts, 900 tokens",
        difficulty=FULL,
        num_facts=32,
        num_fillers=64,
        num_questions=32,
        batch_size=3,
        max_steps=600,
        target=0.96,
        max_shrink=4,
        max_position=2048,
    ),
    Stage(
        name="64 facts, 2,300 tokens",
        difficulty=FULL,
        num_facts=64,
        num_fillers=180,
        num_questions=32,
        batch_size=1,
        max_steps=300,
        target=0.98,
        max_shrink=8,
        max_position=6000,
        rate=8e-4,
        final_rate=6e-4,
    ),
    Stage(
        name="110 facts, 4,000 tokens",
        difficulty=FULL,
        num_facts=110,
        num_fillers=320,
        num_questions=48,
        batch_size=1,
        max_steps=150,
        target=0.995,
        max_shrink=16,
        max_position=9000,
        rate=6e-4,
        final_rate=4.2e-4,
    ),
    Stage(
        name="128 facts, 8,000 tokens",
        difficulty=FULL,
        num_facts=128,
        num_fillers=760,
        num_questions=48,
        batch_size=1,
        max_steps=70,
        target=1.0,
        max_shrink=8,
        max_position=12000,
        rate=4.2e-4,
        final_rate=0.0,
    ),
)
