"""Tools in a request: the functions that a model may call, and whether it may, must or must not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.http.errors import invalid_value
from server.protocol.fields import RequestBody, Text, few

# Of twice OpenAI's length: those that agents make of a server's and a tool's name are long.
FunctionName: TypeAlias = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class FunctionDefinition(RequestBody):
    """Where calls are enforced, `parameters` are followed whether `strict` or not."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Mapping[str, object]:
        """Return the function as chat templates want it."""
        members = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function = {name: value for name, value in members.items() if value is not None}
        return {"type": "function", "function": function}


class FunctionReference(RequestBody):
    name: FunctionName


def only_functions(kind: object) -> object:
    """Refuse what OpenAI runs itself, and calls whose arguments are no JSON, by name."""
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            "invalid_value",
            "tools of type {kind} are not supported by this server, only 'function'",
            {"kind": repr(kind[:64])},
        )
    return kind


FunctionType: TypeAlias = Annotated[Literal["function"], BeforeValidator(only_functions)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer must or must not call functions. `names` are the only allowed ones.

    `is_named` says that it must call the one of `names`, once.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools, whichever way its API writes it."""

    functions: tuple[FunctionDefinition, ...] = ()
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True

    def check(self) -> None:
        """Raises `ApiError`."""
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise invalid_value("Each of 'tools' must have a different name.", "tools")
        for name in self.choice.names or ():
            if name not in names:
                raise invalid_value(
                    f"'tool_choice' names '{name}', which is not among 'tools'.", "tool_choice"
                )

    @property
    def offered(self) -> tuple[FunctionDefinition, ...]:
        """The functions that the prompt lists: those that may be called, or all where one is named."""
        if self.choice.mode == "none":
            return ()
        return self.functions if self.choice.is_named else self._chosen

    @property
    def enforced(self) -> tuple[FunctionDefinition, ...]:
        """The functions of which the answer must call one."""
        return self._chosen if self.choice.mode == "required" else ()

    @property
    def is_one_call(self) -> bool:
        """Whether the answer may have one call at most: a named function is called once."""
        return not self.is_parallel or self.choice.is_named

    @property
    def _chosen(self) -> tuple[FunctionDefinition, ...]:
        names = self.choice.names
        return (
            self.functions
            if names is None
            else tuple(function for function in self.functions if function.name in names)
        )


class Tool(RequestBody):
    type: FunctionType = "function"
    function: FunctionDefinition


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: FunctionReference

    def plain(self) -> ToolChoice:
        return ToolChoice("required", (self.function.name,), is_named=True)


class AllowedFunction(RequestBody):
    type: FunctionType
    function: FunctionReference


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(fail_fast=True, min_length=1), BeforeValidator(few)]


class AllowedToolsChoice(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def plain(self) -> ToolChoice:
        return ToolChoice(
            self.allowed_tools.mode, tuple(tool.function.name for tool in self.allowed_tools.tools)
        )


ChosenTools: TypeAlias = Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]


class ToolFields(RequestBody):
    tools: Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(few)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise invalid_value("'tool_choice' requires a call, but there are no 'tools'.", "tool_choice")
        self.tool_use.check()
        return self

    @property
    def tool_use(self) -> ToolUse:
        given = self.tool_choice
        choice = ToolChoice(given or "auto") if given is None or isinstance(given, str) else given.plain()
        return ToolUse(
            tuple(tool.function for tool in self.tools or ()), choice, self.parallel_tool_calls is not False
        )
