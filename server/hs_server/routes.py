"""The routes there are. Generation goes: headers and body -> policy and fields -> engine -> answer.

`/health` says that the processes run: for a liveness probe; a long prefill cannot turn it red, and
it costs no generation. `/ready` says that new requests are taken: for readiness probes and load
balancers; it is 503 from the first moment of a drain. Both need no key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hs_runtime.config import RuntimeConfig
from hs_runtime.evaluation.presets import measured_presets
from hs_runtime.metrics import metrics
from hs_runtime.policies import PHASES, PRESETS, PolicyError, SparsityPolicy
from hs_server.engine import Call, Engine, Fields
from hs_server.policy_header import REQUEST_HEADERS, effective_policy, response_headers
from hs_server.schemas import (
    CLIENT_GONE,
    ApiError,
    Limits,
    chat_fields,
    completion_fields,
    generate_fields,
    parse_json,
    policy_object,
)

_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = 1
_DRAIN_RETRY_SECONDS = 5
_CUT_SHORT = "the server stopped before it had finished this request"
_DONE = b"data: [DONE]\n\n"

Check = Callable[[dict[str, Any], Limits], dict[str, Any]]
Start = Callable[[Fields, Call], Awaitable[Any]]
_T = TypeVar("_T")


class Gate:
    """Counts the generation requests being served: at most `limit`, none once it is closed.

    What they wait for, they await through `wait`, so that `end` can end them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.closed = False
        self.ended = False
        self._waits: set[asyncio.Timeout] = set()

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        """Close, and raise ApiError 503 in every `wait`, those of now and those to come."""
        self.closed = self.ended = True
        now = asyncio.get_running_loop().time()
        while self._waits:
            self._waits.pop().reschedule(now)

    async def wait(self, awaitable: Awaitable[_T]) -> _T:
        """The awaitable's result; at `end` it is cancelled, and ApiError 503 is raised."""
        if self.ended:
            raise _stopping(_CUT_SHORT)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._waits.add(limit)
                try:
                    return await awaitable
                finally:
                    self._waits.discard(limit)
        except TimeoutError:
            if not limit.expired():  # the awaitable's own
                raise
            raise _stopping(_CUT_SHORT) from None

    def enter(self) -> None:
        if self.closed:
            raise _stopping("the server is stopping")
        if self.in_flight >= self.limit:
            raise ApiError(
                503,
                f"{self.limit} requests are being served, which is this server's limit",
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            )
        self.in_flight += 1
        metrics().in_flight.set(self.in_flight)

    def leave(self) -> None:
        self.in_flight -= 1
        metrics().in_flight.set(self.in_flight)


def _stopping(message: str) -> ApiError:
    return ApiError(503, message, code="stopping", retry_after=_DRAIN_RETRY_SECONDS)


class JsonAnswer(JSONResponse):
    """JSON in which an infinite log-probability is null, since JSON has no infinity."""

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


class EventStream(StreamingResponse):
    """Server-sent events; the generator is closed at once when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        # A proxy that buffers would turn a stream into one late answer.
        extra = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers={**headers, **extra}, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


class _Meter:
    """One request's metrics, and its place in the gate; `close` may be called once."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._started = time.monotonic()
        self.preset = "none"
        self.outcome = "disconnected"

    def first_event(self) -> None:
        seconds = time.monotonic() - self._started
        metrics().first_token_seconds.labels(self.preset).observe(seconds)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, ApiError):
            self.outcome = "failed" if isinstance(error, Exception) else "disconnected"
        elif error.status == CLIENT_GONE:
            self.outcome = "disconnected"
        elif error.status == 503:
            self.outcome = "unavailable"
        else:
            self.outcome = "refused" if error.status < 500 else "failed"

    def close(self) -> None:
        self._gate.leave()
        if self.outcome == "ok":
            seconds = time.monotonic() - self._started
            metrics().request_seconds.labels(self.preset).observe(seconds)
        metrics().requests.labels(self.preset, self.outcome).inc()


def build_router(engine: Engine, config: RuntimeConfig, gate: Gate) -> APIRouter:
    limits = Limits(engine.model.vocab_size, _model_names(config))
    started = int(time.time())

    async def begin(
        request: Request, check: Check, start: Start, meter: _Meter
    ) -> tuple[Call, Any]:
        policy, fields = await _read(request, check, limits, config)
        meter.preset = policy.preset
        call = Call(policy, request)
        return call, await start(fields, call)

    async def answer(request: Request, check: Check, start: Start, patch: _Patch) -> Response:
        gate.enter()
        meter = _Meter(gate)
        streaming = False
        try:
            call, reply = await gate.wait(begin(request, check, start, meter))
            headers = response_headers(call.policy, config.constants)
            if isinstance(reply, AsyncGenerator):
                # The first event is awaited here: a refusal by the engine still sets the status.
                events = _events(reply, call, patch, meter, gate)
                await anext(events)
                streaming = True
                return EventStream(events, headers)
            response = JsonAnswer(patch.reply(reply, call), headers=headers)
            meter.outcome = "ok"
            return response
        except BaseException as error:
            meter.fail(error)
            raise
        finally:
            if not streaming:
                meter.close()

    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat_fields, engine.chat, _OPENAI)

    async def completions(request: Request) -> Response:
        return await answer(request, completion_fields, engine.complete, _OPENAI)

    async def generate(request: Request) -> Response:
        return await answer(request, generate_fields, engine.generate, _NATIVE)

    async def models() -> Response:
        card = {
            "id": limits.model_names[0],
            "object": "model",
            "created": started,
            "owned_by": "hierasparse",
            "max_model_len": engine.model.context_length,
        }
        return JsonAnswer({"object": "list", "data": [card]})

    measured = measured_presets(config.constants)

    async def policies() -> Response:
        """`measured` is what a preset cost on the model that `measurement` names, null where the
        constants of this server were not measured."""
        numbers = measured["presets"] if measured else {}
        about = {k: v for k, v in measured.items() if k != "presets"} if measured else None
        return JsonAnswer(
            {
                "object": "list",
                "data": [
                    {**_described(name, policy), "measured": numbers.get(name)}
                    for name, policy in PRESETS.items()
                ],
                "measurement": about,
                "default": _described(config.default_policy.preset, config.default_policy),
                "phases": list(PHASES),
                "headers": list(REQUEST_HEADERS),
                "constants": config.constants.as_dict(),
            }
        )

    async def health() -> Response:
        if not engine.is_alive():
            raise ApiError(503, "a process of the engine does not run", code="engine_dead")
        return JsonAnswer({"status": "alive"})

    async def ready() -> Response:
        if gate.closed:
            raise _stopping("the server is stopping")
        await health()
        return JsonAnswer({"status": "ready"})

    async def exposition() -> Response:
        text, content_type = engine.exposition()
        return Response(text, media_type=content_type)

    router = APIRouter(redirect_slashes=False)
    for path, endpoint in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
        ("/generate", generate),
    ):
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path, view in (
        ("/v1/models", models),
        ("/v1/policies", policies),
        ("/health", health),
        ("/ready", ready),
        ("/metrics", exposition),
    ):
        router.add_api_route(path, view, methods=["GET", "HEAD"], response_model=None)
    return router


