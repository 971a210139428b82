"""What can go wrong while a model is loaded."""


class ModelLoadError(Exception):
    """A model cannot be loaded; the message says why."""


class UnsupportedModelError(ModelLoadError):
    """The model is of a kind that this backend would not run exactly."""
