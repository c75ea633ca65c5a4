"""The HTTP surface on a fake engine: what is answered, what is refused, and how both look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from hs_runtime.config import RuntimeConfig
from hs_runtime.metrics import metrics
from hs_runtime.policies import CUSTOM_PARAM, PRESETS, Sparsity, SparsityPolicy
from hs_server import routes
from hs_server.app import OPEN_PATHS, Server, create_app
from hs_server.engine import Call, Report
from hs_server.schemas import MAX_N, MAX_SEQUENCES, REFUSED, ApiError
from tests.support.fakes import FakeEngine

CONFIG = RuntimeConfig(model_path="/models/tiny", served_model_name="tiny")
GENERATION = ("/v1/completions", "/v1/chat/completions", "/generate")
JSON = {"Content-Type": "application/json"}
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "scheme": "http",
    "query_string": b"",
    "root_path": "",
    "server": ("test", 80),
    "client": ("test", 1),
}
POLICY_HEADERS = ("HieraSparse-Policy", "HieraSparse-Prefill", "HieraSparse-Decode")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with serving(engine) as client:
        yield client


def serving(engine: FakeEngine, config: RuntimeConfig = CONFIG) -> TestClient:
    return TestClient(create_app(engine, config), raise_server_exceptions=False)


def body_of(path: str, **more: Any) -> dict[str, Any]:
    """A request that each route accepts."""
    if path == "/generate":
        return {"text": "hello", "sampling_params": {"max_new_tokens": 3}, **more}
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": "hello", "max_tokens": 3, **more}
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": 3, **more}


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, after the checks that hold for all of them."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"] and isinstance(error["code"], str)
    return dict(error)


def events(response: httpx.Response) -> list[Any]:
    """The events of a finished stream, without its [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


# ---- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATION)
def test_every_generation_route_applies_and_reports_the_policy(
    engine: FakeEngine, client: TestClient, path: str, stream: bool
) -> None:
    response = client.post(
        path, json=body_of(path, stream=stream), headers={"HieraSparse-Policy": "fast"}
    )
    assert response.status_code == 200, response.text
    assert engine.calls[-1][2] == PRESETS["fast"]
    assert response.headers["HieraSparse-Policy"] == "fast"
    assert response.headers["HieraSparse-Prefill"] == "k=0.0, v=1.0"
    assert response.headers["HieraSparse-Decode"] == "k=1.0, v=1.0"
    assert response.headers["HieraSparse-Pruner"] == "magnitude"


@pytest.mark.parametrize("path", GENERATION)
def test_the_body_can_say_what_the_headers_cannot(
    engine: FakeEngine, client: TestClient, path: str
) -> None:
    wish = {"prefill": {"v": 0.25}, "decode": {"k": 0.5, "v": 1}}
    response = client.post(path, json=body_of(path, hierasparse=wish))
    assert response.headers["HieraSparse-Policy"] == "custom"
    expected = SparsityPolicy(prefill=Sparsity(0, 250), decode=Sparsity(500, 1000))
    assert engine.calls[-1][2] == expected
    assert "hierasparse" not in engine.calls[-1][1]


def test_without_a_wish_the_server_default_is_served(engine: FakeEngine) -> None:
    config = RuntimeConfig(model_path="tiny", default_policy=PRESETS["balanced"])
    with serving(engine, config) as client:
        response = client.post("/generate", json=body_of("/generate"))
    assert response.headers["HieraSparse-Policy"] == "balanced"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize(
    ("headers", "param", "code"),
    [
        ({"HieraSparse-Policy": "turbo"}, "HieraSparse-Policy", "unknown_policy"),
        ({"HieraSparse-Prefill": "v=2"}, "HieraSparse-Prefill", "invalid_sparsity"),
        ({"HieraSparse-Decode": "v=1;q=1"}, "HieraSparse-Decode", "malformed_policy_header"),
        ({"HieraSparse-Polcy": "max"}, "hierasparse-polcy", "unknown_policy_header"),
    ],
)
def test_a_wrong_policy_is_400_before_the_engine_hears_of_it(
    engine: FakeEngine,
    client: TestClient,
    headers: dict[str, str],
    param: str,
    code: str,
    path: str,
    stream: bool,
) -> None:
    error = refused(client.post(path, json=body_of(path, stream=stream), headers=headers))
    assert (error["param"], error["code"]) == (param, code)
    assert engine.calls == []


def test_two_different_lines_of_one_header_are_400(client: TestClient) -> None:
    lines = [("HieraSparse-Policy", "max"), ("HieraSparse-Policy", "dense")]
    response = client.post("/generate", json=body_of("/generate"), headers=lines)
    assert refused(response)["code"] == "conflicting_policy_headers"


@pytest.mark.parametrize("name", ["hierasparse_policy", "HieraSparse", "hierasparse-policy"])
def test_a_misspelled_policy_field_is_400(client: TestClient, name: str) -> None:
    error = refused(client.post("/generate", json=body_of("/generate", **{name: {}})))
    assert (error["param"], error["code"]) == (name, "unknown_field")


def test_refused_policies_are_counted_by_reason(client: TestClient) -> None:
    counter = metrics().rejected.labels("unknown_policy")
    before = counter._value.get()
    client.post("/generate", json=body_of("/generate"), headers={"HieraSparse-Policy": "turbo"})
    assert counter._value.get() == before + 1


# ---- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATION[:2])
def test_usage_tells_blocks_and_bytes(client: TestClient, path: str) -> None:
    body = body_of(path)
    text = "x" * 200
    if "prompt" in body:
        body["prompt"] = text
    else:
        body["messages"][0]["content"] = text
    response = client.post(path, json=body, headers={"HieraSparse-Policy": "light"})
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["hierasparse"] == {
        "policy": "light",
        "prefill": {"k": 0.0, "v": 0.0},
        "decode": {"k": 0.0, "v": 1.0},
        "dense_blocks": 5,
        "sparse_blocks": 3,
        "kv_bytes": 5 * 16384 + 3 * 9216,
        "dense_equivalent_bytes": 8 * 16384,
    }


def test_usage_of_several_sequences_is_their_sum(client: TestClient) -> None:
    response = client.post("/v1/completions", json=body_of("/v1/completions", n=3))
    usage = response.json()["usage"]["hierasparse"]
    assert usage["dense_equivalent_bytes"] == 3 * 2 * 16384


@pytest.mark.parametrize("path", GENERATION[:2])
def test_a_stream_ends_with_the_usage_that_was_asked_for(client: TestClient, path: str) -> None:
    body = body_of(path, stream=True, stream_options={"include_usage": True})
    *deltas, last = events(client.post(path, json=body))
    assert len(deltas) == 3 and all("usage" not in delta for delta in deltas)
    assert last["choices"] == []
    assert last["usage"]["hierasparse"]["policy"] == "dense"
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path", GENERATION[:2])
def test_a_stream_without_stream_options_has_no_usage(client: TestClient, path: str) -> None:
    received = events(client.post(path, json=body_of(path, stream=True)))
    assert len(received) == 3 and all("usage" not in each for each in received)


def test_native_answers_report_in_the_meta_info_of_each_sequence(client: TestClient) -> None:
    one = client.post("/generate", json=body_of("/generate")).json()
    assert one["meta_info"]["hierasparse"]["dense_blocks"] == 2
    many = client.post("/generate", json={"input_ids": [[1], [2, 3]]}).json()
    assert [each["meta_info"]["hierasparse"]["sparse_blocks"] for each in many] == [0, 0]


def test_a_native_stream_reports_where_it_finishes(client: TestClient) -> None:
    *running, last = events(client.post("/generate", json=body_of("/generate", stream=True)))
    assert [each["text"] for each in running] == ["x", "xx"]
    assert all("hierasparse" not in each["meta_info"] for each in running)
    assert last["meta_info"]["hierasparse"]["policy"] == "dense"


def test_counts_are_null_when_the_engine_reported_none() -> None:
    usage = Call(PRESETS["max"], None).usage()  # type: ignore[arg-type]
    assert usage["policy"] == "max"
    assert usage["dense_blocks"] is None and usage["kv_bytes"] is None


def test_reports_are_read_as_the_scheduler_writes_them() -> None:
    counts = {"dense_blocks": 1, "sparse_blocks": 2, "kv_bytes": 3, "dense_equivalent_bytes": 4}
    text = json.dumps({"policy": PRESETS["max"].to_json(), **counts})
    assert Report.from_json(text) == Report(PRESETS["max"], 1, 2, 3, 4)


def test_infinite_log_probabilities_are_null(engine: FakeEngine) -> None:
    async def answer(fields: Any, call: Any) -> dict[str, Any]:
        return {"text": "", "meta_info": {"id": "0", "logprob": float("-inf")}}

    engine.generate = answer  # type: ignore[method-assign]
    with serving(engine) as client:
        response = client.post("/generate", json=body_of("/generate"))
    assert json.loads(response.text)["meta_info"]["logprob"] is None


# ---- errors of the engine ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATION)
def test_a_refusal_by_the_engine_sets_the_status_of_streams_too(
    engine: FakeEngine, client: TestClient, path: str, stream: bool
) -> None:
    engine.refusal = ApiError(400, "needs 5 bytes, has 4", code="context_length_exceeded")
    error = refused(client.post(path, json=body_of(path, stream=stream)))
    assert error["message"] == "needs 5 bytes, has 4"


def test_an_overloaded_engine_says_when_to_come_back(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.refusal = ApiError(503, "the queue is full", code="overloaded", retry_after=1)
    response = client.post("/generate", json=body_of("/generate"))
    assert refused(response, 503)["code"] == "overloaded"
    assert response.headers["Retry-After"] == "1"


def test_a_defect_is_500_and_tells_nothing_of_our_insides(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.refusal = RuntimeError("secret path /srv/model")
    error = refused(client.post("/generate", json=body_of("/generate")), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", GENERATION)
def test_a_stream_that_breaks_ends_with_one_error_event(
    engine: FakeEngine, client: TestClient, path: str
) -> None:
    engine.break_after = 2
    first, second, last = events(client.post(path, json=body_of(path, stream=True)))
    assert "error" not in first and "error" not in second
    assert last["error"]["code"] == "engine_failed"
    assert engine.aborted == 1


def test_a_stream_that_breaks_before_its_first_token_is_500(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.break_after = 0
    refused(client.post("/generate", json=body_of("/generate", stream=True)), 500)


def test_every_way_out_frees_the_place_in_the_gate(engine: FakeEngine, client: TestClient) -> None:
    app = client.app
    assert isinstance(app, FastAPI)
    for breaking in (None, 0, 2):
        engine.break_after = breaking
        for stream in (False, True):
            client.post("/generate", json=body_of("/generate", stream=stream))
            client.post("/generate", json={"text": ""})
    assert app.state.gate.in_flight == 0


# ---- what a request may hold -------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}',
     b'{"a": 1e999}', b'{"a": 1, "a": 2}', b'{"a": "\\ud800"}', b"[" * 100_000,
     b'{"a":' * 50_000, b'{"a": 1} x', b'{"a": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}"],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_400(
    engine: FakeEngine, client: TestClient, path: str, raw: bytes
) -> None:
    assert refused(client.post(path, content=raw, headers=JSON))["code"] == "malformed_json"
    assert engine.calls == []


@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/jsonx"},
     {"Content-Type": "multipart/form-data; boundary=x"}, {**JSON, "Content-Encoding": "gzip"}],
)  # fmt: skip
def test_other_content_types_are_415(client: TestClient, headers: dict[str, str]) -> None:
    raw = json.dumps(body_of("/generate")).encode()
    refused(client.post("/generate", content=raw, headers=headers), 415)


def test_a_charset_beside_the_content_type_is_accepted(client: TestClient) -> None:
    raw = json.dumps(body_of("/generate")).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/generate", content=raw, headers=headers).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_413(engine: FakeEngine, declared: bool) -> None:
    config = RuntimeConfig(model_path="tiny", max_request_bytes=1000)
    raw = json.dumps(body_of("/generate", extra_key="x" * 990)).encode()
    parts = raw if declared else iter([raw[:500], raw[500:]])  # an iterator is sent in chunks
    with serving(engine, config) as client:
        error = refused(client.post("/generate", content=parts, headers=JSON), 413)
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_reach_into_the_server_are_400(
    client: TestClient, path: str, field: str
) -> None:
    error = refused(client.post(path, json=body_of(path, **{field: {CUSTOM_PARAM: "x"}})))
    assert (error["param"], error["code"]) == (field, "field_not_allowed")


@pytest.mark.parametrize("value", [{CUSTOM_PARAM: "{}"}, {}, {"a": 1}])
def test_native_sampling_params_cannot_carry_custom_params(
    client: TestClient, value: dict[str, Any]
) -> None:
    body = {"text": "x", "sampling_params": {"custom_params": value}}
    assert refused(client.post("/generate", json=body))["code"] == "field_not_allowed"
    body = {"text": ["x", "y"], "sampling_params": [{}, {"custom_params": value}]}
    assert refused(client.post("/generate", json=body))["code"] == "field_not_allowed"


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("value", [None, False])
def test_refused_fields_that_say_nothing_are_ignored(
    engine: FakeEngine, client: TestClient, path: str, value: object
) -> None:
    body = body_of(path, lora_path=value, return_routed_experts=value)
    assert client.post(path, json=body).status_code == 200
    assert "lora_path" not in engine.calls[-1][1]


@pytest.mark.parametrize("path", GENERATION[:2])
def test_unknown_openai_fields_are_ignored_and_go_no_further(
    engine: FakeEngine, client: TestClient, path: str
) -> None:
    assert client.post(path, json=body_of(path, store=True, metadata={})).status_code == 200
    assert not {"store", "metadata"} & set(engine.calls[-1][1])


@pytest.mark.parametrize("place", ["", "sampling_params"])
def test_unknown_native_fields_are_400(client: TestClient, place: str) -> None:
    body = body_of("/generate")
    (body[place] if place else body)["sampling_parms"] = {}
    error = refused(client.post("/generate", json=body))
    assert error["code"] == "unknown_field" and "sampling_parms" in error["message"]


@pytest.mark.parametrize("path", GENERATION)
def test_an_unknown_model_is_404_in_the_openai_shape(client: TestClient, path: str) -> None:
    error = refused(client.post(path, json=body_of(path, model="gpt-4")), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "choose 'tiny'" in error["message"]


@pytest.mark.parametrize("name", ["tiny", "/models/tiny", None])
def test_the_model_goes_by_its_name_or_path_or_none(
    engine: FakeEngine, client: TestClient, name: str | None
) -> None:
    body = body_of("/v1/completions", model=name)
    assert client.post("/v1/completions", json=body).status_code == 200
    assert engine.calls[-1][1]["model"] == "tiny"


SAMPLING = {
    "temperature": [-0.1, "1", True, [1]],
    "top_p": [0, -1, 1.1, "1"],
    "top_k": [0, -2, 1.5, True],
    "min_p": [-0.1, 1.1],
    "n": [0, -1, MAX_N + 1, 5_000_000, 1.0, "1", True],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, 2.1],
    "stop": [["x"] * 10_000, 5, [1], ["x" * 2000]],
    "stop_token_ids": [[-1], [512], [1.0], [True], ["1"], 5],
    "logit_bias": [{"-1": 1}, {"512": 1}, {"x": 1}, {"1": 101}, {" 1": 1}, {"٠": 1}, [1]],
    "regex": ["x" * 70_000, 5],
    "ignore_eos": [1, "true"],
}


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in SAMPLING.items() for value in values]
)
def test_sampling_out_of_bounds_is_400(
    engine: FakeEngine, client: TestClient, path: str, field: str, value: object
) -> None:
    body = body_of(path)
    (body["sampling_params"] if path == "/generate" else body)[field] = value
    error = refused(client.post(path, json=body))
    assert field in error["param"] or field in error["message"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *[("/v1/completions", "logprobs", value) for value in (-1, 21, 1_000_000, True, 1.0)],
        *[("/v1/completions", "max_tokens", value) for value in (0, -1, 1.5, 2**31, "3", 2**63)],
        *[("/v1/completions", "seed", value) for value in (2**63, 1.5, "1")],
        *[("/v1/completions", "best_of", value) for value in (2, 0)],
        *[("/v1/completions", name, value) for name in ("cache_salt", "extra_key")
          for value in (["a"], 5, {}, "x" * 257)],
        *[("/v1/completions", "stream", value) for value in (1, "true", {})],
        *[("/v1/completions", "stream_options", value) for value in (1, {"include_usage": 1})],
        *[("/v1/completions", "prompt", value) for value in
          (None, "", [], [""], ["a", ""], [[]], [[1], []], [1, "a"], [1, [2]], ["a", 1], 5, {},
           [-1], [512], [2**31], [2**63], [1.0], [True], [[1], [512]],
           ["a"] * (MAX_SEQUENCES + 1))],
        *[("/v1/chat/completions", "messages", value) for value in
          (None, [], "hi", [1], [{}], [{"role": 1, "content": "x"}],
           [{"role": "user", "content": 5}],
           [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
           [{"role": "user", "content": ["x"]}])],
        *[("/v1/chat/completions", "top_logprobs", value) for value in (21, -1, 1_000_000, 5)],
        *[("/v1/chat/completions", "max_completion_tokens", value) for value in (0, -1)],
        *[("/v1/chat/completions", "input_ids", value) for value in ([], [512], "x", [[1]])],
        *[("/v1/chat/completions", "chat_template_kwargs", value) for value in
          ({"chat_template": "{{ x }}"}, {"tokenize": False}, [])],
        *[("/generate", "text", value) for value in (None, "", [], [1], [""], 5)],
        *[("/generate", "extra_key", value) for value in (["a"], 5)],
        *[("/generate", "top_logprobs_num", value) for value in (21, -1, [1])],
        *[("/generate", "token_ids_logprob", value) for value in ([512], [-1], [[1]], "x")],
        *[("/generate", "sampling_params", value) for value in (5, [{}], "x")],
        *[("/generate", "logprob_start_len", value) for value in (-2, 1.5)],
    ],
)  # fmt: skip
def test_fields_out_of_bounds_are_400(
    engine: FakeEngine, client: TestClient, path: str, field: str, value: object
) -> None:
    error = refused(client.post(path, json={**body_of(path), field: value}))
    assert field.split("_")[0] in f"{error['param']} {error['message']}"
    assert engine.calls == []


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "input_ids": [1]},
        {"input_ids": ["a"]},
        {"input_ids": [[1], 2]},
        {"text": ["a", "b"], "sampling_params": [{}]},
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"text": ["a"] * 100, "sampling_params": {"n": 100}},
        {"text": ["a", "b"], "top_logprobs_num": [1]},
        {"text": ["a", "b"], "token_ids_logprob": [[1]]},
    ],
)
def test_native_batches_must_be_consistent(
    engine: FakeEngine, client: TestClient, body: dict[str, Any]
) -> None:
    refused(client.post("/generate", json=body))
    assert engine.calls == []


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2, "temperature": 0}]},
        {"input_ids": [0, 511], "return_logprob": True, "top_logprobs_num": 20},
        {"input_ids": [[0], [511]], "token_ids_logprob": [[1], []], "logprob_start_len": [0, -1]},
        {"text": "a", "sampling_params": {"temperature": 0, "top_k": -1, "stop": ["x", "y"]}},
        {"text": "ab\u0000c \U0001f600"},
    ],
)
def test_native_requests_within_the_bounds_are_served(
    client: TestClient, body: dict[str, Any]
) -> None:
    assert client.post("/generate", json=body).status_code == 200