async def _read(
    request: Request, check: Check, limits: Limits, config: RuntimeConfig
) -> tuple[SparsityPolicy, dict[str, Any]]:
    """Policy and checked fields of a request, before anything is tokenised."""
    raw = await _body(request, config.max_request_bytes)
    document = parse_json(raw)
    try:
        policy = effective_policy(
            request.scope["headers"], policy_object(raw, document), config.default_policy
        )
    except PolicyError as error:
        metrics().rejected.labels(error.code).inc()
        raise ApiError(400, error.message, error.param, error.code) from None
    return policy, check(document, limits)


async def _body(request: Request, limit: int) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            415,
            f"the content type {media_type[:64]!r} is not accepted: send application/json",
            "Content-Type",
            "unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415,
            "compressed bodies are not accepted: send the body as it is",
            "Content-Encoding",
            "unsupported_content_encoding",
        )
    declared = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", code="incomplete_body") from None
    return b"".join(parts)


async def _events(
    reply: AsyncGenerator[Any, None], call: Call, patch: _Patch, meter: _Meter, gate: Gate
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. The first item is empty and means that the engine has begun.

    An error after that cannot change the status any more: it becomes an event, and the stream ends.
    """
    begun = False
    try:
        async with aclosing(reply):
            while (item := await gate.wait(anext(reply, None))) is not None:
                if not begun:
                    begun = True
                    meter.first_event()
                    yield b""
                yield patch.event(item, call)
        if not begun:
            raise ApiError(500, "the engine ended before its first token", code="engine_failed")
        if patch.ends_itself:
            yield _DONE
        meter.outcome = "ok"
    except Exception as error:
        if not begun:
            raise
        meter.fail(error)
        if not isinstance(error, ApiError):
            _LOG.exception("a stream failed")
            error = ApiError(500, "the engine failed on this request", code="engine_failed")
        yield b"data: " + to_json(error.body()) + b"\n\n"
        yield _DONE
    finally:
        if begun:
            meter.close()


class _Patch:
    """Adds what the policy cost to the answers of one API."""

    ends_itself = False  # whether this layer writes the final [DONE]

    def reply(self, reply: Any, call: Call) -> Any:
        raise NotImplementedError

    def event(self, item: Any, call: Call) -> bytes:
        raise NotImplementedError


class _OpenAIPatch(_Patch):
    """`usage.hierasparse`, in streams in the usage chunk that ends them."""

    def reply(self, reply: Any, call: Call) -> Any:
        self._add(reply["usage"], call)
        return reply

    def event(self, item: bytes, call: Call) -> bytes:
        # Only the chunk without choices carries the usage of all; others pass unparsed.
        if b'"choices":[]' not in item or b'"usage":{' not in item:
            return item
        chunk = json.loads(item.removeprefix(b"data: "))
        self._add(chunk["usage"], call)
        return b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"

    def _add(self, usage: dict[str, Any], call: Call) -> None:
        if usage.get("prompt_tokens_details") is None:
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        usage["hierasparse"] = call.usage()


class _NativePatch(_Patch):
    """`meta_info.hierasparse` of each finished sequence."""

    ends_itself = True

    def reply(self, reply: Any, call: Call) -> Any:
        for output in reply if isinstance(reply, list) else [reply]:
            self._add(output, call)
        return reply

    def event(self, item: dict[str, Any], call: Call) -> bytes:
        if item["meta_info"].get("finish_reason"):
            self._add(item, call)
        return b"data: " + to_json(item, inf_nan_mode="null") + b"\n\n"

    def _add(self, output: dict[str, Any], call: Call) -> None:
        output["meta_info"]["hierasparse"] = call.usage(output["meta_info"]["id"])


_OPENAI, _NATIVE = _OpenAIPatch(), _NativePatch()


def _model_names(config: RuntimeConfig) -> tuple[str, ...]:
    """What the `model` field may say: the served name first, and the path it was started with."""
    return tuple(dict.fromkeys((config.model_name, config.model_path)))


def _described(name: str, policy: SparsityPolicy) -> dict[str, Any]:
    return {
        "id": name,
        "object": "policy",
        "prefill": policy.prefill.as_numbers(),
        "decode": policy.decode.as_numbers(),
        "bits": policy.bits,
    }
