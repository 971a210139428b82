"""A pool of slots as it is written in one flag: `snapstream:slots=32,capacity=2048`.

Its keys are the options that describe the only pool where there is one, by their names or shorter ones, and `name`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from server.options.option import Option, OptionError

SHORT = {
    "slots": "num-slots",
    "capacity": "slot-capacity",
    "sink": "num-sink",
    "recent": "num-recent",
    "kept": "num-kept",
}


def read_pool(text: str, options: Sequence[Option]) -> tuple[str, dict[str, Any]]:
    """Return the pool's own name, empty if it has none, and the value of each of `options` by its key. Raises `OptionError`."""
    policy, _, rest = text.partition(":")
    given = {"policy": policy, **_pairs(text, rest)}
    name = given.pop("name", "")
    by_name = {option.name: option for option in options}
    values = {option.key: option.default for option in options}
    for key, value in given.items():
        option = by_name.get(SHORT.get(key, key))
        if option is None:
            known = [short for short in SHORT if SHORT[short] in by_name] + [
                name for name in by_name if name not in SHORT.values()
            ]
            raise OptionError(
                f"--pool {text}: there is no key {key!r}; the keys are name, {', '.join(known)}"
            )
        values[option.key] = option.read(value, f"{key} of --pool {text}")
    return name, values


def _pairs(text: str, rest: str) -> Mapping[str, str]:
    pairs = [item.partition("=") for item in rest.split(",") if item]
    for key, mark, value in pairs:
        if not mark or not value:
            raise OptionError(f"--pool {text}: {key!r} must have a value, as in slots=8")
        if [other for other, _, _ in pairs].count(key) > 1:
            raise OptionError(f"--pool {text}: {key!r} is given more than once")
    return {key: value for key, _, value in pairs}
