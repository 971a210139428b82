"""Reads options from the command line and the environment, and describes them.

A flag overrides its variable, and a variable overrides the default. An invalid value raises `OptionError`,
which names the flag, or the variable if the value is from there. This module knows no option by name.
"""

import argparse
import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from backends.options import OptionGroup, Shown

_BOOLEANS = ("1", "true", "yes", "on", "0", "false", "no", "off")
_WHOLE_NUMBER = re.compile(r"\s*[+-]?\d+\s*")


class OptionError(ValueError):
    """An option has an invalid value. The message is for the user who set it."""


class OptionSet(Protocol):
    """A dataclass whose fields are option groups: all options of one command."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Group = TypeVar("Group", bound=OptionGroup)
Options = TypeVar("Options", bound=OptionSet)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of an option group, as a flag and an environment variable."""

    key: str
    field: FieldInfo
    prefix: str

    @property
    def name(self) -> str:
        own: str | None = self._shown("flag")
        return own or self.key.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return self.prefix + self.name.replace("-", "_").upper()

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def text(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def is_switch(self) -> bool:
        return self._type is bool

    @property
    def is_list(self) -> bool:
        return any(get_origin(hint) is tuple for hint in _types(self.field.annotation))

    @property
    def is_joined(self) -> bool:
        """Whether a list is one value of the flag, with commas between its items."""
        return bool(self._shown("is_joined"))

    @property
    def is_secret(self) -> bool:
        return bool(self._shown("is_secret"))

    @property
    def metavar(self) -> str:
        own: str | None = self._shown("metavar")
        return own if own is not None else "|".join(self._choices)

    @property
    def default_text(self) -> str:
        own: str | None = self._shown("default")
        if own is not None:
            return own
        default = self.field.default
        if self.is_switch:
            return "yes" if default else "no"
        return "none" if default in (None, ()) else str(default)

    @property
    def expected(self) -> str:
        """What a value must be: completes "--flag must be …"."""
        own: str | None = self._shown("expected")
        if own is not None:
            return own
        if self.is_switch:
            return f"one of {', '.join(_BOOLEANS)}"
        if self._choices:
            return f"one of {', '.join(self._choices)}"
        limits = {name: limit for item in self._metadata for name, limit in _limits(item)}
        if "le" in limits:
            return f"a whole number from {limits['ge']} to {limits['le']}"
        return f"a whole number of at least {limits['ge']}"

    def accepts(self, text: str) -> bool:
        """Return whether the text of one value has the form that `expected` names.

        pydantic alone would accept "8.0" and "1_0" as whole numbers, and "y" for a switch.
        """
        if self.is_switch:
            return text.strip().lower() in _BOOLEANS
        return self._type is not int or _WHOLE_NUMBER.fullmatch(text) is not None

    def add_to(self, group: argparse._ArgumentGroup, *, is_hidden: bool) -> None:
        text = f"{self.text} (default: {self.default_text}; {self.variable})".replace("%", "%%")
        if is_hidden:
            text = argparse.SUPPRESS
        alone = self._shown("alone")
        if self.is_switch:
            group.add_argument(
                self.flag, dest=self.dest, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        elif self.is_list and not self.is_joined:
            group.add_argument(
                self.flag, dest=self.dest, action="extend", nargs="+", metavar=self.metavar, help=text
            )
        elif alone is not None:
            group.add_argument(
                self.flag, dest=self.dest, nargs="?", const=alone, metavar=self.metavar, help=text
            )
        else:
            group.add_argument(self.flag, dest=self.dest, metavar=self.metavar, help=text)

    def value(self, arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Any, str]:
        """Return the value and its flag or variable. The value is None where neither sets one."""
        value = getattr(arguments, self.dest)
        source = self.flag
        if value is None:
            value = environment.get(self.variable)
            source = self.variable
        if self.is_list and isinstance(value, str):
            separator = self._shown("separator") or ","
            value = (
                value.split() if separator.isspace() else [item.strip() for item in value.split(separator)]
            )
        return value, source

    @property
    def _metadata(self) -> list[Any]:
        """The items of `Annotated`, the outermost first."""
        return [*reversed(self.field.metadata), *_metadata(self.field.annotation)]

    def _shown(self, name: str) -> Any:
        values = [getattr(item, name) for item in self._metadata if isinstance(item, Shown)]
        return next((value for value in values if value is not None), None)

    @property
    def _type(self) -> Any:
        """The type of one value: not None and not a list."""
        for hint in _types(self.field.annotation):
            if hint not in (NoneType, Ellipsis) and get_origin(hint) is None:
                return hint
        return str

    @property
    def _choices(self) -> tuple[str, ...]:
        kind = self._type
        return tuple(kind) if isinstance(kind, type) and issubclass(kind, enum.StrEnum) else ()


def options_of(group: type[OptionGroup]) -> list[Option]:
    return [Option(key, field, group.prefix) for key, field in group.model_fields.items()]


def groups_of(options: type[OptionSet]) -> list[type[OptionGroup]]:
    return [hint for hint in get_type_hints(options).values() if isinstance(hint, type)]


def add_options(parser: argparse.ArgumentParser, groups: Iterable[type[OptionGroup]]) -> None:
    for group in filter(options_of, groups):
        arguments = parser.add_argument_group(group.title)
        for option in options_of(group):
            option.add_to(arguments, is_hidden=group.is_hidden)


def read_group(group: type[Group], arguments: argparse.Namespace, environment: Mapping[str, str]) -> Group:
    """Return the values of a group's options. Raises `OptionError`."""
    values = {}
    sources = {}
    for option in options_of(group):
        value, source = option.value(arguments, environment)
        if value is not None:
            values[option.key] = value
            sources[option.key] = source
    return validated(group, values, sources)


def read_options(
    options: type[Options], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Options:
    """Return the values of a command's options. Raises `OptionError`."""
    hints = get_type_hints(options)
    groups = {field.name: read_group(hints[field.name], arguments, environment) for field in fields(options)}
    return options(**groups)


def validated(group: type[Group], values: Mapping[str, Any], sources: Mapping[str, str]) -> Group:
    """Return a group of these values. Raises `OptionError`, which names the value's entry in `sources`."""
    for key, value in values.items():
        option = Option(key, group.model_fields[key], group.prefix)
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, str) and not option.accepts(item):
                raise OptionError(f"{sources[key]} must be {option.expected}, got {item!r}")
    try:
        return group.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else None
        if not first["loc"]:
            raise OptionError(reason) from error
        key = str(first["loc"][0])
        option = Option(key, group.model_fields[key], group.prefix)
        message = f"{sources[key]} must be {reason or option.expected}"
        if option.is_secret:
            raise OptionError(message) from None
        raise OptionError(f"{message}, got {first['input']!r}") from error


def _types(hint: Any) -> Iterator[Any]:
    """Yield a type and the types that it is made of."""
    if get_origin(hint) is Annotated:
        yield from _types(get_args(hint)[0])
        return
    yield hint
    for argument in get_args(hint):
        yield from _types(argument)


def _metadata(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        yield from reversed(metadata)
        yield from _metadata(inner)
        return
    for argument in get_args(hint):
        yield from _metadata(argument)


def _limits(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the limits that one item of `Annotated` sets."""
    for limit in item.metadata if isinstance(item, FieldInfo) else (item,):
        for name in ("ge", "le"):
            if hasattr(limit, name):
                yield name, getattr(limit, name)
