"""Options that may be given as a flag or as an environment variable: how they are declared, read and described.

A flag stands before its variable, and that before the default. Whatever is wrong is an `OptionError` that names the flag, or the variable
if the value came from there. It knows no particular option.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PREFIX = "SNAPSERVE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class OptionError(ValueError):
    """A value that cannot be; the message is fit for the one who typed it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `parse` raises ValueError with what it would have liked ("at least 1"). `shown_default` is for people."""

    name: str  # as in the flag, without its dashes
    parse: Callable[[str], Any]
    default: Any
    text: str
    metavar: str
    shown_default: str | None = None
    is_list: bool = False  # several values, in the variable separated by `separator`
    separator: str | None = ","  # None: white space

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.parse is switch

    @property
    def default_text(self) -> str:
        if self.shown_default is not None:
            return self.shown_default
        if self.is_switch:
            return "yes" if self.default else "no"
        return str(self.default)

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        text = f"{self.text} (default: {self.default_text}; {self.variable})".replace("%", "%%")
        if self.is_switch:
            group.add_argument(
                self.flag, dest=self.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        elif self.is_list:
            group.add_argument(
                self.flag, dest=self.key, action="extend", nargs="+", metavar=self.metavar, help=text
            )
        else:
            group.add_argument(self.flag, dest=self.key, metavar=self.metavar, help=text)

    def resolve(self, given: bool | str | list[str] | None, environment: Mapping[str, str]) -> Any:
        """Return the value from the flag, the variable or the default. Raises `OptionError`."""
        if isinstance(given, bool):
            return given
        if isinstance(given, list):
            return tuple(self.read(item, self.flag) for item in given)
        if given is not None:
            return self.read(given, self.flag)
        variable = environment.get(self.variable)
        if variable is None:
            return self.default
        if self.is_list:
            return tuple(self.read(item.strip(), self.variable) for item in variable.split(self.separator))
        return self.read(variable, self.variable)

    def read(self, value: str, source: str) -> Any:
        """Return the value of what was typed at `source`. Raises `OptionError`."""
        try:
            return self.parse(value)
        except ValueError as error:
            raise OptionError(f"{source} must be {error}, got {value!r}") from error


@dataclass(frozen=True, slots=True)
class OptionGroup:
    title: str
    options: tuple[Option, ...]


def add_options(parser: argparse.ArgumentParser, groups: Iterable[OptionGroup]) -> None:
    for group in groups:
        arguments = parser.add_argument_group(group.title)
        for option in group.options:
            option.add_to(arguments)


def resolve_options(
    groups: Iterable[OptionGroup], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return each option's value by its key. Raises `OptionError`."""
    options = [option for group in groups for option in group.options]
    return {option.key: option.resolve(getattr(arguments, option.key), environment) for option in options}


def options_table(groups: Iterable[OptionGroup]) -> str:
    """Return the options as Markdown tables."""
    lines: list[str] = []
    for group in groups:
        lines += [f"### {group.title}", "", "| flag | variable | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| {_flag_text(option)} | `{option.variable}` | {option.default_text} | {option.text} |"
            for option in group.options
        ]
        lines.append("")
    return "\n".join(lines)


def _flag_text(option: Option) -> str:
    if option.is_switch:
        return f"`{option.flag}`, `--no-{option.name}`"
    metavar = option.metavar.replace("|", "\\|")
    return f"`{option.flag} {metavar}{' …' if option.is_list else ''}`"


def text(value: str) -> str:
    if not value:
        raise ValueError("not empty")
    return value


def origin(value: str) -> str:
    if re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", value) is None:
        raise ValueError("an origin, as https://example.com, or * for all")
    return value


def switch(value: str) -> bool:
    if value.lower() not in _TRUE + _FALSE:
        raise ValueError(f"one of {', '.join(_TRUE + _FALSE)}")
    return value.lower() in _TRUE


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(value: str) -> int:
        limits = (
            f"a whole number of at least {least}"
            if most is None
            else f"a whole number from {least} to {most}"
        )
        if not value.strip().removeprefix("-").isdecimal():
            raise ValueError(limits)
        number = int(value)
        if number < least or (most is not None and number > most):
            raise ValueError(limits)
        return number

    return parse


def seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError("a number of seconds of at least 0")
    return number


def some_seconds(value: str) -> float:
    """Parse a time that cannot be none at all."""
    number = seconds(value)
    if number == 0:
        raise ValueError("a number of seconds above 0")
    return number


def one_of(kind: type[StrEnum]) -> Callable[[str], StrEnum]:
    def parse(value: str) -> StrEnum:
        if value not in list(kind):
            raise ValueError(f"one of {', '.join(kind)}")
        return kind(value)

    return parse


def choices(kind: type[StrEnum]) -> str:
    """Return an enumeration's values as a metavar."""
    return "|".join(kind)
