"""A real server over real HTTP: policies in, effective policies and block counts out, and every
wish that cannot be granted refused before a token is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serving

pytestmark = pytest.mark.integration

PROMPT = "The quick brown fox jumps over the lazy dog. " * 24  # 1,080 bytes, each a token
OPTIONS = ("--segment", "128", "--window", "64", "--served-model-name", "tiny")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("http") / "log"
    arguments = (
        *("--max-total-tokens", "4096", "--chunked-prefill-size", "512"),
        "--constrained-json-disable-any-whitespace",  # or random weights write nothing else
    )
    with serving(tiny, log, *OPTIONS, *arguments) as running:
        yield running


def body(route: str, **extra: Any) -> dict[str, Any]:
    if route == "/generate":
        return {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}} | extra
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    if route.endswith("chat/completions"):
        return asked | {"messages": [{"role": "user", "content": PROMPT}]} | extra
    return asked | {"prompt": PROMPT} | extra


def complete(server: ServerProcess, headers: dict[str, str], **extra: Any) -> httpx.Response:
    return server.client.post(
        "/v1/completions", json=body("/v1/completions", **extra), headers=headers
    )


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_two_policies_are_computed_on_differently_compressed_blocks(server: ServerProcess) -> None:
    answers = {}
    for name in ("dense", "max"):
        response = complete(server, {"HieraSparse-Policy": name})
        assert response.status_code == 200, response.text
        assert response.headers["hierasparse-policy"] == name
        answers[name] = response.json()
    dense, sparse = (answers[name]["usage"]["hierasparse"] for name in ("dense", "max"))
    assert dense["sparse_blocks"] == 0 < sparse["sparse_blocks"]
    assert sparse["kv_bytes"] < dense["kv_bytes"] == dense["dense_equivalent_bytes"]
    assert sparse["dense_equivalent_bytes"] == dense["dense_equivalent_bytes"]
    again = complete(server, {"HieraSparse-Policy": "max"}).json()
    assert again["choices"][0]["text"] == answers["max"]["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_generation_route_honours_the_policy(
    server: ServerProcess, route: str, stream: bool
) -> None:
    headers = {"HieraSparse-Prefill": "k=0.5, v=1.0"}
    extra = {"stream_options": {"include_usage": True}} if route != "/generate" and stream else {}
    response = server.client.post(
        route, json=body(route, **({"stream": True} if stream else {}), **extra), headers=headers
    )
    assert response.status_code == 200, response.text
    assert response.headers["hierasparse-policy"] == "custom"
    assert response.headers["hierasparse-decode"] == "k=0.5, v=1.0"
    last = events(response)[-1] if stream else response.json()
    usage = last["meta_info"] if route == "/generate" else last["usage"]
    assert usage["hierasparse"]["sparse_blocks"] > 0


def test_the_body_object_serves_clients_that_cannot_set_headers(server: ServerProcess) -> None:
    response = complete(server, {}, hierasparse={"policy": "balanced"})
    assert response.headers["hierasparse-policy"] == "balanced"
    both = complete(server, {"HieraSparse-Policy": "max"}, hierasparse={"policy": "balanced"})
    assert both.headers["hierasparse-policy"] == "max"  # the header wins


REFUSED = [
    ({"HieraSparse-Policy": "turbo"}, "HieraSparse-Policy"),
    ({"HieraSparse-Prefill": "k=2"}, "HieraSparse-Prefill"),
    ({"HieraSparse-Prefill": "k=nan"}, "HieraSparse-Prefill"),
    ({"HieraSparse-Prefill": "k=0.5, k=0.6"}, "HieraSparse-Prefill"),
    ({"HieraSparse-Prefill": "q=0.5"}, "HieraSparse-Prefill"),
    ({"HieraSparse-Decode": "k=(0.5)"}, "HieraSparse-Decode"),
    ({"HieraSparse-Prefill": "v=1.0", "HieraSparse-Decode": "v=0.5"}, "HieraSparse-Decode"),
    ({"HieraSparse-Sink": "64"}, "HieraSparse-Sink"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("headers", "param"), REFUSED)
def test_a_wish_that_cannot_be_granted_is_a_400_that_names_the_header(
    server: ServerProcess, headers: dict[str, str], param: str, stream: bool
) -> None:
    response = complete(server, headers, stream=stream)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].lower() == param.lower()
    assert error["message"] and error["code"]


def test_clients_may_not_set_the_key_that_carries_the_policy(server: ServerProcess) -> None:
    response = complete(server, {}, custom_params={"hs_policy": "{}"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "custom_params"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_can_never_fit_names_bytes_and_tokens(
    server: ServerProcess, stream: bool
) -> None:
    long = "x" * 4600  # tokens; 4,096 dense ones do not quite fit either
    response = complete(server, {"HieraSparse-Policy": "dense"}, prompt=long, stream=stream)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "bytes" in message and "tokens" in message
    fits = complete(server, {"HieraSparse-Policy": "max"}, prompt=long, max_tokens=2)
    assert fits.status_code == 200, fits.text
    assert fits.json()["usage"]["prompt_tokens"] == 4600


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@pytest.mark.parametrize("name", ["dense", "fast", "max"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(
    server: ServerProcess, route: str, name: str
) -> None:
    headers = {"HieraSparse-Policy": name}
    whole = server.client.post(route, json=body(route, max_tokens=40), headers=headers).json()
    (choice,) = whole["choices"]
    streamed = server.client.post(
        route,
        json=body(route, max_tokens=40, stream=True, stream_options={"include_usage": True}),
        headers=headers,
    )
    said = events(streamed)
    assert text_of(said) == (choice["text"] if "text" in choice else choice["message"]["content"])
    counts = said[-1]["usage"]["hierasparse"], whole["usage"]["hierasparse"]
    assert counts[0] == counts[1]
    assert said[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_usage_adds_up_the_blocks_of_all_answers(server: ServerProcess) -> None:
    headers = {"HieraSparse-Policy": "max"}
    one = complete(server, headers).json()
    several = complete(server, headers, prompt=[PROMPT, PROMPT], n=2).json()
    assert [c["text"] for c in several["choices"]] == [one["choices"][0]["text"]] * 4
    for count in ("dense_blocks", "sparse_blocks", "kv_bytes", "dense_equivalent_bytes"):
        assert several["usage"]["hierasparse"][count] == 4 * one["usage"]["hierasparse"][count] > 0


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}
GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA},
            }
        },
        r'\s*\{\s*"ok"\s*:\s*(true|false)\s*\}\s*',
    ),
    ("/v1/completions", {"regex": "(yes|no) sir"}, "(yes|no) sir"),
    ("/v1/completions", {"ebnf": 'root ::= "left" | "right"'}, "left|right"),
    (
        "/generate",
        {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "regex": "[ab]{8}"}},
        "[ab]{8}",
    ),
]


@pytest.mark.parametrize("policy", ["dense", "max"])
@pytest.mark.parametrize(("route", "asked", "form"), GRAMMARS, ids=["json", "regex", "ebnf", "own"])
def test_an_answer_has_the_form_that_was_asked_for(
    server: ServerProcess, route: str, asked: dict[str, Any], form: str, policy: str
) -> None:
    extra = asked if route == "/generate" else asked | {"max_tokens": 64}
    response = server.client.post(
        route, json=body(route, **extra), headers={"HieraSparse-Policy": policy}
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    if route == "/generate":
        text = answer["text"]
    elif "chat" in route:
        text = answer["choices"][0]["message"]["content"]
    else:
        text = answer["choices"][0]["text"]
    assert re.fullmatch(form, text), text


def test_a_tool_that_must_be_called_is_called(server: ServerProcess) -> None:
    """As text, since no `--tool-call-parser` says how the model writes calls."""
    route = "/v1/chat/completions"
    asked = body(route, tools=[TOOL], tool_choice="required", max_tokens=96)
    response = server.client.post(route, json=asked)
    assert response.status_code == 200, response.text
    (call,) = json.loads(response.json()["choices"][0]["message"]["content"])
    assert call["name"] == "answer" and isinstance(call["parameters"]["ok"], bool)


def test_a_grammar_that_is_none_is_a_400(server: ServerProcess) -> None:
    response = complete(server, {}, ebnf="root ::= nowhere")
    assert response.status_code == 400, response.text
    assert complete(server, {}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(server: ServerProcess, stream: bool) -> None:
    headers = {"HieraSparse-Policy": "fast"}
    text = complete(server, headers, max_tokens=40).json()["choices"][0]["text"]
    # A letter that the answer reaches late; half of its bytes are no letters at all.
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable() and c not in text[:3])
    response = complete(server, headers, max_tokens=40, stop=[stop], stream=stream)
    if stream:
        said = events(response)
        got = text_of(said)
        reason = [c["finish_reason"] for e in said for c in e["choices"]][-1]
    else:
        (choice,) = response.json()["choices"]
        got, reason = choice["text"], choice["finish_reason"]
    assert reason == "stop" and got == text[: text.index(stop)]


def test_the_other_routes(server: ServerProcess) -> None:
    assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["tiny"]
    policies = server.client.get("/v1/policies").json()
    names = [each.get("policy") or each.get("id") or each["name"] for each in policies["data"]]
    assert names == ["dense", "light", "balanced", "fast", "max"]
    assert policies["constants"]["segment"] == 128
    assert server.client.get("/health").status_code == 200
    metrics = server.client.get("/metrics").text
    assert "hierasparse_requests_total" in metrics and "sglang:" in metrics
    for unknown in ("/flush_cache", "/server_info", "/v1/embeddings"):
        missing = server.client.post(unknown, json={})
        assert missing.status_code == 404 and missing.json()["error"]["type"]


@pytest.mark.parametrize(
    "field",
    [
        {"rid": "eval-0"},
        {"custom_params": {"tap_folder": "/tmp"}},
        {"sampling_params": {"max_new_tokens": 1, "custom_params": {"tap_folder": "/tmp"}}},
        {"tap_folder": "/tmp"},
    ],
)
def test_a_request_cannot_ask_for_the_evaluations_tap(
    server: ServerProcess, field: dict[str, Any]
) -> None:
    """It finds its jobs by a request's id, in a folder that its process target is given."""
    response = server.client.post("/generate", json=body("/generate") | field)
    assert response.status_code == 400, response.text
    assert next(iter(field)) in response.text or "custom_params" in response.text


def test_zz_sigterm_ends_the_server_with_code_zero(server: ServerProcess) -> None:
    assert server.stop() == 0
