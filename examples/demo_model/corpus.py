"""Made-up documents with facts about people, questions about one fact each, and a little small talk.

Everything is drawn from `random.Random`, so a seed gives the same text everywhere. Training and held-out text
are disjoint. Their random streams have different seed strings. One name-value pairing in eight (by checksum,
`is_held_out`) never occurs in training, and every held-out question is about such a pairing. The module knows
words and sentences, not tokens: where lengths matter it takes a function that counts tokens.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

from commands.eval.tasks import words

HELD_OUT_ONE_IN = 8
PARAGRAPH_ONE_IN = 8
MENTION_ONE_IN = 6
MAX_FACTS = 128


@dataclass(frozen=True)
class Topic:
    """One kind of fact."""

    verb: str  # "keeps"
    base: str  # the verb's base, "keep"
    title: str  # the kind's name, "pet"
    nouns: tuple[str, ...]  # the last words of its values


TOPICS = (
    Topic("keeps", "keep", "pet", words.PETS),
    Topic("plays", "play", "instrument", words.INSTRUMENTS),
    Topic("wears", "wear", "garment", words.GARMENTS),
    Topic("drives", "drive", "vehicle", words.VEHICLES),
    Topic("owns", "own", "home", words.HOMES),
    Topic("carries", "carry", "tool", words.TOOLS),
)
TOPIC_OF_NOUN = {noun: topic for topic in TOPICS for noun in topic.nouns}
# Topics alternate, so that the first n nouns, with which training begins, cover all topics.
NOUNS: tuple[str, ...] = tuple(
    noun for noun in chain.from_iterable(zip_longest(*(topic.nouns for topic in TOPICS))) if noun is not None
)

# Training begins with the first few, the plainest. The name precedes the value, as attention only looks back.
STATEMENTS = (
    "{name} {verb} a {value}.",
    "The {title} of {name} is a {value}.",
    "It is said that {name} {verb} a {value}.",
    "{name} still {verb} a {value}.",
    "{name} {verb} a {value} these days.",
    "As everyone knows, {name} {verb} a {value}.",
)
QUESTIONS = (
    "What is the {title} of {name}?",
    "What does {name} {base}?",
    "Which {title} does {name} have?",
    "Tell me what {name} {verb}.",
    "Can you tell me the {title} of {name}?",
    "Please name the {title} of {name}.",
    "According to the text, what does {name} {base}?",
    "Do you know what {name} {verb}?",
)
FILLERS = (
    "The {thing} {deed} near the {place}.",
    "In the {time} the {thing} {deed}.",
    "The {thing} {deed} and the {thing2} {deed2}.",
    "Nobody {deed} in the {place} that {time}.",
    "The {place} is behind the {place2}.",
    "Every {time} the {thing} {deed} at the {place} and {deed2} there.",
)
MENTIONS = (
    "{name} {deed} near the {place}.",
    "The {thing} and {name} {deed} in the {place}.",
    "Last {time} {name} {deed} at the {place}.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer with the fact only.",
    "You answer questions about a text.",
    "Be brief.",
)

_WHO = "I am a small demonstration model. I look up facts in a text."
_WHAT = "I can read a text and answer a question about it."
_HELLO = "Hello! Give me a text and ask me about it."
_WELCOME = "You are welcome."
_BYE = "Goodbye!"
_FINE = "I am well, thank you."
_SMALL_TALK_BY_ANSWER = {
    _HELLO: (
        "Hello!",
        "Hello",
        "Hello.",
        "hello",
        "Hi",
        "Hi!",
        "hi",
        "Hey!",
        "Hey",
        "Hello there!",
        "Hi there",
        "Good morning!",
        "Good evening!",
        "Good morning",
        "Say hello.",
        "Say hello!",
        "Hello, world!",
        "Hello, how are you?",
    ),
    _FINE: (
        "How are you?",
        "How are you today?",
        "How do you do?",
        "how are you?",
        "Are you well?",
    ),
    _WHO: (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me who you are.",
        "who are you?",
        "Introduce yourself.",
        "Are you a model?",
        "Tell me about yourself.",
    ),
    _WHAT: (
        "What can you do?",
        "How can you help me?",
        "What do you do?",
        "Help",
        "Help!",
        "help",
        "Can you help me?",
        "what can you do?",
        "What are you for?",
    ),
    _WELCOME: (
        "Thanks",
        "Thanks!",
        "Thank you.",
        "Thank you!",
        "thanks",
        "Thank you",
        "Thank you very much!",
    ),
    _BYE: (
        "Goodbye!",
        "Goodbye.",
        "Bye!",
        "Bye",
        "See you!",
        "Good night!",
        "bye",
    ),
}
SMALL_TALK: tuple[tuple[str, str], ...] = tuple(
    (said, answer) for answer, group in _SMALL_TALK_BY_ANSWER.items() for said in group
)


@dataclass(frozen=True)
class Fact:
    """A person and a value. The sentence that states the fact is chosen when the document is written."""

    name: str
    value: str  # adjective and noun: "grey falcon"

    @property
    def topic(self) -> Topic:
        """The topic of the value's noun."""
        return TOPIC_OF_NOUN[self.value.split()[1]]

    def fill(self, template: str) -> str:
        """Put name, value and the topic's words into a template."""
        topic = self.topic
        return template.format(
            name=self.name, value=self.value, verb=topic.verb, base=topic.base, title=topic.title
        )


