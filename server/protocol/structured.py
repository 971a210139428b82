"""The required form of an answer: OpenAI's `response_format`, and the parameters of other servers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from server.grammar.structure import Structure, StructureKind
from server.grammar.token_rules import TokenChoice
from server.http.errors import invalid_value
from server.http.ignored import ignore
from server.protocol.fields import Hint, Inert, RequestBody, Text, TokenId, Unsupported, few, only

Schema: TypeAlias = dict[str, Any]
Choices: TypeAlias = Annotated[
    list[Annotated[Text, Field(min_length=1)]], Field(fail_fast=True, min_length=1), BeforeValidator(few)
]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None  # an extension of llama.cpp and others

    @property
    def structure(self) -> Mapping[str, Any]:
        return ANY_OBJECT if self.schema_ is None else self.schema_


class NamedSchema(RequestBody):
    """A schema is followed whether `strict` or not. Strict, each of its keywords must be."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(RequestBody):
    """One of these; which is checked where all ways of saying it come together."""

    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: Choices | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    json_object: bool | None = None
    structural_tag: Unsupported = None
    disable_any_whitespace: Annotated[object, AfterValidator(only(False))] = None
    disable_additional_properties: Annotated[object, AfterValidator(only(False))] = None
    whitespace_pattern: Unsupported = None
    disable_fallback: Inert = None


def without_switch(options: object) -> object:
    """Drop OpenRouter's switch of the same name: it says only that a schema may be sent."""
    if not isinstance(options, bool):
        return options
    ignore("structured_outputs")
    return None


class StructuredFields(RequestBody):
    """The fields of other servers, which every family takes."""

    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(without_switch)] = None
    guided_json: Schema | Text | None = None
    guided_regex: Annotated[Text, Field(min_length=1)] | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[Text, Field(min_length=1)] | None = None
    guided_decoding_backend: Hint = None
    guided_whitespace_pattern: Unsupported = None

    # The same in the words of SGLang and llama.cpp.
    regex: Annotated[Text, Field(min_length=1)] | None = None
    ebnf: Annotated[Text, Field(min_length=1)] | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    json_schema: Schema | Text | None = None

    # vLLM's rules about single tokens.
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[Text, Field(min_length=1, max_length=256)]],
            Field(fail_fast=True, max_length=256),  # each is compared in every step
            BeforeValidator(few),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_structures(self) -> Self:
        structures = list(self._structures())
        if len(structures) > 1:
            first, second = structures[:2]
            raise invalid_value(f"'{first.param}' and '{second.param}' exclude each other.", second.param)
        if self.structured_outputs is not None and not structures:
            raise invalid_value("'structured_outputs' says nothing about the answer.", "structured_outputs")
        return self

    @property
    def structure(self) -> Structure | None:
        return next(self._structures(), None)

    def _structures(self) -> Iterator[Structure]:
        yield from self._formats()
        options = self.structured_outputs
        if options is not None:
            if options.json_object:
                yield Structure(StructureKind.JSON, ANY_OBJECT, "structured_outputs.json_object")
            yield from _of(
                "structured_outputs.", options.json_, options.regex, options.choice, options.grammar
            )
        yield from _of(
            "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        yield from _of("", None, self.regex, None, self.grammar)
        if self.ebnf is not None:
            yield Structure(StructureKind.GRAMMAR, self.ebnf, "ebnf")
        if self.json_schema is not None:
            yield Structure(StructureKind.JSON, self.json_schema, "json_schema")

        if self.allowed_token_ids or self.bad_words:
            choice = TokenChoice(tuple(self.allowed_token_ids or ()), tuple(self.bad_words or ()))
            yield Structure(
                StructureKind.TOKENS, choice, "allowed_token_ids" if self.allowed_token_ids else "bad_words"
            )

    def _formats(self) -> Iterator[Structure]:
        """Return what is said in OpenAI's way."""
        yield from ()


class ResponseFormatFields(StructuredFields):
    """OpenAI's field of chat completions, which text completions take too."""

    response_format: ResponseFormat | None = None

    def _formats(self) -> Iterator[Structure]:
        if isinstance(self.response_format, JsonObjectFormat):
            yield Structure(
                StructureKind.JSON, self.response_format.structure, "response_format", is_strict=False
            )
        if isinstance(self.response_format, JsonSchemaFormat):
            named = self.response_format.json_schema
            schema = ANY_OBJECT if named.schema_ is None else named.schema_
            yield Structure(StructureKind.JSON, schema, "response_format", is_strict=named.strict is True)


def _of(
    prefix: str, schema: Schema | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Structure]:
    for kind, value in zip(StructureKind, (schema, regex, choice, grammar), strict=False):
        if value is not None:
            yield Structure(kind, value, f"{prefix}{kind.value}")
