"""Memory that is freed while a model is loaded goes back to the operating system at once.

Loading allocates and frees much: stored weights, then dequantised ones, then packed ones. glibc keeps freed
blocks of up to 32 MB for the thread that allocated them, and other threads do not get them.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD = -3  # mallopt's parameter: blocks from this size on are mapped, and unmapped when freed
_WHILE_LOADING = 1 << 19
_AFTERWARDS = 1 << 25  # where glibc's own threshold ends after some large blocks were freed


@contextmanager
def returning_memory() -> Iterator[None]:
    """Return freed blocks to the operating system while a model is loaded. Only glibc is known to need it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _AFTERWARDS)