@dataclass(frozen=True)
class Difficulty:
    """How many words and templates are in use, counted from the first. Training begins with few."""

    num_names: int = len(words.NAMES)
    num_adjectives: int = len(words.ADJECTIVES)
    num_nouns: int = len(NOUNS)
    num_statements: int = len(STATEMENTS)
    num_questions: int = len(QUESTIONS)
    # The share of documents with one topic. Where topics differ, the topic alone narrows the answer down, and
    # the name matters less.
    one_topic_share: float = 0.5


FULL = Difficulty()


@dataclass(frozen=True)
class Case:
    """One held-out question. A reply is exact when it equals `answer`, apart from white space at its ends."""

    document: str
    question: str
    answer: str
    statement: str  # the sentence with the fact in question, once in the document

    @property
    def prompt(self) -> str:
        """The user's message: the document, an empty line, the question."""
        return f"{self.document}\n\n{self.question}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation to complete, as the chat API takes it."""
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class TrainingText:
    """A document, and questions about it with their answers.

    Some questions are repeated. Otherwise a guess among the facts without a question so far would be
    rewarded, and the model would learn that instead of looking facts up.
    """

    document: str
    exchanges: tuple[tuple[str, str], ...]


def is_held_out(fact: Fact) -> bool:
    """Whether this pairing of name and value never occurs in training."""
    return zlib.crc32(f"{fact.name}|{fact.value}".encode()) % HELD_OUT_ONE_IN == 0


def training_stream(seed: int, step: int) -> random.Random:
    """Return the random numbers of a training step. They depend on seed and step only."""
    return random.Random(f"training {seed} {step}")


def write_training_text(
    rng: random.Random, num_facts: int, num_fillers: int, num_questions: int, difficulty: Difficulty = FULL
) -> TrainingText:
    """Write a document of facts among filler sentences, and draw questions about it.

    One more filler sentence opens the document.
    """
    facts = _draw_facts(rng, num_facts, difficulty)
    sentences: list[str | None] = [
        fact.fill(rng.choice(STATEMENTS[: difficulty.num_statements])) for fact in facts
    ]
    sentences += [None] * num_fillers
    rng.shuffle(sentences)
    pieces = [write_filler(rng)] + [
        _filler_piece(rng) if sentence is None else f" {sentence}" for sentence in sentences
    ]
    questioned = rng.choices(facts, k=num_questions)
    questions = QUESTIONS[: difficulty.num_questions]
    return TrainingText(
        "".join(pieces), tuple((fact.fill(rng.choice(questions)), fact.value) for fact in questioned)
    )


