"""How options are declared: as the fields of pydantic models.

The flag, the environment variable, the help text and the reference table of an option all come from its
field. This module declares. `server.options.command_line` reads.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class OptionGroup(BaseModel):
    """Options under one heading of the help.

    A field `max_files` has the flag `--max-files` and the variable `<prefix>MAX_FILES`. The docstring below
    the field is its help text. The field's type holds the limits of its value.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
    )

    title: ClassVar[str] = "Options"
    prefix: ClassVar[str] = "SNAPSERVE_"
    is_hidden: ClassVar[bool] = False  # not in the help and not in tables


@dataclass(frozen=True, slots=True)
class Shown:
    """How an option differs from what its field's name, type and default say. It is part of the type.

    `expected` completes "--flag must be …". `flag` is the flag's name without dashes. With `alone`, the flag
    can also have no value, which means this one. `separator` splits the variable of a list. The values of a
    list follow its flag, or are joined by commas with `is_joined`. Errors do not print values that are
    secret.
    """

    metavar: str | None = None
    default: str | None = None
    expected: str | None = None
    flag: str | None = None
    alone: str | None = None
    separator: str | None = None
    is_joined: bool | None = None
    is_secret: bool | None = None


def _text(value: str) -> str:
    if not value:
        raise ValueError("not empty")
    return value


def _folder(value: Path) -> Path:
    if value == Path():
        raise ValueError("not empty")
    return Path(os.path.expanduser(value))  # unlike Path, keeps the name of an unknown user


Text = Annotated[str, AfterValidator(_text), Shown("TEXT")]
Folder = Annotated[Path, AfterValidator(_folder), Shown("FOLDER")]
Count = Annotated[int, Field(ge=1), Shown("N")]
CountOrZero = Annotated[int, Field(ge=0), Shown("N")]
Tokens = Annotated[int, Field(ge=1), Shown("TOKENS")]
Bytes = Annotated[int, Field(ge=1), Shown("BYTES")]
Seconds = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False),
    Shown("SECONDS", expected="a number of seconds of at least 0"),
]
PositiveSeconds = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    Shown("SECONDS", expected="a number of seconds above 0"),
]
