"""One turn of a conversation: its prompt, the form of its answer, and the parsers that read the answer.

Chats and responses share it, and it knows no route. `render_turn` returns the answer's parsers too, because
the end of the prompt decides whether the answer begins inside reasoning.
"""

import dataclasses
import functools
import itertools
import json
import re
import secrets
import string
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.generation.choice_reader import ChoiceReader
from server.generation.task import Source
from server.grammar.structure import Preamble, Structure, StructureKind
from server.grammar.thinking import Thinking
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.options.settings import ReasoningParserName, ServerSettings, ToolParserName
from server.parsers.answer_reader import AnswerReader
from server.parsers.harmony import MARKERS, HarmonyParser
from server.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser
from server.parsers.tool_calls import ToolCallParser
from server.parsers.tool_format import TOOL_FORMATS, ToolFormat, tool_format_of
from server.parsers.tool_grammar import NO_PARAMETERS, ToolGrammar, literal
from server.protocol.generation import Effort, Verbosity
from server.protocol.tools import FunctionDefinition, ToolUse
from server.text.question import Question
from server.text.renderer import Renderer
from server.text.shortening import Passage

_REASONING_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates
_HARMONY = TOOL_FORMATS["harmony"]
_HARMONY_TAGS = REASONING_FORMATS["harmony"]
_CUTTABLE_ROLES = ("user", "assistant", "tool")  # of messages that a draft may shorten
_MAX_TAIL = 16  # tokens at a prompt's end in which an opening reasoning tag is looked for


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What the model is to answer, and how. `messages` have the form that chat templates take."""

    messages: Sequence[Mapping[str, Any]]
    tools: ToolUse
    structure: Structure | None
    effort: Effort | None = None
    effort_param: str = "reasoning_effort"  # the parameter's name in the request
    wants_thinking: bool | None = None  # counts without an effort; None: the template decides
    thinking_param: str = "thinking"
    verbosity: Verbosity | None = None
    verbosity_param: str = "verbosity"
    template_options: Mapping[str, object] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes tool calls and reasoning, and which variables its chat template uses."""

    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    chat_template: str

    @classmethod
    def of(cls, chat_template: str, settings: ServerSettings) -> "ChatFormat":
        """Return the formats that the settings name, or those that the template shows.

        Without any sign in the template, calls are written as Hermes'. gpt-oss's format is one of both.
        """
        tools = settings.api.tool_call_parser
        reasoning = settings.api.reasoning_parser
        tool_format = (
            tool_format_of(chat_template) or TOOL_FORMATS["hermes"]
            if tools is ToolParserName.AUTO
            else TOOL_FORMATS[tools]
        )
        tags = (
            _reasoning_of(chat_template)
            if reasoning is ReasoningParserName.AUTO
            else REASONING_FORMATS.get(reasoning)
        )
        if tool_format is _HARMONY or (tags is _HARMONY_TAGS and reasoning is ReasoningParserName.HARMONY):
            tool_format, tags = _HARMONY, _HARMONY_TAGS
        return cls(tool_format, tags, chat_template)

    @property
    def is_harmony(self) -> bool:
        return self.tool_format is _HARMONY

    def uses(self, variable: str) -> bool:
        """Return whether the template mentions a variable."""
        return variable in _words(self.chat_template)

    def thinking_options(self, wants_thinking: bool | None) -> dict[str, object]:
        """Return the template's variables that switch reasoning on or off; None leaves it to the template."""
        if wants_thinking is None:
            return {}
        return {name: wants_thinking for name in _REASONING_SWITCHES if self.uses(name)}

    def with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, object]]
    ) -> list[Mapping[str, Any]]:
        """Return a conversation for a template that has no tools: a system message lists them."""
        turns = [self._as_text(message) for message in messages]
        if not tools:
            return turns
        listing = "\n".join(
            [
                "You may call these functions. Each is given as JSON, with the schema of its arguments:",
                *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
                f"To call one, write: {self.tool_format.example()}",
            ]
        )
        if turns and turns[0]["role"] in ("system", "developer") and isinstance(turns[0]["content"], str):
            return [{**turns[0], "content": f"{turns[0]['content']}\n\n{listing}"}, *turns[1:]]
        return [{"role": "system", "content": listing}, *turns]

    def _as_text(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its tool calls, or a tool's result, as plain text."""
        if message["role"] == "tool":
            return {"role": "user", "content": message["content"]}
        calls = [
            (call["function"]["name"], _json(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        if not calls:
            return message
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        written = self.tool_format.write(calls)
        return {"role": "assistant", "content": f"{content}\n{written}" if content else written}


def template_warnings(chat_template: str | None, settings: ServerSettings) -> list[str]:
    """Return what an operator should know about a model's chat template."""
    if chat_template is None:
        return ["The model has no chat template, so chats are refused. --chat-template FILE sets one."]
    is_unknown = (
        settings.api.tool_call_parser is ToolParserName.AUTO and tool_format_of(chat_template) is None
    )
    if "tools" in chat_template and is_unknown:
        unknown = "The chat template takes tools and shows no known format of calls."
        return [f"{unknown} They are read as Hermes' are. --tool-call-parser sets another format."]
    return []


@dataclass(frozen=True, slots=True)
class Turn:
    """A rendered turn: its prompt, the structure of its answer, and how the answer is read."""

    prompt: tuple[int, ...]
    source: Source
    question: Question | None  # the last user message
    structure: Structure | None
    thinking: Thinking | None
    kept_token_ids: frozenset[int]  # special tokens that the parsers look for
    _tools: ToolUse
    _format: ChatFormat
    _renderer: Renderer
    _call_numbers: Iterator[int]

    def reader(self) -> ChoiceReader:
        """Return the reader of one choice's answer."""
        schemas = {function.name: function.parameters or {} for function in self._tools.offered}
        tags = self._format.reasoning
        is_open = self.thinking is not None and self.thinking.is_open
        reasoning: ReasoningParser | HarmonyParser | None = None
        tools = None
        if self._format.is_harmony:
            reasoning = HarmonyParser(schemas)
        else:
            if tags is not None:
                reasoning = ReasoningParser(tags, is_open=is_open)
            if schemas:
                tools = ToolCallParser(self._format.tool_format, schemas)
        max_calls = 1 if self._tools.is_one_call else None
        only_calls = bool(self._tools.enforced)
        return ChoiceReader(
            AnswerReader(reasoning, tools, max_calls, only_calls=only_calls), self._renderer.vocabulary
        )

    def new_call_id(self, name: str) -> str:
        """Return the id of the next call of a tool, in the form that the template requires."""
        if self._format.tool_format.has_numbered_ids:
            return f"functions.{name}:{next(self._call_numbers)}"
        if self._format.tool_format.has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


async def render_turn(request: TurnRequest, renderer: Renderer, settings: ServerSettings) -> Turn:
    """Render the prompt. Raises `RenderError`, and `ApiError` for features that the template lacks."""
    chat_format = ChatFormat.of(renderer.info.chat_template or "", settings)
    offered = request.tools.offered
    tools = [function.plain() for function in offered]
    has_tools = chat_format.uses("tools")
    variables = _template_variables(request, chat_format)

    async def render(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return await renderer.render_chat(
            messages if has_tools else chat_format.with_tools(messages, tools),
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=request.continues_final_message,
            tools=tools if has_tools else [],
            variables=variables,
        )

    prompt = await render(request.messages)
    tail = renderer.vocabulary.decode(list(prompt[-_MAX_TAIL:])).rstrip()
    tags = chat_format.reasoning
    thinking = None if tags is None else Thinking(tags.start, tags.end, tail.endswith(tags.start))
    special_tokens = _special_tokens(request, chat_format, renderer)
    return Turn(
        prompt,
        _source(request, render),
        await renderer.encode_question(request.messages),
        _structure(request, chat_format, special_tokens, thinking),
        thinking,
        frozenset(special_tokens.values()),
        request.tools,
        chat_format,
        renderer,
        itertools.count(sum(len(message.get("tool_calls") or ()) for message in request.messages)),
    )


def _source(
    request: TurnRequest, render: Callable[[Sequence[Mapping[str, Any]]], Awaitable[tuple[int, ...]]]
) -> Source:
    """Return the texts of a conversation. Those of the system are whole in every prompt of it."""
    messages = request.messages
    texts = [_text(message) for message in messages]
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=None)
    passages = []
    for index, (message, text) in enumerate(zip(messages, texts, strict=True)):
        is_continued = request.continues_final_message and index == len(messages) - 1
        may_be_cut = message.get("role") in _CUTTABLE_ROLES and not is_continued
        passages.append(Passage(text or "", may_be_cut and text is not None, is_question=index == last))

    async def render_texts(shorter: Sequence[str]) -> tuple[int, ...]:
        return await render(
            [
                message if before is None or after == before else {**message, "content": after}
                for message, before, after in zip(messages, texts, shorter, strict=True)
            ]
        )

    return Source(tuple(passages), "" if last is None else texts[last] or "", render_texts)


def _text(message: Mapping[str, Any]) -> str | None:
    """Return a message's content as one text; None if it is no text."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def _structure(
    request: TurnRequest,
    chat_format: ChatFormat,
    special_tokens: Mapping[str, int],
    thinking: Thinking | None,
) -> Structure | None:
    """Return what the answer must look like; its reasoning is free."""
    tools = request.tools
    structure = request.structure

    def calls(
        functions: tuple[FunctionDefinition, ...],
        *,
        is_optional: bool = False,
        alternative: Structure | None = None,
    ) -> Structure:
        schemas = tuple(
            (function.name, NO_PARAMETERS if function.parameters is None else function.parameters)
            for function in functions
        )
        grammar = ToolGrammar(
            chat_format.tool_format,
            schemas,
            not tools.is_one_call,
            is_optional,
            special_tokens,
            frozenset(function.name for function in functions if function.strict),
        )
        return Structure(StructureKind.CALLS, grammar, "tools", alternative=alternative)

    if structure is not None and structure.kind is StructureKind.TOKENS:
        if tools.enforced or any(function.strict for function in tools.offered):
            raise invalid_value(
                f"'{structure.param}' cannot be combined with tools that are enforced.", "tools"
            )
        return structure
    if tools.enforced:
        structure = calls(tools.enforced)
    elif tools.offered and structure is not None:
        structure = calls(tools.offered, alternative=structure)
    elif any(function.strict for function in tools.offered):
        structure = calls(tools.offered, is_optional=True)
    if structure is None or thinking is None:
        return structure
    # Calls have their own.
    lead = chat_format.tool_format.lead if structure.kind is not StructureKind.CALLS else ""
    preamble = Preamble(
        literal(thinking.start, special_tokens),
        literal(thinking.end, special_tokens),
        thinking.is_open,
        literal(lead, special_tokens),
    )
    return dataclasses.replace(structure, preamble=preamble)


def _special_tokens(request: TurnRequest, chat_format: ChatFormat, renderer: Renderer) -> Mapping[str, int]:
    """Return the special tokens that mark calls or reasoning, by their text."""
    tags = chat_format.reasoning
    markers = chat_format.tool_format.markers if request.tools.offered else ""
    if tags is not None:
        markers += f"{tags.start}{tags.end}"
    if chat_format.is_harmony:
        markers += MARKERS
    special = renderer.vocabulary.special_token_ids
    added = renderer.info.added_tokens
    return {text: token_id for text, token_id in added.items() if token_id in special and text in markers}


def _template_variables(request: TurnRequest, chat_format: ChatFormat) -> Mapping[str, object]:
    """Return the template's variables beside the messages. Those that it does not use are reported."""
    hints: dict[str, object] = {}
    if request.effort is not None:
        hints |= _effort_variables(request.effort, request.effort_param, chat_format)
    elif request.wants_thinking is not None:
        switches = chat_format.thinking_options(request.wants_thinking)
        hints |= switches
        # Without a switch, a model reasons always or never.
        if not switches and request.wants_thinking != (chat_format.reasoning is not None):
            ignore(request.thinking_param)
    if request.verbosity is not None:
        if chat_format.uses("verbosity"):
            hints["verbosity"] = request.verbosity
        elif request.verbosity != "medium":
            ignore(request.verbosity_param)
    given = request.template_options
    for name, value in given.items():
        if chat_format.uses(name):
            continue
        # Templates name the switch differently: SGLang's clients send `thinking` or both.
        is_switch = name in _REASONING_SWITCHES and isinstance(value, bool)
        switches = chat_format.thinking_options(bool(value)) if is_switch else {}
        hints |= switches
        # The template's own name for the switch counts.
        if all(given.get(switch, value) is not value for switch in switches):
            ignore(f"chat_template_kwargs.{name}")
    return {**hints, **given}


def _effort_variables(effort: Effort, param: str, chat_format: ChatFormat) -> Mapping[str, object]:
    """Return how the template takes an effort of reasoning: by degrees, or by a switch.

    The effort "none" is no variable if the template lacks one: a model without reasoning satisfies it
    already.
    """
    switch = next((name for name in _REASONING_SWITCHES if chat_format.uses(name)), None)
    if effort == "none" and switch is not None:
        return {switch: False}
    if effort != "none" and chat_format.uses("reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort != "none" and switch is not None:
        return {switch: True}
    if effort != "none" or chat_format.reasoning is not None:
        ignore(param)
    return {}


def call_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments. JSON that is broken or unfinished is wrapped, as Anthropic advises."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@functools.lru_cache(maxsize=8)
def _words(chat_template: str) -> frozenset[str]:
    """Return the template's words: a name inside a longer one, as in `enable_thinking`, is none."""
    return frozenset(re.findall(r"\w+", chat_template))


def _reasoning_of(chat_template: str) -> ReasoningFormat | None:
    known = (tags for tags in REASONING_FORMATS.values() if tags is not _HARMONY_TAGS)
    return next((tags for tags in known if tags.end in chat_template), None)
