"""The file that lists API keys.

It has one key a line, with optional limits: `sk-abc requests=60 tokens=100000`.
"""

from pathlib import Path

from server.options.command_line import OptionError
from server.options.settings import RateLimit


def read_key_file(path: str, default: RateLimit) -> dict[str, RateLimit]:
    """Return each key's limits. `default` has the limits that a line leaves out.

    A file without a key is an error: a server without keys accepts every client. Raises `OptionError`, which
    names the line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {path} cannot be read: {error}") from error
    keys: dict[str, RateLimit] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            keys[words[0]] = _limit(words[1:], default, f"--api-key-file {path}, line {number}")
    if not keys:
        raise OptionError(f"--api-key-file {path} has no key")
    return keys


def _limit(words: list[str], default: RateLimit, where: str) -> RateLimit:
    limits = {"requests": default.requests, "tokens": default.tokens}
    for word in words:
        name, _, value = word.partition("=")
        if name not in limits:
            # The word may be part of a key, so the message does not quote it.
            raise OptionError(
                f"{where}: after a key, only requests=N and tokens=N are allowed, separated by spaces"
            )
        if not value.isdecimal() or int(value) < 1:
            raise OptionError(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
        limits[name] = int(value)
    return RateLimit(**limits)
