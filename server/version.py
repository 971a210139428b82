"""The version of this software."""

from importlib import metadata


def server_version() -> str:
    """Return the installed distribution's version, or "0+uninstalled" for a source tree without one."""
    try:
        return metadata.version("snapserve")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"
