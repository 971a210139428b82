"""Backends by name. Each is imported when it is asked for: the fake one runs where there is no torch."""

from backends.clock import Clock
from backends.interface import Backend
from backends.torch_backend.config import DEFAULT_MAX_MODEL_LEN, TorchBackendConfig

BACKEND_NAMES = ("torch", "fake")


def create_backend(
    name: str, config: TorchBackendConfig, clock: Clock, *, fake_vocab_size: int = 512
) -> Backend:
    """Return a backend with these sizes. The fake one has no model, device or dtype to choose, and its vocabulary is the caller's.

    Raises ValueError for an unknown name.
    """
    match name:
        case "torch":
            from backends.torch_backend.backend import TorchBackend

            return TorchBackend(config, clock)
        case "fake":
            from backends.fake import FakeBackend, fake_spec, slot_pool

            max_model_len = config.max_model_len or DEFAULT_MAX_MODEL_LEN
            pools = [
                slot_pool(pool.num_slots, pool.policy.resolve(max_model_len), max_model_len, pool.label)
                for pool in config.pools
            ]
            spec = fake_spec(
                max_model_len=max_model_len,
                pools=pools,
                num_scratch=config.num_scratch,
                vocab_size=fake_vocab_size,
            )
            return FakeBackend(spec, clock=clock)
    raise ValueError(f"there is no backend {name}; choose from {', '.join(BACKEND_NAMES)}")
