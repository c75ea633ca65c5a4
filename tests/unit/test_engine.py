"""What the engine adds to SGLang, on a manager that behaves like it: policy in, report out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from hs_runtime.policies import CUSTOM_PARAM, PRESETS, SparsityPolicy
from hs_server import engine
from hs_server.engine import REPORT_KEY, Call
from hs_server.schemas import CLIENT_GONE, ApiError

FAST = PRESETS["fast"]
COUNTS = {"dense_blocks": 1, "sparse_blocks": 2, "kv_bytes": 3, "dense_equivalent_bytes": 4}


def report(policy: SparsityPolicy) -> str:
    return json.dumps({"policy": policy.to_json(), **COUNTS})


class Manager:
    """Yields what it is told to, and records what it was asked and told to abort."""

    context_len = 99

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.asked: list[Any] = []
        self.aborted: list[str] = []

    async def generate_request(self, wish: Any, request: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(wish.sampling_params)
        for output in self.outputs:
            yield output

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


def output(rid: str, entries: list[str | None], *, finished: bool = True) -> dict[str, Any]:
    reason = {"type": "stop"} if finished else None
    return {"meta_info": {"id": rid, "finish_reason": reason, REPORT_KEY: entries}}


def carried(manager: Manager, sampling_params: Any, policy: SparsityPolicy = FAST) -> Call:
    """The call after all outputs of the manager have passed."""
    request: Any = SimpleNamespace(state=SimpleNamespace())
    call = request.state.hierasparse = Call(policy, request)
    wish = SimpleNamespace(sampling_params=sampling_params, rid="r")

    async def run() -> None:
        async for _ in engine._PolicyCarrier(manager).generate_request(wish, request):
            pass

    asyncio.run(run())
    return call


@pytest.mark.parametrize("given", [None, {}, {"n": 2}, {"custom_params": {CUSTOM_PARAM: "forged"}}])
def test_every_generation_leaves_with_its_policy(given: dict[str, Any] | None) -> None:
    manager = Manager()
    carried(manager, given)
    (sent,) = manager.asked
    assert sent == {**(given or {}), "custom_params": {CUSTOM_PARAM: FAST.to_json()}}


def test_every_member_of_a_batch_leaves_with_the_policy() -> None:
    manager = Manager()
    carried(manager, [{"temperature": 0}, {}])
    assert [each["custom_params"] for each in manager.asked[0]] == 2 * [
        {CUSTOM_PARAM: FAST.to_json()}
    ]


def test_the_last_report_counts_and_leaves_the_meta_info() -> None:
    last = output("a", [None, report(FAST), None])
    call = carried(Manager(output("a", [None], finished=False), last), {})
    assert call.usage()["sparse_blocks"] == 2
    assert REPORT_KEY not in last["meta_info"]


def test_reports_of_a_batch_are_kept_apart_and_add_up() -> None:
    call = carried(Manager([output("a", [report(FAST)]), output("b", [report(FAST)])]), {})
    assert call.usage("a")["kv_bytes"] == 3
    assert call.usage()["kv_bytes"] == 6
    assert call.usage("c")["kv_bytes"] is None


@pytest.mark.parametrize("entries", [[], [None, None]])
def test_an_unreported_sequence_has_no_counts(entries: list[str | None]) -> None:
    assert carried(Manager(output("a", entries)), {}).usage()["dense_blocks"] is None


def test_another_policy_than_asked_for_is_never_passed_over() -> None:
    with pytest.raises(RuntimeError, match="asked for the policy"):
        carried(Manager(output("a", [report(PRESETS["dense"])])), {})


@pytest.mark.parametrize("text", ["{}", "x", "[]", json.dumps({"policy": "fast", **COUNTS})])
def test_a_malformed_report_is_a_defect(text: str) -> None:
    with pytest.raises(RuntimeError, match="report is malformed"):
        carried(Manager(output("a", [text])), {})


def test_a_generation_without_its_request_is_a_defect() -> None:
    async def run() -> None:
        await anext(engine._PolicyCarrier(Manager()).generate_request(SimpleNamespace()))

    with pytest.raises(RuntimeError, match="has no policy"):
        asyncio.run(run())


@pytest.mark.parametrize(("rid", "aborted"), [("r", ["r"]), (["r", "s"], ["r", "s"]), (None, [])])
def test_abort_names_all_requests_of_a_call(rid: Any, aborted: list[str]) -> None:
    manager = Manager()
    request: Any = SimpleNamespace(state=SimpleNamespace(hierasparse_wish=SimpleNamespace(rid=rid)))
    engine._PolicyCarrier(manager).abort(Call(FAST, request))
    assert manager.aborted == aborted


def test_the_carrier_is_the_manager_in_everything_else() -> None:
    assert engine._PolicyCarrier(Manager()).context_len == 99


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ValueError("too odd"), 400, "invalid_value", None),
        (ValueError("exceeds the context length"), 400, "context_length_exceeded", None),
        (ValueError("Input length (9 tokens) exceeds the maximum allowed length (8 tokens). "
                    "Use a shorter input or enable --allow-auto-truncate."), 400,
         "context_length_exceeded", None),
        (ValueError("Request is disconnected from the client side"), CLIENT_GONE, "client_gone",
         None),
        (HTTPException(503, "The request queue is full."), 503, "overloaded", 1),
        (HTTPException(500, "at /srv/x.py"), 500, "engine_failed", None),
        (ApiError(400, "x", code="own"), 400, "own", None),
    ],
)  # fmt: skip
def test_refusals_by_sglang_get_our_status_and_code(
    error: Exception, status: int, code: str, retry_after: int | None
) -> None:
    refusal = engine._refusal(error)
    assert isinstance(refusal, ApiError)
    assert (refusal.status, refusal.code, refusal.retry_after) == (status, code, retry_after)
    assert "/srv" not in refusal.message and "--" not in refusal.message


def test_a_defect_stays_what_it_is() -> None:
    error = KeyError("x")
    assert engine._refusal(error) is error


def test_a_sequence_that_the_scheduler_refused_raises_and_an_abort_does_not() -> None:
    engine._raise_if_failed(None)
    engine._raise_if_failed({"type": "stop"})
    engine._raise_if_failed({"type": "abort", "message": "by the client"})
    with pytest.raises(ApiError, match="needs 9 bytes"):
        engine._raise_if_failed({"type": "abort", "status_code": 400, "message": "needs 9 bytes"})


def test_an_error_among_sglangs_events_is_raised_and_what_runs_is_aborted() -> None:
    event = 'data: {"error": {"object": "error", "message": "no room", "code": 503}}\n\n'

    async def events() -> AsyncGenerator[str, None]:
        yield "data: {}\n\n"
        yield event

    manager = Manager()
    self = SimpleNamespace(_carrier=engine._PolicyCarrier(manager))
    request: Any = SimpleNamespace(state=SimpleNamespace(hierasparse_wish=SimpleNamespace(rid="r")))
    received: list[bytes] = []

    async def run() -> None:
        stream = engine.SGLangEngine._openai_stream(self, events(), Call(FAST, request))  # type: ignore[arg-type]
        async for each in stream:
            received.append(each)

    with pytest.raises(ApiError, match="no room") as caught:
        asyncio.run(run())
    assert (caught.value.status, received) == (503, [b"data: {}\n\n"])
    assert manager.aborted == ["r"]
