"""A graph's code as torch writes it, and the options with which torch compiles it.

Apart from `inductor`, which takes long to import.
"""

import math
from collections.abc import Callable

import torch

# Of torch's inductor, when a graph is compiled and when it is loaded.
OPTIONS = {
    # Operators are called from C++, so that other threads may run Python meanwhile.
    "cpp_wrapper": True,
    # Small element-wise loops stay on one core: another would need longer to wake up.
    "cpp.min_chunk_size": 1 << 16,
    # A process that only loads a graph would precompile the headers too, for ten seconds, before torch finds
    # that nothing is left to compile.
    "cpp_cache_precompile_headers": False,
    # Code is compiled only with the kernels, which need AVX2. So torch need not spend seconds to find
    # whether the compiler knows it.
    "cpp.vec_isa_ok": True,
}


def function_of(code: str) -> Callable[..., object]:
    """Return the function `forward(self, …)` that a graph's code defines.

    torch writes this code for exactly this use; the names in it are those that its own `GraphModule` defines.
    """
    scope: dict[str, object] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(code, scope)
    forward = scope["forward"]
    assert callable(forward), "a graph's code defines forward"
    return forward
