"""Every private interface of torch that this backend uses; no module outside this folder touches one.

torch moves such interfaces between minor versions. A backend runs without those that are missing: linear
layers are torch's own and decode is not compiled, which is slower and gives the same tokens.
"""

import logging

import torch

from backends.torch_backend.torch_private import onednn

logger = logging.getLogger(__name__)


def lacks_interfaces(*, for_compiling: bool) -> bool:
    """Return whether `missing_interfaces` finds any, after a warning that names them."""
    missing = missing_interfaces(for_compiling=for_compiling)
    if missing:
        logger.warning(
            "torch %s lacks private interfaces that the backend uses: %s. The backend runs without them, "
            "and slower: linear layers may be torch's own, and decode is not compiled.",
            torch.__version__,
            "; ".join(missing),
        )
    return bool(missing)


def missing_interfaces(*, for_compiling: bool) -> list[str]:
    """Return the missing interfaces that linear layers need, and compiled decode with `for_compiling`.

    The check for compiled decode imports torch's tracer and compiler, which takes about a second.
    """
    missing = onednn.missing_operators()
    if for_compiling:
        try:
            from backends.torch_backend.torch_private import inductor  # noqa: F401
        except (ImportError, AttributeError) as error:
            missing.append(str(error))
    return missing
