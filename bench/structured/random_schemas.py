"""Random JSON schemas over a fixed set of keywords, for tests of a server's structured output."""

from random import Random
from typing import Any

KEYWORDS = (
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "properties", "required", "additionalProperties", "patternProperties", "maxProperties",
    "items", "prefixItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{2,8}$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)$",
    "^[A-Z][a-z]{1,9}",
    "^.{0,6}$",
    '^[^"]{0,9}end$',
)
FORMATS = ("uuid", "ipv4", "email", "date", "date-time")
WORDS = ("id", "name", "colour", "the size", "naïve", "emoji🙂", 'qu"ote', "back\\slash", "line\nbreak", "x")

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """Return the schema of a seed. Most are objects, like those of clients."""
    random = Random(seed)
    schema = _object(random, 0) if random.random() < 0.7 else _schema(random, 0)
    return schema | {"$defs": {"leaf": _scalar(random), "node": _node(random)}}


def _schema(random: Random, depth: int) -> Schema:
    if depth == 3 or random.random() < 0.5:
        return random.choice([_scalar, _scalar, _scalar, _fixed])(random)
    return random.choice([_object, _object, _array, _combined])(random, depth)


def _scalar(random: Random) -> Schema:
    return random.choice([_string, _string, _integer, _number, _plain])(random)


def _plain(random: Random) -> Schema:
    return {"type": random.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


def _string(random: Random) -> Schema:
    match random.randrange(20):
        case 0:
            return {"type": "string"}
        case 1 | 2 | 3 | 4 | 5:
            return {"type": "string", "pattern": random.choice(PATTERNS)}
        case 6 | 7 | 8 | 9:
            return {"type": "string", "format": random.choice(FORMATS)}
    shortest = random.randrange(5)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + random.randrange(12)}


def _integer(random: Random) -> Schema:
    match random.randrange(6):
        case 0:
            return {"type": "integer"}
        case 1:
            return {"type": "integer", "multipleOf": random.choice([2, 5, 7, 12])}
    lowest = random.randrange(-1000, 1000)
    return {"type": "integer", "minimum": lowest, "maximum": lowest + random.randrange(5000)}


def _number(random: Random) -> Schema:
    if random.random() < 0.2:
        return {"type": "number"}
    lowest = round(random.uniform(-10, 10), 2)
    return {
        "type": "number",
        "exclusiveMinimum": lowest,
        "exclusiveMaximum": round(lowest + random.uniform(0.5, 50), 2),
    }


def _fixed(random: Random) -> Schema:
    values = [
        random.choice([*WORDS, 3, -1.5, True, None, [1, "a"], {"k": 1}])
        for _ in range(random.randrange(1, 5))
    ]
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _object(random: Random, depth: int) -> Schema:
    if random.random() < 0.08:
        return {
            "type": "object",
            "additionalProperties": _schema(random, depth + 1),
            "maxProperties": random.randrange(1, 4),
        }
    names = random.sample(WORDS, random.randrange(1, 5))
    schema: Schema = {"type": "object", "properties": {name: _schema(random, depth + 1) for name in names}}
    schema["required"] = [name for name in names if random.random() < 0.7]
    schema["additionalProperties"] = False
    if random.random() < 0.15:
        schema["patternProperties"] = {"^_[a-z]$": _scalar(random)}
    return schema


def _array(random: Random, depth: int) -> Schema:
    if random.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [_schema(random, depth + 1) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    fewest = random.randrange(3)
    return {
        "type": "array",
        "items": _schema(random, depth + 1),
        "minItems": fewest,
        "maxItems": fewest + random.randrange(4),
    }


def _combined(random: Random, depth: int) -> Schema:
    match random.randrange(4):
        case 0:
            return {"anyOf": [_schema(random, depth + 1) for _ in range(2)]}
        case 1:
            return {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}
        case 2:
            return {
                "allOf": [
                    {"type": "object", "properties": {name: _scalar(random)}, "required": [name]}
                    for name in ("a", "b")
                ]
            }
    return {"$ref": random.choice(["#/$defs/leaf", "#/$defs/node"])}


def _node(random: Random) -> Schema:
    """Return a recursive schema."""
    properties: Schema = {
        "value": _scalar(random),
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["value", "next"],
        "additionalProperties": False,
    }
