"""What an answer's text is made of, once it has been read: content, reasoning, calls of tools."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Part: TypeAlias = Content | Reasoning | CallStart | CallArguments
