"""What keeps an evaluation from ending."""


class EvalError(Exception):
    """The message says what went wrong and where."""
