"""Facts and questions that share no content word: a search for the question's words does not find the fact.

The idea is that of NoLiMa (arXiv 2502.05167). No method was tuned on these wordings.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from commands.eval.prose.wordings import date, person, price, town


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (line.strip().split(" / ") for line in text.strip().splitlines())
    return tuple((first, second) for first, second in pairs)


@dataclass(frozen=True, slots=True)
class Paraphrase:
    """One kind of fact.

    A statement has the first name of a pair as `{key}`, a question the second one. `answer_prefix` has no
    content word of a statement either.
    """

    answer_prefix: str
    value: Callable[[random.Random], str]
    pairs: tuple[tuple[str, str], ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


PARAPHRASES = (
    Paraphrase(
        "The price is",
        price,
        _pairs(
            """couch / sofa
            automobile / car
            bicycle / bike
            carpet / rug
            television / TV set
            spectacles / glasses
            refrigerator / fridge
            photograph / picture
            gemstone / jewel
            sailing boat / yacht
            hound / dog
            sweater / pullover"""
        ),
        (
            "They are asking {value} for the {key}.",
            "You can have the {key} for {value}.",
            "The label on the {key} says {value}.",
            "The {key} is on sale at {value}.",
        ),
        (
            "How much does the {key} cost?",
            "How much money do I need to buy the {key}?",
            "What would I pay for the {key}?",
            "What is the price of the {key}?",
        ),
    ),
    Paraphrase(
        "The person responsible is",
        person,
        _pairs(
            """infants / babies
            pupils / schoolchildren
            cattle / cows
            films / movies
            garbage / trash
            automobiles / cars
            bicycles / bikes
            carpets / rugs
            flats / apartments
            paintings / pictures
            physicians / doctors
            attorneys / lawyers"""
        ),
        (
            "{value} looks after the {key}.",
            "{value} takes care of the {key}.",
            "Mail for the {key} goes to {value}.",
            "If there is trouble with the {key}, call {value}.",
        ),
        (
            "Who is responsible for the {key}?",
            "Whom do I ask about the {key}?",
            "What is the name of the person in charge of the {key}?",
            "Who manages the {key}?",
        ),
    ),
    Paraphrase(
        "It is in the town of",
        town,
        _pairs(
            """cemetery / graveyard
            prison / jail
            pharmacy / drugstore
            inn / small hotel
            cinema / movie theatre
            zoo / animal park
            lavatory / public toilet
            florist / flower shop
            barber / hairdresser
            physician / doctor
            attorney / lawyer
            bakery / bread shop"""
        ),
        (
            "You will find the {key} in {value}.",
            "To visit the {key}, take the train to {value}.",
            "The {key} has a new home in {value}.",
            "Last year the {key} moved to {value}.",
        ),
        (
            "Where is the {key} now?",
            "Which town do I travel to if I want to see the {key}?",
            "In which town is the {key}?",
            "Where should I go for the {key}?",
        ),
    ),
    Paraphrase(
        "The day is",
        date,
        _pairs(
            """wedding / marriage
            exam / test
            holiday / vacation
            dinner / evening meal
            contest / competition
            journey / trip
            gathering / meeting
            lecture / talk
            rehearsal / practice session
            concert / musical performance
            hike / long walk
            election / vote"""
        ),
        (
            "The {key} will begin on {value}.",
            "Everyone has agreed to hold the {key} on {value}.",
            "Mark {value} in the calendar for the {key}.",
            "The {key} is planned for {value}.",
        ),
        (
            "When is the {key}?",
            "Which day should I keep free for the {key}?",
            "On what date is the {key}?",
            "I do not want to miss the {key}. When is it?",
        ),
    ),
)
