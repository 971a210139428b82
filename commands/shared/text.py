"""Text for error messages."""

_MAX_CHARACTERS = 300


def shortened(text: str) -> str:
    """Return the text on one line of at most 300 characters, with an ellipsis where it was cut."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"
