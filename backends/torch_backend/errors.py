"""What can go wrong while this backend loads a model."""

from backends.errors import ModelLoadError

__all__ = ["ModelLoadError", "UnsupportedModelError"]


class UnsupportedModelError(ModelLoadError):
    """The model is of a kind that this backend would not run exactly."""