def test_chat_takes_text_parts_tools_and_template_variables(
    engine: FakeEngine, client: TestClient
) -> None:
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "hi"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": None,
    }
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    fields = engine.calls[-1][1]
    assert fields["messages"] == body["messages"]
    assert fields["tools"] == body["tools"]
    assert "temperature" not in fields


def test_salt_and_key_cannot_be_shifted_into_each_other(
    engine: FakeEngine, client: TestClient
) -> None:
    for salt, key in (("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc")):
        client.post("/v1/completions", json=body_of("/v1/completions", cache_salt=salt,
                                                    extra_key=key))  # fmt: skip
    keys = [fields["extra_key"] for _, fields, _ in engine.calls]
    assert len(set(keys)) == 4
    assert all("cache_salt" not in fields for _, fields, _ in engine.calls)


# ---- the other routes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/redoc", "/openapi.json", "/v1", "/v1/models/", "/v1/embeddings", "/encode",
     "/v1/responses", "/v1/messages", "/server_info", "/get_server_info", "/flush_cache",
     "/health_generate", "/metrics_anything", "/healthz", "/load_lora_adapter_from_tensors",
     "/update_weights_from_disk", "/start_profile", "/abort_request", "/%2e%2e/v1/models"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_listed_is_not_there(client: TestClient, method: str, path: str) -> None:
    assert refused(client.request(method, path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/generate"), ("PUT", "/generate"), ("POST", "/v1/models")]
)
def test_other_methods_are_405(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert refused(response, 405)["code"] == "method_not_allowed"
    assert response.headers["Allow"]


def test_models_lists_the_one_served(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == 4096


def test_policies_lists_presets_constants_and_phases(client: TestClient) -> None:
    listed = client.get("/v1/policies").json()
    assert {each["id"]: (each["prefill"], each["decode"]) for each in listed["data"]} == {
        name: (policy.prefill.as_numbers(), policy.decode.as_numbers())
        for name, policy in PRESETS.items()
    }
    assert listed["default"]["id"] == "dense"
    assert listed["phases"] == ["prefill", "decode"]
    assert listed["constants"]["window"] == 256 and listed["constants"]["pruner"] == "magnitude"


def test_presets_show_what_they_were_measured_to_cost(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"kv_share": 0.78, "decode": {"kl": 0.01}}
    found = {"model": "another", "date": "2026-01-01", "presets": {"light": numbers}}
    for measured in (found, None):
        monkeypatch.setattr(routes, "measured_presets", lambda constants, m=measured: m)
        with serving(engine) as client:
            listed = client.get("/v1/policies").json()
        shown = {each["id"]: each["measured"] for each in listed["data"]}
        assert shown["light"] == (numbers if measured else None) and shown["max"] is None
        about = {"model": "another", "date": "2026-01-01"}
        assert listed["measurement"] == (about if measured else None)


def test_metrics_are_the_engines(client: TestClient) -> None:
    response = client.get("/metrics")
    assert response.status_code == 200 and response.text == "sglang:token_usage 0.5\n"


def test_the_engine_lives_as_long_as_the_application(engine: FakeEngine) -> None:
    with serving(engine):
        assert engine.started and not engine.stopped
    assert engine.stopped


# ---- liveness, readiness, limits ---------------------------------------------------------------


def test_liveness_and_readiness_turn_red_when_a_process_dies(
    engine: FakeEngine, client: TestClient
) -> None:
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    engine.alive = False
    assert refused(client.get("/health"), 503)["code"] == "engine_dead"
    refused(client.get("/ready"), 503)


def test_draining_turns_readiness_red_and_leaves_liveness_green(client: TestClient) -> None:
    assert isinstance(client.app, FastAPI)
    client.app.state.gate.close()
    assert client.get("/health").status_code == 200
    for response in (client.get("/ready"), client.post("/generate", json=body_of("/generate"))):
        assert refused(response, 503)["code"] == "stopping"
        assert int(response.headers["Retry-After"]) > 0


def test_requests_over_the_limit_are_503_while_others_run(engine: FakeEngine) -> None:
    config = RuntimeConfig(model_path="tiny", max_running_streams=1)

    async def scenario() -> None:
        engine.hold = asyncio.Event()
        transport = httpx.ASGITransport(create_app(engine, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = asyncio.create_task(client.post("/generate", json=body_of("/generate")))
            while not engine.calls:
                await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 200
            second = await client.post("/generate", json=body_of("/generate"))
            assert refused(second, 503)["code"] == "overloaded"
            assert second.headers["Retry-After"] == "1"
            engine.hold.set()
            assert (await first).status_code == 200
            third = await client.post("/generate", json=body_of("/generate"))
            assert third.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("path", GENERATION)
def test_a_client_that_leaves_aborts_its_stream(engine: FakeEngine, path: str) -> None:
    app = create_app(engine, CONFIG)
    sent: list[dict[str, Any]] = []

    async def scenario() -> None:
        raw = json.dumps(body_of(path, stream=True)).encode()
        received = asyncio.Queue[dict[str, Any]]()
        received.put_nowait({"type": "http.request", "body": raw, "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body"):  # the first event is out: hang up and never come back
                received.put_nowait({"type": "http.disconnect"})
                await asyncio.sleep(60)

        headers = [(b"content-type", b"application/json")]
        scope = {**SCOPE, "method": "POST", "path": path, "headers": headers}
        await asyncio.wait_for(app(scope, received.get, send), timeout=10)

    counter = metrics().requests.labels("dense", "disconnected")
    before = counter._value.get()
    asyncio.run(scenario())
    assert sent[0]["status"] == 200 and len(sent) == 2
    assert engine.aborted == 1
    assert app.state.gate.in_flight == 0
    assert counter._value.get() == before + 1


def test_a_signal_lets_streams_finish_refuses_new_ones_and_ends_in_order() -> None:
    engine = FakeEngine()
    with listening(engine, 20) as (server, port):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            release = hold_streams(engine)
            with client.stream(
                "POST", "/generate", json=body_of("/generate", stream=True)
            ) as open_:
                assert open_.status_code == 200
                server.handle_exit(signal.SIGTERM, None)
                assert refused(client.get("/ready"), 503)["code"] == "stopping"
                refused(client.post("/generate", json=body_of("/generate")), 503)
                assert client.get("/health").status_code == 200
                release.set()
                assert open_.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: engine.stopped)


@pytest.mark.parametrize("hurried", [False, True])
def test_what_outlives_the_drain_is_ended_with_our_error(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], hurried: bool
) -> None:
    """At the deadline, and with a second signal long before it."""
    seconds = 20 if hurried else 0.5
    with listening(engine, seconds) as (server, port), ThreadPoolExecutor(4) as clients:
        release = hold_streams(engine)

        def post(path: str, stream: bool) -> httpx.Response:
            url = f"http://127.0.0.1:{port}{path}"
            return httpx.post(url, json=body_of(path, stream=stream), timeout=20)

        try:
            streams = [clients.submit(post, "/generate", True)]
            wait_until(lambda: engine.calls)
            time.sleep(0.2)  # its first event is out
            engine.hold = asyncio.Event()
            plain = [clients.submit(post, path, False) for path in GENERATION]
            wait_until(lambda: len(engine.calls) == 4)
            begun = time.monotonic()
            for _ in range(1 + hurried):
                server.handle_exit(signal.SIGINT, None)
            for response in [each.result() for each in plain]:
                assert refused(response, 503)["code"] == "stopping"
                assert int(response.headers["Retry-After"]) > 0
            first, last = events(streams[0].result())
            assert "error" not in first and last["error"]["code"] == "stopping"
            wait_until(lambda: engine.stopped)
            assert time.monotonic() - begun < 4
        finally:
            release.set()
    assert engine.aborted == 1 and server._gate.in_flight == 0
    printed = capsys.readouterr().err
    assert "Traceback" not in printed and "ancel" not in printed
    waiting = f"stopping: waiting up to {seconds:g} s for 4 requests (Ctrl-C again ends now)\n"
    assert printed.count(waiting) == 1
    assert printed.endswith("stopping: ending 4 requests\n")


def test_clients_that_neither_read_nor_write_do_not_delay_the_end(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(engine, 20) as (server, port):
        deaf, mute = socket.socket(), socket.socket()
        with deaf, mute:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for client in (deaf, mute):
                client.settimeout(10)
                client.connect(("127.0.0.1", port))
            deaf.sendall(raw_request({"text": "a", "sampling_params": {"max_new_tokens": 4096}}))
            mute.sendall(raw_request({"text": "a"})[:-5])
            wait_until(lambda: any(each.flow.write_paused for each in connections(server)))
            wait_until(lambda: server._gate.in_flight == 2)
            server.handle_exit(signal.SIGTERM, None)
            server.handle_exit(signal.SIGTERM, None)
            assert mute.recv(4096).startswith(b"HTTP/1.1 503 ")
            wait_until(lambda: engine.stopped)
    assert engine.aborted == 1 and server._gate.in_flight == 0
    assert "Traceback" not in capsys.readouterr().err


def raw_request(fields: dict[str, Any]) -> bytes:
    body = json.dumps({**fields, "stream": True}).encode()
    lines = ("POST /generate HTTP/1.1", "Host: test", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode()
    return head + body


def connections(server: Server) -> list[Any]:
    return list(server.server_state.connections)


def test_a_stop_without_requests_is_one_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(engine, 20) as (server, _):
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: engine.stopped)
    assert capsys.readouterr().err == "stopping\n"


def test_a_timeout_of_the_engine_is_no_end_of_the_gate() -> None:
    async def late() -> None:
        raise TimeoutError("the engine's own")

    with pytest.raises(TimeoutError, match="own"):
        asyncio.run(routes.Gate(1).wait(late()))


@contextlib.contextmanager
def listening(engine: FakeEngine, drain_seconds: float) -> Iterator[tuple[Server, int]]:
    """A server on a port, in a thread that has ended when the block has."""
    app = create_app(engine, CONFIG)
    settings = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="warning", ws="none", http="h11"
    )
    server = Server(settings, app.state.gate, drain_seconds)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()


def hold_streams(engine: FakeEngine) -> threading.Event:
    """From now on a stream waits after its first output until the event is set."""
    release = threading.Event()
    outputs = engine._outputs

    async def held(*arguments: Any) -> Any:
        begun = False
        async for output in outputs(*arguments):
            while begun and not release.is_set():
                await asyncio.sleep(0.01)
            begun = True
            yield output

    engine._outputs = held  # type: ignore[method-assign]
    return release


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.01)


# ---- key and origins --------------------------------------------------------------------------


@pytest.fixture
def locked(engine: FakeEngine, tmp_path: Path) -> Iterator[TestClient]:
    file = tmp_path / "key"
    file.write_text("s3cret-ü\n", encoding="utf-8")
    config = RuntimeConfig(
        model_path="tiny", api_key_file=str(file), cors_origins=("https://app.example",)
    )
    with serving(engine, config) as client:
        yield client


KEY = "Bearer s3cret-ü".encode()


def status_with(app: ASGIApp, lines: list[bytes]) -> int:
    """Status of GET /v1/models with these Authorization lines, in bytes no client would send."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        **SCOPE,
        "method": "GET",
        "path": "/v1/models",
        "headers": [(b"authorization", line) for line in lines],
    }
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


def test_the_right_key_opens(locked: TestClient) -> None:
    assert status_with(locked.app, [KEY]) == 200


@pytest.mark.parametrize(
    "lines",
    [[], [b""], [b"Bearer"], [b"Bearer "], [b"Bearer wrong"], [KEY + b"x"], [KEY[:-1]],
     [b"bearer " + KEY[7:]], [b"Basic " + KEY[7:]], ["Bearer ключ".encode()], [b"Bearer \xff\xfe"],
     [KEY, b"Bearer wrong"]],
)  # fmt: skip
def test_any_other_key_is_401(locked: TestClient, lines: list[bytes]) -> None:
    assert status_with(locked.app, lines) == 401


def test_a_refused_key_says_how_to_send_one(locked: TestClient) -> None:
    response = locked.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    error = refused(response, 401)
    assert (error["param"], error["code"]) == ("Authorization", "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_only_probes_are_open(locked: TestClient) -> None:
    assert isinstance(locked.app, FastAPI)
    for path in ("/v1/models", "/v1/policies", "/health", "/ready", "/metrics", *GENERATION,
                 "/healthx", "/health/x", "/nothing"):  # fmt: skip
        status = locked.get(path).status_code
        assert status == (200 if path in OPEN_PATHS else 401), path


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/policies", "/metrics"])
def test_what_can_be_read_can_be_asked_for_by_head(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == client.get(path).status_code == 200


def test_browsers_of_listed_origins_may_ask_and_read_our_headers(locked: TestClient) -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization, hierasparse-policy"}  # fmt: skip
    assert locked.options("/v1/chat/completions", headers=asked).status_code == 200
    origin = {"Origin": "https://app.example"}
    response = locked.post("/generate", json=body_of("/generate"), headers=origin)
    assert response.status_code == 401  # and still readable by the page
    assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Access-Control-Allow-Credentials" not in response.headers
    exposed = response.headers["Access-Control-Expose-Headers"]
    assert all(name in exposed for name in POLICY_HEADERS)


def test_browsers_of_other_origins_get_no_permission(locked: TestClient) -> None:
    response = locked.get("/health", headers={"Origin": "https://evil.example"})
    assert response.status_code == 200
    assert "Access-Control-Allow-Origin" not in response.headers


def test_without_configured_origins_there_is_no_cors(client: TestClient) -> None:
    response = client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert "Access-Control-Allow-Origin" not in response.headers
