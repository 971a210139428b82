"""Each parameter of OpenAI's library is a field here: supported or refused by name."""

from typing import Any

import pytest
from openai.types import (
    batch_create_params,
    chat,
    completion_create_params,
    embedding_create_params,
    responses,
    shared_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params, response_input_item_param
from openai.types.shared_params import response_format_json_schema
from pydantic import BaseModel

from server.protocol.batches import BatchRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.generation import PromptCacheOptions, StreamOptions
from server.protocol.messages import AssistantMessage, SaidMessage, TextPart, ToolCall, ToolMessage
from server.protocol.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    GivenReasoningItem,
    InputTextPart,
    ItemReference,
    MessageItem,
    OutputTextPart,
)
from server.protocol.responses import (
    FunctionTool,
    JsonSchemaText,
    ReasoningOptions,
    ResponsesRequest,
    ResponseStreamOptions,
    TextOptions,
)
from server.protocol.structured import NamedSchema
from server.protocol.tools import FunctionDefinition, Tool

PAIRS: list[tuple[Any, type[BaseModel]]] = [
    (chat_params.CompletionCreateParamsNonStreaming, ChatCompletionRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (batch_create_params.BatchCreateParams, BatchRequest),
    (response_create_params.ResponseCreateParamsNonStreaming, ResponsesRequest),
    (input_token_count_params.InputTokenCountParams, ResponsesRequest),
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (response_create_params.StreamOptions, ResponseStreamOptions),
    (chat_params.PromptCacheOptions, PromptCacheOptions),
    (response_create_params.PromptCacheOptions, PromptCacheOptions),
    (chat.ChatCompletionSystemMessageParam, SaidMessage),
    (chat.ChatCompletionDeveloperMessageParam, SaidMessage),
    (chat.ChatCompletionUserMessageParam, SaidMessage),
    (chat.ChatCompletionAssistantMessageParam, AssistantMessage),
    (chat.ChatCompletionToolMessageParam, ToolMessage),
    (chat.ChatCompletionContentPartTextParam, TextPart),
    (chat.ChatCompletionMessageFunctionToolCallParam, ToolCall),
    (chat.ChatCompletionFunctionToolParam, Tool),
    (shared_params.FunctionDefinition, FunctionDefinition),
    (response_format_json_schema.JSONSchema, NamedSchema),
    (shared_params.Reasoning, ReasoningOptions),
    (responses.ResponseTextConfigParam, TextOptions),
    (responses.ResponseFormatTextJSONSchemaConfigParam, JsonSchemaText),
    (responses.FunctionToolParam, FunctionTool),
    (responses.EasyInputMessageParam, MessageItem),
    (responses.ResponseOutputMessageParam, MessageItem),
    (responses.ResponseInputTextParam, InputTextPart),
    (responses.ResponseOutputTextParam, OutputTextPart),
    (responses.ResponseFunctionToolCallParam, FunctionCallItem),
    (response_input_item_param.FunctionCallOutput, FunctionCallOutputItem),
    (responses.ResponseReasoningItemParam, GivenReasoningItem),
    (response_input_item_param.ItemReference, ItemReference),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_parameter_of_openai_is_a_field(theirs: Any, ours: type[BaseModel]) -> None:
    known = {field.alias or name for name, field in ours.model_fields.items()}
    assert theirs.__annotations__.keys() - known == set()


def test_cache_markers_are_not_passed_to_the_template() -> None:
    part = {"type": "text", "text": "Hello"}
    marked = {"role": "user", "content": [{**part, "prompt_cache_breakpoint": {"mode": "explicit"}}]}
    assert SaidMessage.model_validate(marked).plain() == {"role": "user", "content": [part]}
