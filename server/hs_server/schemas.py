"""What the routes accept and how they refuse: request fields with their bounds, the error shape.

A route passes on exactly the fields declared here. Of the rest, those that would change the answer
or reach into the server are refused by name (`REFUSED`); others are ignored as upstream does.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hs_runtime.policies import CUSTOM_PARAM
from hs_server.policy_header import BODY_FIELD, JsonNumber

MAX_N = 128  # completions of one prompt
MAX_SEQUENCES = 256  # prompts of one request times n
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_TEXT = 65536  # characters of a grammar, schema or regular expression
MAX_TOKEN_LIST = 1024  # entries of logit_bias, stop_token_ids and token_ids_logprob
MAX_MESSAGES = 65536
MAX_KEY_LENGTH = 256  # characters of cache_salt and extra_key

INT64 = 2**63 - 1
CLIENT_GONE = 499  # nginx's status for a client that closed before the answer


class ApiError(Exception):
    """An answer that is not 200, in OpenAI's shape; `code` is a stable string for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may name: token ids below `vocab_size`, and the served model by its names."""

    vocab_size: int
    model_names: tuple[str, ...]


# ---- JSON -------------------------------------------------------------------------------------


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object; raises `ApiError` 400 on what JSON (RFC 8259) or we do not allow.

    Refused: NaN and infinities, numbers beyond f64, duplicate keys, lone surrogates, and nesting
    that exhausts the parser.
    """
    try:
        text = raw.decode("utf-8")
        document = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique
        )
        if "\\ud" in text or "\\uD" in text:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="malformed_json") from None
    except UnicodeError:
        raise ApiError(400, "the body is not valid UTF-8 text", code="malformed_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="malformed_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object", code="malformed_json")
    return document


def policy_object(raw: bytes, document: dict[str, Any]) -> object:
    """The `hierasparse` field of a body that `parse_json` accepted, numbers as `JsonNumber`."""
    for name in document:
        if name.lower().startswith(BODY_FIELD) and name != BODY_FIELD:
            raise ApiError(
                400,
                f"unknown field {name[:64]!r}: choose {BODY_FIELD!r}",
                name[:64],
                "unknown_field",
            )
    if document.get(BODY_FIELD) is None:
        return None
    return json.loads(raw, parse_int=JsonNumber, parse_float=JsonNumber)[BODY_FIELD]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:32]} is out of range")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:64]!r}")
            seen.add(key)
    return mapping


# ---- fields -----------------------------------------------------------------------------------

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
ShortText = Annotated[str, Field(max_length=1024)]
LongText = Annotated[str, Field(max_length=MAX_TEXT)]
Key = Annotated[str, Field(max_length=MAX_KEY_LENGTH)]
Stops = ShortText | Annotated[list[ShortText], Field(max_length=MAX_STOPS)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_LIST)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


T = TypeVar("T", bound=_Fields)


class Sampling(_Fields):
    """What all three routes can say about sampling."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**30)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    stop_regex: Stops | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    regex: LongText | None = None
    ebnf: LongText | None = None
    json_schema: LongText | None = None


