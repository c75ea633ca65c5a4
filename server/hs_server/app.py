"""The application: the allow-list of routes, the key, CORS, and one error shape for everything."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hs_runtime.config import RuntimeConfig, read_api_key
from hs_server.engine import Engine
from hs_server.policy_header import REQUEST_HEADERS, RESPONSE_HEADERS
from hs_server.routes import Gate, build_router
from hs_server.schemas import ApiError

_LOG = logging.getLogger(__name__)
OPEN_PATHS = frozenset(("/health", "/ready"))  # probes carry no key
CLOSING_SECONDS = 5  # for clients to take the rest of their answers once nothing runs any more
_HURRIED_SECONDS = 1  # the same after a second signal
_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(engine: Engine, config: RuntimeConfig) -> FastAPI:
    """The server's ASGI application. `app.state.gate` counts and, once closed, refuses requests.

    The engine is started and stopped with the application. Raises ConfigError for an unusable key.
    """
    gate = Gate(config.max_running_streams)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        gate.close()
        await engine.stop()

    app = FastAPI(
        title="HieraSparse",
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gate = gate
    app.include_router(build_router(engine, config, gate))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_defect)
    key = read_api_key(config.api_key_file)
    if key:
        app.add_middleware(RequireKey, key=key)
    if config.cors_origins:  # added last, so that it also answers for the key's refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["Authorization", "Content-Type", *REQUEST_HEADERS],
            expose_headers=[*RESPONSE_HEADERS, "Retry-After"],
        )
    return app


class RequireKey:
    """Refuses requests without `Authorization: Bearer <key>`, except on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, key: bytes) -> None:
        self._app = app
        self._expected = b"Bearer " + key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            # Bytes, since comparing text outside ASCII raises; one header, since two may differ.
            if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong: send 'Authorization: Bearer <key>'",
                    "Authorization",
                    "invalid_api_key",
                )
                await _response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Server(uvicorn.Server):
    """Stops in order: refuses new requests, finishes those it has, then closes.

    At the first signal `/ready` turns red and generation answers 503, while the port stays open
    for as long as requests run, `drain_seconds` at most. Requests that run longer are ended: the
    engine is told to abort them and their clients get the error `stopping`, in streams as the last
    event. The second signal does that at once. Connections whose clients do not read are cut after
    `CLOSING_SECONDS`, before uvicorn's `timeout_graceful_shutdown`, which must be larger, would
    cancel tasks with a traceback for each.

    Unlike uvicorn it does not raise the signal again: an orderly stop is exit code 0.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, drain_seconds: float) -> None:
        super().__init__(config)
        self._gate = gate
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None
        self._announced = False
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only takes note: a signal may come in the middle of anything, a write to stderr too."""
        if self._deadline is None:
            self._gate.close()
            self._deadline = time.monotonic() + self._drain_seconds
        else:
            self._hurried = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            if not self._announced:
                self._announced = True
                _say(_waiting(self._gate.in_flight, self._drain_seconds))
            if self._gate.in_flight == 0 or time.monotonic() >= self._deadline:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._gate.in_flight:
            _say(f"stopping: ending {_requests(self._gate.in_flight)}")
        self._gate.end()
        cutting = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_off(self) -> None:
        """Drop the connections that are still open when the time to take the answers is over."""
        begun = time.monotonic()
        while time.monotonic() < begun + (_HURRIED_SECONDS if self._hurried else CLOSING_SECONDS):
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _waiting(requests: int, seconds: float) -> str:
    if not requests:
        return "stopping"
    what = _requests(requests)
    return f"stopping: waiting up to {seconds:g} s for {what} (Ctrl-C again ends now)"


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return JSONResponse(error.body(), error.status, headers)


async def _on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _response(error)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path[:128]}: {phrase}"
    code = _CODES.get(error.status_code, "invalid_request")
    return _response(ApiError(error.status_code, message, code=code), dict(error.headers or {}))


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    """Anything unforeseen: the client learns nothing of our insides, the log learns everything."""
    _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _response(ApiError(500, "the server failed on this request", code="internal_error"))
