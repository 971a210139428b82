"""The documents of prose cases: text that ships with the project, or a user's file, cut into sentences."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from server.options.command_line import OptionError

_TEXTS = Path(__file__).parent / "texts"
BUILT_IN = {"prose": ("novel", "jargon"), "novel": ("novel",), "jargon": ("jargon",)}
"""Names of haystacks, and the texts of which each case draws one."""

# A sentence ends at a full stop, question or exclamation mark and closing quotes, before a space. Titles,
# initials and the abbreviations "e.g." and "i.e." end no sentence.
_SENTENCE_END = re.compile(r"(?<!Mr)(?<!Mrs)(?<!Dr)(?<!St)(?<![. ][A-Z])(?<!e\.g)(?<!i\.e)[.!?][\"'”’)]*\s+")
_MIN_SENTENCES = 20


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text. Each sentence ends with the white space that separates it from the next."""

    name: str
    sentences: Sequence[str]
    text: str  # in lower case: a value that occurs here cannot be a needle

    def stretch(self, start: int, size: int) -> list[str]:
        """Return `size` sentences from `start` on. The text continues at its beginning after its end."""
        return [self.sentences[(start + index) % len(self.sentences)] for index in range(size)]


def load_haystacks(name: str) -> list[Haystack]:
    """Return the texts of a built-in name or of a file. Raises `OptionError`."""
    if name in BUILT_IN:
        return [_haystack(text, _TEXTS / f"{text}.txt") for text in BUILT_IN[name]]
    return [_haystack(name, Path(name))]


def haystack_hash(haystacks: Sequence[Haystack]) -> str:
    """Return a hash of the texts. Cases can be paired only if they have the same."""
    return sha256("".join(sentence for text in haystacks for sentence in text.sentences).encode()).hexdigest()


def draw_start(haystack: Haystack, rng: random.Random) -> int:
    """Return the index of the sentence at which a case's document begins."""
    return rng.randrange(len(haystack.sentences))


def _haystack(name: str, path: Path) -> Haystack:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--haystack must be one of {', '.join(BUILT_IN)} or a file of UTF-8 text, got {name}: {error}"
        ) from error
    sentences = [
        sentence
        for paragraph in re.split(r"\n\s*\n", text.strip())
        for sentence in _sentences(" ".join(paragraph.split()))
    ]
    if len(sentences) < _MIN_SENTENCES:
        raise OptionError(
            f"--haystack {name} must have at least {_MIN_SENTENCES} sentences, got {len(sentences)}"
        )
    return Haystack(name, sentences, text.lower())


def _sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph. The last ends with the blank line between paragraphs."""
    ends = [match.end() for match in _SENTENCE_END.finditer(paragraph)]
    starts = [0, *ends]
    pieces = [paragraph[start:end] for start, end in zip(starts, [*ends, len(paragraph)], strict=True)]
    return [*pieces[:-1], f"{pieces[-1]}\n\n"] if pieces[-1] else pieces
