"""The facts of prose cases and their wordings. No cache policy was tuned on any of them.

Each kind of fact has at least six statements and six questions, drawn independently. `{key}` is the thing
that the fact is about, `{value}` the answer.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


_FIRST_NAMES = _words(
    "Miriam Tobias Ingrid Rafael Yolanda Desmond Priya Kenji Oksana Lamar Noor Bettina Anselm Carmela"
)
_LAST_NAMES = _words("Okafor Lindqvist Baptiste Thackeray Novak Quiroga Hasegawa Bergeron Adeyemi Vance")
_TOWN_STARTS = _words("Port Castle Saint Upper Lower Mount New Glen")
_TOWN_ENDS = _words("Ellery Dunmore Marrow Halvern Tavish Corrin Belwick Ostrey Fallow Pendry")
_SHADES = _words("pale dark dusty bright faded")
_COLOURS = _words("turquoise crimson lavender mustard maroon olive indigo salmon")
_MATERIALS = _words("silver wooden porcelain leather crystal pewter")
_PRIZES = _words("teapot violin telescope saddle chessboard barometer lantern compass")
_MONTHS = _words("January March April May June July August September October November")


def code(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def person(rng: random.Random) -> str:
    return f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}"


def town(rng: random.Random) -> str:
    return f"{rng.choice(_TOWN_STARTS)} {rng.choice(_TOWN_ENDS)}"


def date(rng: random.Random) -> str:
    # Days have two digits, so that no date is part of another.
    return f"{rng.choice(_MONTHS)} {rng.randrange(10, 29)}"


def price(rng: random.Random) -> str:
    return f"${rng.randrange(100, 1000)}.{rng.randrange(10, 100)}"


def room(rng: random.Random) -> str:
    return f"{rng.choice('ABCDEFGH')}{rng.randrange(100, 1000)}"


def _colour(rng: random.Random) -> str:
    return f"{rng.choice(_SHADES)} {rng.choice(_COLOURS)}"


def _prize(rng: random.Random) -> str:
    return f"{rng.choice(_MATERIALS)} {rng.choice(_PRIZES)}"


def _phone(rng: random.Random) -> str:
    return f"0{rng.randrange(100, 1000)}-{rng.randrange(100, 1000)}-{rng.randrange(1000, 10_000)}"


def _serial(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fact. `plain` is its shortest statement without a full stop.

    `plain` ends with the value: an answer may begin with what is before it.
    """

    plain: str
    value: Callable[[random.Random], str]
    keys: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


