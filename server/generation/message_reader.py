"""One choice of a chat as it is read: the pieces of a streamed message, and the whole one that they make."""

from collections.abc import Callable

from server.generation.choice_reader import ChoiceReader
from server.generation.output import ChoiceDelta
from server.parsers.parts import CallArguments, CallStart, Content, Piece, Reasoning
from server.protocol.chat import AnswerMessage, ChatDelta, FunctionDelta, MessageToolCall


class MessageReader:
    """Gives each call an id from `new_call_id`."""

    def __init__(self, reader: ChoiceReader, new_call_id: Callable[[], str]) -> None:
        self._reader, self._new_call_id = reader, new_call_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # ids, names and arguments

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def read(self, delta: ChoiceDelta) -> list[ChatDelta]:
        """Take more of the answer and return what can be told of it."""
        return [self._delta(piece) for piece in self._reader.read(delta)]

    @property
    def message(self) -> AnswerMessage:
        """The message as far as it was read."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: AnswerMessage = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [_call(*call) for call in self._calls]
        return message

    def _delta(self, piece: Piece) -> ChatDelta:
        match piece:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case Reasoning(text):
                self._reasoning.append(text)
                return {"reasoning": text, "reasoning_content": text}
            case CallStart(name):
                call_id = self._new_call_id()
                self._calls.append((call_id, name, []))
                function: FunctionDelta = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [
                        {
                            "index": len(self._calls) - 1,
                            "id": call_id,
                            "type": "function",
                            "function": function,
                        }
                    ]
                }
            case CallArguments(text):
                self._calls[-1][2].append(text)
                return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]}


def _call(call_id: str, name: str, arguments: list[str]) -> MessageToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
