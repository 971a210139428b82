"""The error of an evaluation that cannot be finished."""


class EvalError(Exception):
    """A server, an engine or a model failed. The message says where and why."""
