"""Parameters of other servers that would change the output and are not supported.

Each is accepted with the values that ask for what this server does, and refused by name with others. All
other unknown parameters change nothing, and are ignored.
"""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator

from server.protocol.fields import RequestBody, Unsupported, only

_Off: TypeAlias = Annotated[object, AfterValidator(only(False, 0))]
_NoItems: TypeAlias = Annotated[object, AfterValidator(only([], {}, ""))]
_NoShare: TypeAlias = Annotated[object, AfterValidator(only(1, 0, -1))]  # of the probability
_On: TypeAlias = Annotated[object, AfterValidator(only(True))]


def enabled(options: object) -> object:
    """Return the switch of an object of options, or the value itself."""
    return options.get("enabled", options) if isinstance(options, dict) else options


class ForeignFields(RequestBody):
    # vLLM
    logits_processors: _NoItems = None
    use_beam_search: _Off = None
    watermarking: _Off = None
    spaces_between_special_tokens: _On = None
    repetition_detection: Unsupported = None

    # SGLang
    custom_logit_processor: Unsupported = None
    return_hidden_states: _Off = None
    return_routed_experts: _Off = None
    return_sampling_mask: _Off = None
    return_flat_raw_output_top_logprobs: _Off = None
    sampling_logprobs_mode: Unsupported = None
    watermark: Annotated[object, BeforeValidator(enabled), AfterValidator(only({}, False))] = None
    lora_path: _NoItems = None
    session_params: _NoItems = None
    input_ids: Unsupported = None

    # llama.cpp
    mirostat: _Off = None
    dynatemp_range: _Off = None
    typical_p: _NoShare = None
    tfs_z: _NoShare = None
    top_n_sigma: Annotated[object, AfterValidator(only(-1, 0))] = None
    adaptive_target: Annotated[object, AfterValidator(only(-1))] = None
    xtc_probability: _Off = None
    dry_multiplier: _Off = None
    min_keep: _Off = None
    n_indent: _Off = None
    t_max_predict_ms: Annotated[
        object, AfterValidator(only(0, -1, instead="'request_timeout' ends a request after some seconds"))
    ] = None
    post_sampling_probs: _Off = None
    lora: _NoItems = None
    image_data: _NoItems = None
    reasoning_format: Annotated[object, AfterValidator(only("auto", "deepseek", "deepseek-legacy"))] = None
    parse_tool_calls: _On = None
    thinking_forced_open: _Off = None

    # OpenRouter
    top_a: _Off = None
    plugins: _NoItems = None
