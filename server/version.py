"""The version of this software."""

from importlib import metadata


def server_version() -> str:
    """Return the installed distribution's version; a source tree that was never installed has none."""
    try:
        return metadata.version("snapserve")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"
