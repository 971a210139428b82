"""One turn of a conversation between its messages and the reading of its answer: the prompt, the form of the answer, and its parsers.

It knows no route: whoever asks says what it needs as a `TurnRequest`.
"""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from server.generation.choice_reader import ChoiceReader
from server.generation.dialogue import Dialogue
from server.grammar.structure import Preamble, Structure, StructureKind
from server.http.errors import invalid_value, unsupported_parameter
from server.options.settings import ServerSettings
from server.parsers.answer_reader import AnswerReader
from server.parsers.reasoning import ReasoningParser
from server.parsers.tool_calls import ToolCallParser
from server.parsers.tool_grammar import NO_PARAMETERS, ToolGrammar, literal
from server.protocol.generation import Effort
from server.protocol.tools import FunctionDefinition, ToolUse
from server.text.renderer import Renderer

_MAX_TAIL = 16  # tokens of a prompt in which to look for an opened tag


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What the model is to answer, and how. `messages` are as chat templates want them."""

    messages: Sequence[Mapping[str, Any]]
    tools: ToolUse
    structure: Structure | None
    effort: Effort | None = None
    effort_param: str = "reasoning_effort"  # what the parameter is called
    template_options: Mapping[str, object] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False


class Conversation:
    """`render` it first: how the prompt ends says whether the answer begins with reasoning."""

    def __init__(self, request: TurnRequest, renderer: Renderer, settings: ServerSettings) -> None:
        self._request, self._renderer = request, renderer
        self._dialogue = Dialogue.of(renderer.info.chat_template or "", settings)
        self._functions = request.tools.told
        self._is_open = False
        if self._functions and not request.tools.enforced and request.structure is not None:
            raise invalid_value(
                f"'{request.structure.param}' cannot be combined with tools that may be called or not.",
                "tools",
            )

    async def render(self) -> tuple[int, ...]:
        """Return the prompt. Raises `RenderError`, and `ApiError` for what the model's template knows nothing of."""
        request, dialogue = self._request, self._dialogue
        messages, tools = list(request.messages), [function.plain() for function in self._functions]
        if not dialogue.knows("tools"):
            messages, tools = dialogue.with_tools(messages, tools), []
        prompt = await self._renderer.render_chat(
            messages,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=request.continues_final_message,
            tools=tools,
            variables=self._variables(),
        )
        tail = self._renderer.vocabulary.decode(list(prompt[-_MAX_TAIL:])).rstrip()
        self._is_open = dialogue.reasoning is not None and tail.endswith(dialogue.reasoning.start)
        return prompt

    def reader(self) -> ChoiceReader:
        """Return the reader of one choice's answer."""
        tags, use = self._dialogue.reasoning, self._request.tools
        reasoning = ReasoningParser(tags, is_open=self._is_open) if tags is not None else None
        names = frozenset(function.name for function in self._functions)
        tools = ToolCallParser(self._dialogue.tool_format, names) if names else None
        return ChoiceReader(
            AnswerReader(
                reasoning, tools, max_calls=1 if use.is_one_call else None, only_calls=bool(use.enforced)
            ),
            self._renderer.vocabulary,
        )

    def new_call_id(self) -> str:
        if self._dialogue.tool_format.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that the parsers look for."""
        return frozenset(self._special_tokens.values())

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like; its reasoning is free."""
        structure = self._request.structure
        enforced = self._request.tools.enforced
        if enforced:
            structure = Structure(StructureKind.CALLS, self._grammar(enforced), "tools")
        elif any(function.strict for function in self._functions):
            structure = Structure(
                StructureKind.CALLS, self._grammar(self._functions, is_optional=True), "tools"
            )
        if structure is None or self._dialogue.reasoning is None:
            return structure
        return Structure(structure.kind, structure.value, structure.param, self._preamble())

    def _grammar(
        self, functions: tuple[FunctionDefinition, ...], *, is_optional: bool = False
    ) -> ToolGrammar:
        schemas = tuple((function.name, _parameters(function)) for function in functions)
        return ToolGrammar(
            self._dialogue.tool_format,
            schemas,
            not self._request.tools.is_one_call,
            is_optional,
            self._special_tokens,
        )

    def _preamble(self) -> Preamble:
        tags = self._dialogue.reasoning
        assert tags is not None
        return Preamble(
            literal(tags.start, self._special_tokens), literal(tags.end, self._special_tokens), self._is_open
        )

    @cached_property
    def _special_tokens(self) -> Mapping[str, int]:
        tags = self._dialogue.reasoning
        markers = (self._dialogue.tool_format.markers if self._functions else "") + (
            f"{tags.start}{tags.end}" if tags is not None else ""
        )
        special = self._renderer.vocabulary.special_token_ids
        return {
            text: number
            for text, number in self._renderer.info.added_tokens.items()
            if number in special and text in markers
        }

    def _variables(self) -> Mapping[str, object]:
        """Return what the template is told beside the messages. It must make something of it, but for no reasoning where there is none."""
        options, effort = self._request.template_options, self._request.effort
        own: dict[str, object] = {}
        if effort == "none" and self._dialogue.reasoning is not None:
            own = {"enable_thinking": False}
        elif effort not in (None, "none"):
            own = {"reasoning_effort": effort}
        asked = own | dict(options)
        unknown = [name for name in asked if not self._dialogue.knows(name)]
        for name in unknown:
            if asked.pop(name) is not False or self._dialogue.reasoning is not None:
                param = f"chat_template_kwargs.{name}" if name in options else self._request.effort_param
                raise unsupported_parameter(param, "is not supported by this model's chat template")
        return asked


def _parameters(function: FunctionDefinition) -> Mapping[str, object]:
    return NO_PARAMETERS if function.parameters is None else function.parameters