def make_case(
    seed: int,
    num_tokens: int,
    count_tokens: Callable[[str], int],
    depth: float | None = None,
    within_last: int | None = None,
    fact_share: float = 0.25,
) -> Case:
    """Make a held-out case. Its document is at most `num_tokens` long, and shorter by less than a sentence.

    Args:
        seed: equal arguments give an equal case.
        num_tokens: the document's length, without question and chat template; at least 40.
        count_tokens: returns the length of a text in tokens. The document's length is exact where lengths add
            up over words, as with the demo model's tokenizer.
        depth: the position of the fact in question, 0 (the beginning) to 1 (the end). By default it is
            distributed evenly.
        within_last: puts the fact within this many last tokens of the document instead.
        fact_share: the share of sentences with facts, of which there are at most `MAX_FACTS`. Their names are
            distinct.

    Raises:
        ValueError: both `depth` and `within_last` are given, or a number is out of range.
    """
    if depth is not None and within_last is not None:
        raise ValueError(f"depth is {depth} and within_last is {within_last}: expected one of them, not both")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}: expected a number between 0 and 1")
    if num_tokens < 40:
        raise ValueError(f"num_tokens is {num_tokens}: expected at least 40")
    rng = random.Random(f"held out {seed}")
    names = iter(rng.sample(words.NAMES, MAX_FACTS))
    fact = _draw_fact(rng, next(names), words.ADJECTIVES, NOUNS, held_out=True)
    statement = fact.fill(rng.choice(STATEMENTS))
    question = fact.fill(rng.choice(QUESTIONS))
    fact_tokens = count_tokens(f" {statement}")
    if within_last is not None and within_last < fact_tokens:
        raise ValueError(f"within_last is {within_last}: expected at least {fact_tokens}, the fact's length")
    pieces: list[str] = []
    starts: list[int] = []
    total = 0
    for piece in _surroundings(rng, names, fact_share):
        piece_tokens = count_tokens(piece)
        if total + piece_tokens + fact_tokens > num_tokens:
            break
        pieces.append(piece)
        starts.append(total)
        total += piece_tokens
    starts.append(total)
    if within_last is not None:
        index = rng.choice(
            [i for i in range(1, len(starts)) if total - starts[i] + fact_tokens <= within_last]
        )
    else:
        wanted = (rng.random() if depth is None else depth) * total
        index = min(range(1, len(starts)), key=lambda i: abs(starts[i] - wanted))
    pieces.insert(index, f" {statement}")
    return Case("".join(pieces), question, fact.value, statement)


def write_filler(rng: random.Random) -> str:
    """Write a sentence without a fact or a name."""
    return _fill_filler(rng, rng.choice(FILLERS), "")


def _surroundings(rng: random.Random, names: Iterator[str], fact_share: float) -> Iterator[str]:
    yield write_filler(rng)
    while True:
        name = next(names, None) if rng.random() < fact_share else None
        if name is None:
            yield _filler_piece(rng)
        else:
            yield " " + _draw_fact(rng, name, words.ADJECTIVES, NOUNS, held_out=None).fill(
                rng.choice(STATEMENTS)
            )


def _filler_piece(rng: random.Random) -> str:
    """Write a filler sentence with the white space before it.

    Only sentences without a name open paragraphs, so a name always follows a space.
    """
    if rng.randrange(PARAGRAPH_ONE_IN) == 0:
        return "\n\n" + write_filler(rng)
    if rng.randrange(MENTION_ONE_IN) == 0:
        return " " + _fill_filler(rng, rng.choice(MENTIONS), rng.choice(words.NAMES))
    return " " + write_filler(rng)


def _fill_filler(rng: random.Random, template: str, name: str) -> str:
    return template.format(
        name=name,
        thing=rng.choice(words.THINGS),
        thing2=rng.choice(words.THINGS),
        deed=rng.choice(words.DEEDS),
        deed2=rng.choice(words.DEEDS),
        place=rng.choice(words.PLACES),
        place2=rng.choice(words.PLACES),
        time=rng.choice(words.TIMES),
    )


def _draw_facts(rng: random.Random, num_facts: int, difficulty: Difficulty) -> list[Fact]:
    """Draw facts of distinct names for training."""
    nouns = NOUNS[: difficulty.num_nouns]
    if rng.random() < difficulty.one_topic_share:
        topic = rng.choice(TOPICS)
        nouns = tuple(noun for noun in nouns if noun in topic.nouns)
    names = rng.sample(words.NAMES[: difficulty.num_names], num_facts)
    return [
        _draw_fact(rng, name, words.ADJECTIVES[: difficulty.num_adjectives], nouns, held_out=False)
        for name in names
    ]


def _draw_fact(
    rng: random.Random, name: str, adjectives: tuple[str, ...], nouns: tuple[str, ...], held_out: bool | None
) -> Fact:
    """Draw a value for the name until the pairing is held out, or until it is not (None: either)."""
    while True:
        fact = Fact(name, f"{rng.choice(adjectives)} {rng.choice(nouns)}")
        if held_out is None or is_held_out(fact) == held_out:
            return fact
