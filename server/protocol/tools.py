"""Tools in a request: the functions that a model may call, and whether it may, must or must not."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from server.errors import invalid_value
from server.protocol.fields import RequestBody, Text, few

FunctionName: TypeAlias = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(RequestBody):
    """Where calls are enforced, `parameters` are followed whether `strict` or not."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> Mapping[str, object]:
        """Return the tool as chat templates want it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionReference(RequestBody):
    name: FunctionName


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: FunctionReference


class ToolFields(RequestBody):
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1), BeforeValidator(few)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        for param in ("tool_choice", "parallel_tool_calls"):
            if self.tools is None and getattr(self, param) is not None:
                raise invalid_value(f"'{param}' is only allowed when 'tools' are given.", param)
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise invalid_value("Each of 'tools' must have a name of its own.", "tools")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise invalid_value(f"'tool_choice' names '{self.tool_choice.function.name}', which is not among 'tools'.", "tool_choice")
        return self

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return () if self.tool_choice == "none" else tuple(self.tools or ())

    @property
    def enforced_tools(self) -> tuple[Tool, ...]:
        """The tools of which the answer must call one."""
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return tuple(tool for tool in self.callable_tools if tool.function.name == name)
        return self.callable_tools if self.tool_choice == "required" else ()

    @property
    def is_one_call(self) -> bool:
        """Whether the answer may have one call at most: a named function is called once."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedToolChoice)
