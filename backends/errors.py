"""What can go wrong while a model is loaded by any backend."""


class ModelLoadError(Exception):
    """A model cannot be loaded; the message says why."""