class StreamOptions(_Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _OpenAI(Sampling):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    max_tokens: TokenCount | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    cache_salt: Key | None = None
    extra_key: Key | None = None


class CompletionFields(_OpenAI):
    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None


class ChatFields(_OpenAI):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: Any = None


class NativeSampling(Sampling):
    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    sampling_seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    structural_tag: LongText | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


PromptPosition = Annotated[int, Field(ge=-1, le=2**31 - 1)]
TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class GenerateFields(_Fields):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    text: Any = None
    input_ids: Any = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: PromptPosition | list[PromptPosition] | None = None
    top_logprobs_num: TopCount | list[TopCount] | None = None
    token_ids_logprob: TokenIds | list[TokenIds] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool = False
    cache_salt: Key | None = None
    extra_key: Key | None = None


FIELD_NAMES = frozenset(
    name
    for schema in (ChatFields, CompletionFields, GenerateFields, NativeSampling, StreamOptions)
    for name in schema.model_fields
)

_TEXT_ONLY = "this server serves text"
_ONE_HOST = "this server places requests itself"
_INTERNAL = "it exposes the server's internals"
REFUSED: dict[str, str] = {
    "custom_params": "the server sets it; a policy goes into HieraSparse-* headers or "
    f"{BODY_FIELD!r}",
    CUSTOM_PARAM: f"the server sets it; a policy goes into HieraSparse-* headers or {BODY_FIELD!r}",
    "custom_logit_processor": "it would run code of the client",
    "lora_path": "this server has no adapters",
    "lora_id": "this server has no adapters",
    "rid": "the server names requests itself",
    "session_id": "sessions are not offered",
    "session_params": "sessions are not offered",
    "conversation_id": "sessions are not offered",
    "priority": "all requests have the same priority",
    "background": "answers are not stored",
    "suffix": "the model fills in no middles",
    "max_thinking_tokens": "thinking budgets are not offered",
    "input_embeds": _TEXT_ONLY,
    "positional_embed_overrides": _TEXT_ONLY,
    "image_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "mm_hashes": _TEXT_ONLY,
    "images_config": _TEXT_ONLY,
    "bootstrap_host": _ONE_HOST,
    "bootstrap_port": _ONE_HOST,
    "bootstrap_room": _ONE_HOST,
    "routed_dp_rank": _ONE_HOST,
    "data_parallel_rank": _ONE_HOST,
    "disagg_prefill_dp_rank": _ONE_HOST,
    "routing_key": _ONE_HOST,
    "return_hidden_states": _INTERNAL,
    "return_routed_experts": _INTERNAL,
    "return_indexer_topk": _INTERNAL,
    "return_meta_info": _INTERNAL,
}

# Names by which chat_template_kwargs would reach the renderer's own parameters.
RESERVED_TEMPLATE_KEYS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


def completion_fields(document: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Checked fields of POST /v1/completions, as SGLang's `CompletionRequest` names them."""
    fields, data = _validated(CompletionFields, document)
    _check_model(fields.model, limits)
    data["model"] = limits.model_names[0]
    prompts = _check_prompt(data.get("prompt"), "prompt", limits, texts=True)
    n = fields.n or 1
    _check_sequences(prompts, n, "prompt")
    if fields.best_of not in (None, n):
        raise ApiError(400, f"best_of={fields.best_of}: choose n ({n}), or leave it out", "best_of")
    data.pop("best_of", None)
    _check_token_ids(fields, limits, "")
    _fold_cache_keys(data)
    return data


def chat_fields(document: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Checked fields of POST /v1/chat/completions, as SGLang's `ChatCompletionRequest` does."""
    fields, data = _validated(ChatFields, document)
    _check_model(fields.model, limits)
    data["model"] = limits.model_names[0]
    for number, message in enumerate(fields.messages):
        _check_message(message, f"messages.{number}")
    if fields.input_ids is not None:
        _check_ids(fields.input_ids, "input_ids", limits)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    for name in fields.chat_template_kwargs or {}:
        if name in RESERVED_TEMPLATE_KEYS:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is the server's: choose a variable of the template",
                "chat_template_kwargs",
                "field_not_allowed",
            )
    _check_token_ids(fields, limits, "")
    _fold_cache_keys(data)
    return data


def generate_fields(document: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Checked fields of POST /generate, as SGLang's `GenerateReqInput` names them."""
    for number, sampling in enumerate(_as_list(document.get("sampling_params"))):
        if isinstance(sampling, dict):
            _refuse(sampling, f"sampling_params.{number}." if number else "sampling_params.")
    fields, data = _validated(GenerateFields, document)
    _check_model(data.pop("model", None), limits)
    if (fields.text is None) == (fields.input_ids is None):
        raise ApiError(400, "give either text or input_ids", "text")
    if fields.text is not None:
        prompts = _check_prompt(fields.text, "text", limits, texts=True, ids=False)
        single = isinstance(fields.text, str)
    else:
        prompts = _check_prompt(fields.input_ids, "input_ids", limits, texts=False)
        single = isinstance(fields.input_ids[0], int)
    samplings = _as_list(fields.sampling_params)
    if isinstance(fields.sampling_params, list) and (single or len(samplings) != prompts):
        _bad_batch("sampling_params", prompts)
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
        value = getattr(fields, name)
        if isinstance(value, list) and (single or len(value) != prompts):
            _bad_batch(name, prompts)
    counts = {sampling.n or 1 for sampling in samplings} or {1}
    if len(counts) > 1:
        raise ApiError(400, "sampling_params must agree on n", "sampling_params")
    _check_sequences(prompts, counts.pop(), "text" if fields.text is not None else "input_ids")
    for sampling in samplings:
        _check_token_ids(sampling, limits, "sampling_params.")
    wanted = fields.token_ids_logprob or []
    if wanted and isinstance(wanted[0], list) and (single or len(wanted) != prompts):
        _bad_batch("token_ids_logprob", prompts)
    for entry in wanted:
        _check_ids(
            entry if isinstance(entry, list) else [entry], "token_ids_logprob", limits, empty=True
        )
    _fold_cache_keys(data)
    return data


def _validated(schema: type[T], document: dict[str, Any]) -> tuple[T, dict[str, Any]]:
    """The model, and its given fields as plain data."""
    given = {name: value for name, value in document.items() if name != BODY_FIELD}
    given = _refuse(given, "")
    try:
        fields = schema.model_validate(given)
    except ValidationError as error:
        raise malformed_fields(error) from None
    return fields, fields.model_dump(exclude_unset=True, exclude_none=True)


def _refuse(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    """`given` without refused fields that say nothing; raises `ApiError` for those that do."""
    for name, reason in REFUSED.items():
        if given.get(name) is not None and given[name] is not False:
            raise ApiError(
                400,
                f"the field {prefix}{name} is not accepted: {reason}",
                prefix + name,
                "field_not_allowed",
            )
    return {name: value for name, value in given.items() if name not in REFUSED}


def malformed_fields(error: ValidationError) -> ApiError:
    """The first thing that is wrong, by the field's name as the client knows it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    # Inside unions the path also names types, which mean nothing to a client.
    param = ".".join(part for part in path if part in FIELD_NAMES or part.isdigit())
    param = param or path[0][:64]
    if first["type"] == "extra_forbidden":
        name = path[-1][:64]
        return ApiError(400, f"unknown field {name!r}", param, "unknown_field")
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {first['msg']}", param, code)


def _check_model(name: str | None, limits: Limits) -> None:
    if name is not None and name not in limits.model_names:
        raise ApiError(
            404,
            f"the model {name[:128]!r} does not exist: choose {limits.model_names[0]!r}",
            "model",
            "model_not_found",
        )


def _check_prompt(value: Any, param: str, limits: Limits, *, texts: bool, ids: bool = True) -> int:
    """Number of prompts in one text, texts, token ids, or lists of them."""
    if texts and isinstance(value, str):
        if not value:
            raise ApiError(400, f"{param} is empty", param)
        return 1
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{param} must be {_forms(texts, ids)}, and not empty", param)
    if texts and all(isinstance(item, str) for item in value):
        if not all(value):
            raise ApiError(400, f"{param} holds an empty text", param)
        return len(value)
    if ids and isinstance(value[0], list):
        for item in value:
            _check_ids(item, param, limits)
        return len(value)
    if not ids:
        raise ApiError(400, f"{param} must be {_forms(texts, ids)}", param)
    _check_ids(value, param, limits)
    return 1


def _forms(texts: bool, ids: bool) -> str:
    forms = ["a text", "a list of texts"] * texts + ["token ids", "a list of token ids"] * ids
    return " or ".join(forms)


def _check_ids(value: Any, param: str, limits: Limits, *, empty: bool = False) -> None:
    if not isinstance(value, list) or not (value or empty):
        raise ApiError(400, f"{param} must be a list of token ids, and not empty", param)
    if not all(type(item) is int for item in value):
        raise ApiError(400, f"{param} must hold whole numbers only", param)
    if value and (min(value) < 0 or max(value) >= limits.vocab_size):
        wrong = min(value) if min(value) < 0 else max(value)
        raise ApiError(
            400,
            f"{param} holds the token id {wrong}: choose from 0 to {limits.vocab_size - 1}",
            param,
            "token_id_out_of_range",
        )


def _check_token_ids(fields: Sampling, limits: Limits, prefix: str) -> None:
    _check_ids(fields.stop_token_ids or [], prefix + "stop_token_ids", limits, empty=True)
    bias = fields.logit_bias or {}
    if len(bias) > MAX_TOKEN_LIST:
        raise ApiError(400, f"logit_bias has more than {MAX_TOKEN_LIST} entries", "logit_bias")
    for token in bias:
        if not re.fullmatch(r"[0-9]{1,10}", token, re.ASCII) or int(token) >= limits.vocab_size:
            raise ApiError(
                400,
                f"logit_bias has the key {token[:32]!r}: choose token ids from 0 to "
                f"{limits.vocab_size - 1}",
                prefix + "logit_bias",
                "token_id_out_of_range",
            )
    if fields.top_k == 0:
        raise ApiError(400, "top_k=0: choose -1 (all) or at least 1", prefix + "top_k")


def _check_sequences(prompts: int, n: int, param: str) -> None:
    if prompts * n > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"{prompts} prompts with n={n} are {prompts * n} sequences: choose at most "
            f"{MAX_SEQUENCES}",
            param,
            "too_many_sequences",
        )


def _check_message(message: dict[str, Any], param: str) -> None:
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{param}.role must be a text", param)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ApiError(400, f"{param}.content must be a text or a list of parts", param)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ApiError(
                400, f"{param}.content holds a part that is not text: {_TEXT_ONLY}", param
            )


def _fold_cache_keys(data: dict[str, Any]) -> None:
    """One unambiguous `extra_key` from both fields: salt "a" + key "bc" is not "ab" + "c"."""
    salt, key = data.pop("cache_salt", ""), data.pop("extra_key", "")
    if salt or key:
        data["extra_key"] = json.dumps([salt, key])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _bad_batch(name: str, prompts: int) -> NoReturn:
    raise ApiError(400, f"{name} must be one value, or a list with one for each of {prompts}", name)