CODE = Kind(
    "The access code for the {key} is {value}",
    code,
    _lines(
        """boathouse
        attic
        wine cellar
        observatory
        east gate
        darkroom
        pump room
        map archive
        bell tower
        greenhouse
        print shop
        tool shed"""
    ),
    _lines(
        """The access code for the {key} is {value}.
        To get into the {key}, type {value} on the keypad.
        The lock of the {key} opens with the code {value}.
        You need the code {value} to open the {key}.
        The caretaker has set the code of the {key} to {value}.
        For the door of the {key}, the code to enter is {value}."""
    ),
    _lines(
        """Remind me: which code opens the {key}?
        What do I have to type to get into the {key}?
        Which code unlocks the door of the {key}?
        How do I open the {key}? Give me the code.
        I am standing at the locked {key}. What is the code?
        Could you look up the access code for the {key}?"""
    ),
)
COLOUR = Kind(
    "The colour of the {key} is {value}",
    _colour,
    _lines(
        """rowing boat
        garden gate
        delivery van
        front door
        kitchen ceiling
        ticket booth
        wooden fence
        letter box
        park bench
        water tank
        stage curtain
        lifeboat shed"""
    ),
    _lines(
        """The colour of the {key} is {value}.
        They have painted the {key} {value}.
        The {key} has been {value} since the last repair.
        For the {key} the committee chose the colour {value}.
        From far away one sees the {key}, which is {value}.
        The paint on the {key} is {value}."""
    ),
    _lines(
        """What colour is the {key}?
        In which colour was the {key} painted?
        Do you recall the colour of the {key}?
        I would like to match the paint of the {key}. Which colour is it?
        Which colour does the text give for the {key}?
        How would I recognise the {key} by its colour?"""
    ),
)
PERSON = Kind(
    "The person in charge of the {key} is {value}",
    person,
    _lines(
        """choir
        chess club
        night shift
        bakery stall
        spring festival
        repair workshop
        language course
        swimming lessons
        museum tour
        bus timetable
        rowing team
        school kitchen"""
    ),
    _lines(
        """The person in charge of the {key} is {value}.
        {value} is in charge of the {key}.
        Since May, {value} has been running the {key}.
        All letters about the {key} go to {value}.
        The {key} is looked after by {value}.
        If there is trouble with the {key}, call {value}."""
    ),
    _lines(
        """Who is in charge of the {key}?
        Which person runs the {key}?
        To whom should I write about the {key}?
        I have a question about the {key}. Who can help me?
        What is the name of the person who looks after the {key}?
        Please name the person responsible for the {key}."""
    ),
)
TOWN = Kind(
    "The town to which the {key} was moved is {value}",
    town,
    _lines(
        """clock factory
        puppet theatre
        radio station
        glass museum
        sailing school
        tax office
        coin collection
        printing press
        weather station
        horse market
        film archive
        sewing company"""
    ),
    _lines(
        """The town to which the {key} was moved is {value}.
        The {key} is now in the town of {value}.
        Last year the {key} moved to {value}.
        To visit the {key}, take the train to {value}.
        The new home of the {key} is {value}.
        You will find the {key} in {value}."""
    ),
    _lines(
        """In which town is the {key} now?
        Where was the {key} moved?
        To which town do I travel to see the {key}?
        What is the name of the town with the {key}?
        Where can the {key} be found?
        I want to visit the {key}. Which town is it in?"""
    ),
)
DATE = Kind(
    "The date of the {key} is {value}",
    date,
    _lines(
        """fire drill
        flower show
        harvest dinner
        boat race
        house inspection
        piano recital
        auction
        annual meeting
        lantern parade
        book fair
        chimney cleaning
        bicycle tour"""
    ),
    _lines(
        """The date of the {key} is {value}.
        The {key} will take place on {value}.
        Everyone has agreed to hold the {key} on {value}.
        Mark {value} in the calendar for the {key}.
        On {value} there will be the {key}.
        The {key} has been fixed for {value}."""
    ),
    _lines(
        """When is the {key}?
        On which date will the {key} take place?
        Which day should I keep free for the {key}?
        What date has been set for the {key}?
        I do not want to miss the {key}. When is it?
        Can you find the date of the {key}?"""
    ),
)
PRICE = Kind(
    "The price of the {key} is {value}",
    price,
    _lines(
        """oak desk
        brass lamp
        wool carpet
        garden swing
        marble sink
        used tractor
        accordion
        leather sofa
        sewing machine
        camping tent
        grandfather clock
        copper kettle"""
    ),
    _lines(
        """The price of the {key} is {value}.
        The {key} costs {value}.
        They are selling the {key} for {value}.
        You can have the {key} for {value}.
        The label on the {key} says {value}.
        According to the catalogue, the {key} is {value}."""
    ),
    _lines(
        """How much does the {key} cost?
        What is the price of the {key}?
        How much money do I need to buy the {key}?
        For how much is the {key} sold?
        What does the label on the {key} say?
        I am thinking of buying the {key}. What would I pay?"""
    ),
)
PRIZE = Kind(
    "The first prize of the {key} is a {value}",
    _prize,
    _lines(
        """raffle
        poetry contest
        sack race
        spelling test
        dance competition
        fishing contest
        quiz night
        pumpkin contest
        ski race
        sandcastle contest
        card tournament
        archery match"""
    ),
    _lines(
        """The first prize of the {key} is a {value}.
        The winner of the {key} gets a {value}.
        The person who wins the {key} takes home a {value}.
        A {value} will be given to the winner of the {key}.
        For the {key} the mayor has donated a {value} as first prize.
        A {value} is the first prize of the {key}."""
    ),
    _lines(
        """What is the first prize of the {key}?
        What does the winner of the {key} get?
        Which object can one win at the {key}?
        What was donated as the prize of the {key}?
        If I win the {key}, what will I take home?
        Name the first prize of the {key}."""
    ),
)
SERIAL = Kind(
    "The serial number of the {key} is {value}",
    _serial,
    _lines(
        """elevator
        ice machine
        main generator
        projector
        furnace
        water pump
        organ
        turbine"""
    ),
    _lines(
        """The serial number of the {key} is {value}.
        The plate on the {key} has the serial number {value}.
        The {key} is registered under the serial number {value}.
        When you order parts for the {key}, state the serial number {value}.
        The maker lists the {key} as serial number {value}.
        Serial number {value} belongs to the {key}."""
    ),
    _lines(
        """What is the serial number of the {key}?
        Under which serial number is the {key} registered?
        I want to order parts for the {key}. Which serial number do I state?
        Which number is on the plate of the {key}?
        Copy the serial number of the {key}.
        How does the maker list the {key}? Give the serial number."""
    ),
)
PHONE = Kind(
    "The phone number of the {key} is {value}",
    _phone,
    _lines(
        """ferry office
        village doctor
        piano tuner
        night pharmacy
        taxi stand
        beekeeper
        harbour master
        lost property office"""
    ),
    _lines(
        """The phone number of the {key} is {value}.
        Call {value} to reach the {key}.
        The {key} can be reached by phone at {value}.
        If you need the {key}, dial {value}.
        The card of the {key} gives the phone number {value}.
        Someone from the {key} answers the phone at {value}."""
    ),
    _lines(
        """What is the phone number of the {key}?
        Which number do I dial to reach the {key}?
        I have to call the {key}. What is the number?
        How can I reach the {key} by phone?
        Find the phone number of the {key}.
        Which phone number is on the card of the {key}?"""
    ),
)
CHANGES = _lines(
    """This has changed. {fact} now.
    There is an update. {fact} from now on.
    Forget what was said about this earlier. {fact} now.
    A later note corrects this. {fact} since the last meeting.
    After a revision in spring, this is different. {fact} today.
    Attention, there is a change. {fact} as of this week."""
)
LATEST = _lines(
    """{question} Give the latest value.
    {question} Note that it has changed once.
    After all changes: {question}
    {question} I need the current one, not the old one.
    As things are at the end of the text: {question}
    {question} Only the newest information counts."""
)
RECORDS = _lines(
    """Guest {person} has room {room}, arrives on {date}, and pays {price}.
    Booking for {person}: room {room}, arrival {date}, total {price}.
    {person} is expected on {date}, will stay in room {room}, and owes {price}.
    Room {room} is reserved for {person} from {date} at a price of {price}.
    We have given room {room} to {person}, who arrives on {date} and has paid {price}.
    The register says: {person}, arriving {date}, room {room}, bill {price}."""
)
EXTRACTIONS = _lines(
    """Write the {count} bookings in the text as JSON objects with person, room, date and price.
    Which {count} bookings are in the text? Give each as JSON with person, room, date and price.
    Extract all {count} bookings as a JSON list. The fields of each are person, room, date and price.
    List the {count} guests of the text in JSON, each with the keys person, room, date and price.
    Collect every booking, {count} in all: a JSON list of objects with person, room, date, price.
    Turn the {count} bookings that the text mentions into JSON: person, room, date and price of each."""
)
FIELDS = {
    "room": (
        room,
        "The room of {person} is",
        ("Which room does {person} have?", "Where does {person} stay?", "What is the room of {person}?"),
    ),
    "date": (
        date,
        "The date on which {person} arrives is",
        (
            "When does {person} arrive?",
            "On which date is {person} expected?",
            "What is the arrival date of {person}?",
        ),
    ),
    "price": (
        price,
        "The amount that {person} pays is",
        (
            "How much does {person} pay?",
            "What is the bill of {person}?",
            "Which amount does {person} owe?",
        ),
    ),
}
"""Fields of a record: how to draw one, the first words of an answer, and questions."""
