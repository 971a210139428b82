"""One chat request between its messages and the reading of its answer: the prompt, the form of the answer, and its parsers."""

import secrets
import string
from collections.abc import Mapping
from functools import cached_property

from server.dialogue import Dialogue
from server.errors import invalid_value, unsupported_parameter
from server.parsers.answer_reader import AnswerReader
from server.parsers.reasoning import ReasoningParser
from server.parsers.tool_calls import ToolCallParser
from server.parsers.tool_grammar import NO_PARAMETERS, ToolGrammar, literal
from server.protocol.chat import ChatCompletionRequest
from server.protocol.tools import NamedToolChoice, Tool
from server.renderer import Renderer
from server.settings import ServerSettings
from server.structure import Preamble, Structure, StructureKind

_MAX_TAIL = 16  # tokens of a prompt in which to look for an opened tag


class Conversation:
    """`render` it first: how the prompt ends says whether the answer begins with reasoning."""

    def __init__(self, request: ChatCompletionRequest, renderer: Renderer, settings: ServerSettings) -> None:
        self._request, self._renderer = request, renderer
        self._dialogue = Dialogue.of(renderer.info.chat_template or "", settings)
        self._tools = request.callable_tools
        self._is_open = False
        if self._tools and not request.enforced_tools and request.structure is not None:
            raise invalid_value(f"'{request.structure.param}' cannot be combined with tools that may be called or not.", "tools")

    async def render(self) -> tuple[int, ...]:
        """Return the prompt. Raises `RenderError`, and `ApiError` for what the model's template knows nothing of."""
        request, dialogue = self._request, self._dialogue
        messages = [message.plain() for message in request.messages]
        tools = [tool.plain() for tool in self._tools]
        if not dialogue.knows("tools"):
            messages, tools = dialogue.with_tools(messages, tools), []
        prompt = await self._renderer.render_chat(
            messages,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=tools,
            variables=self._variables(),
        )
        tail = self._renderer.vocabulary.decode(list(prompt[-_MAX_TAIL:])).rstrip()
        self._is_open = dialogue.reasoning is not None and tail.endswith(dialogue.reasoning.start)
        return prompt

    def reader(self) -> AnswerReader:
        """Return the reader of one choice's answer."""
        tags, request = self._dialogue.reasoning, self._request
        reasoning = ReasoningParser(tags, is_open=self._is_open) if tags is not None else None
        names = frozenset(tool.function.name for tool in self._tools)
        tools = ToolCallParser(self._dialogue.tool_format, names) if self._tools else None
        return AnswerReader(reasoning, tools, max_calls=1 if request.is_one_call else None)

    def new_call_id(self) -> str:
        if self._dialogue.tool_format.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """Return why a choice ended, as OpenAI tells it: a named call's end is a stop."""
        is_named = isinstance(self._request.tool_choice, NamedToolChoice)
        return "tool_calls" if reason == "stop" and num_calls and not is_named else reason

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """Special tokens that the parsers look for."""
        return frozenset(self._special_tokens.values())

    @property
    def structure(self) -> Structure | None:
        """What the answer must look like; its reasoning is free."""
        structure = self._request.structure
        enforced = self._request.enforced_tools
        if enforced:
            structure = Structure(StructureKind.CALLS, self._grammar(enforced), "tools")
        elif any(tool.function.strict for tool in self._tools):
            structure = Structure(StructureKind.CALLS, self._grammar(self._tools, is_optional=True), "tools")
        if structure is None or self._dialogue.reasoning is None:
            return structure
        return Structure(structure.kind, structure.value, structure.param, self._preamble())

    def _grammar(self, tools: tuple[Tool, ...], *, is_optional: bool = False) -> ToolGrammar:
        functions = tuple((tool.function.name, _parameters(tool)) for tool in tools)
        return ToolGrammar(self._dialogue.tool_format, functions, not self._request.is_one_call, is_optional, self._special_tokens)

    def _preamble(self) -> Preamble:
        tags = self._dialogue.reasoning
        assert tags is not None
        return Preamble(literal(tags.start, self._special_tokens), literal(tags.end, self._special_tokens), self._is_open)

    @cached_property
    def _special_tokens(self) -> Mapping[str, int]:
        tags = self._dialogue.reasoning
        markers = (self._dialogue.tool_format.markers if self._tools else "") + (f"{tags.start}{tags.end}" if tags is not None else "")
        special = self._renderer.vocabulary.special_token_ids
        return {text: number for text, number in self._renderer.info.added_tokens.items() if number in special and text in markers}

    def _variables(self) -> Mapping[str, object]:
        """Return what the template is told beside the messages; it must make something of it."""
        variables = dict(self._request.template_variables)
        if self._request.reasoning_effort == "none" and self._dialogue.reasoning is None:
            variables.pop("enable_thinking", None)
        for name in variables:
            if not self._dialogue.knows(name):
                is_option = self._request.chat_template_kwargs is not None and name in self._request.chat_template_kwargs.model_fields_set
                param = f"chat_template_kwargs.{name}" if is_option else "reasoning_effort"
                raise unsupported_parameter(param, "is not supported by this model's chat template")
        return variables


def _parameters(tool: Tool) -> Mapping[str, object]:
    return NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
