"""What the routes ask of an inference engine (`Engine`), and SGLang as one (`SGLangEngine`).

The only file of the server that imports SGLang, and only inside functions: the sgl_kernel stand-in
and the plugin must be in place first, and the rest of the server needs none of it.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import HTTPException, Request
from pydantic import ValidationError

from hs_runtime.config import RuntimeConfig
from hs_runtime.metrics import exposition
from hs_runtime.policies import CUSTOM_PARAM, PolicyError, SparsityPolicy
from hs_server.schemas import CLIENT_GONE, ApiError, malformed_fields

_LOG = logging.getLogger(__name__)
_TOO_LONG = ("context length", "the maximum allowed length")  # of a model, of this KV cache
_OPERATORS_ADVICE = " or enable --allow-auto-truncate"  # no client can follow it
REPORT_KEY = "hierasparse"  # in SGLang's meta_info: a list with one JSON text or None per token


@dataclass(frozen=True, slots=True)
class Report:
    """What the scheduler says about one finished sequence: its blocks of all layers and heads."""

    policy: SparsityPolicy
    dense_blocks: int
    sparse_blocks: int
    kv_bytes: int
    dense_equivalent_bytes: int

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Raises PolicyError, KeyError, TypeError or ValueError on anything else than a report."""
        data = json.loads(text)
        policy = SparsityPolicy.from_json(data["policy"])
        counts = {each.name: int(data[each.name]) for each in fields(cls) if each.name != "policy"}
        return cls(policy=policy, **counts)


@dataclass(slots=True)
class Call:
    """One HTTP request on its way through the engine: its policy in, its reports out."""

    policy: SparsityPolicy
    request: Request
    reports: dict[str, Report] = field(default_factory=dict)  # by the sequence's id

    def usage(self, sequence: str | None = None) -> dict[str, Any]:
        """The `hierasparse` object of a response: of one sequence, or added up over all.

        Counts are None if the engine reported nothing, as for a request that was aborted.
        """
        if sequence is None:
            chosen = list(self.reports.values())
        else:
            chosen = [self.reports[sequence]] if sequence in self.reports else []
        usage: dict[str, Any] = {
            "policy": self.policy.preset,
            "prefill": self.policy.prefill.as_numbers(),
            "decode": self.policy.decode.as_numbers(),
        }
        for name in ("dense_blocks", "sparse_blocks", "kv_bytes", "dense_equivalent_bytes"):
            usage[name] = sum(getattr(report, name) for report in chosen) if chosen else None
        return usage


@dataclass(frozen=True, slots=True)
class ModelCard:
    vocab_size: int
    context_length: int  # tokens of prompt and answer together


Fields = Mapping[str, Any]
Events = AsyncGenerator[bytes, None]  # server-sent events, each with its blank line
Outputs = AsyncGenerator[dict[str, Any], None]  # native outputs; the route turns them into events


class Engine(Protocol):
    """Runs requests whose fields and policy are already checked.

    `fields` are those that `schemas` lets through. With `stream` an async generator comes back,
    whose first item may raise; closing it early aborts the request. Refusals are `ApiError`.
    """

    @property
    def model(self) -> ModelCard: ...

    async def start(self) -> None:
        """Called in the event loop that will serve, before the first request."""

    async def stop(self) -> None:
        """Called when no more requests will come; ends the engine's processes."""

    def is_alive(self) -> bool:
        """Whether all processes run. Cheap, and true during a prefill of any length."""

    def exposition(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""

    async def chat(self, fields: Fields, call: Call) -> dict[str, Any] | Events: ...

    async def complete(self, fields: Fields, call: Call) -> dict[str, Any] | Events: ...

    async def generate(
        self, fields: Fields, call: Call
    ) -> dict[str, Any] | list[dict[str, Any]] | Outputs: ...


class SGLangEngine:
    """SGLang 0.5.17 in this process, its scheduler and detokenizer in children of it."""

    def __init__(self, config: RuntimeConfig, arguments: Sequence[str]) -> None:
        """Start the processes and load the model; minutes for a large one.

        `arguments` are SGLang's command-line words, without the names that `config` holds.
        """
        from hs_runtime import spawn

        config.to_env()
        spawn.prepare_process()

        from sglang.srt.entrypoints.engine import Engine as Upstream
        from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        class Launcher(Upstream):
            run_scheduler_process_func = staticmethod(spawn.run_scheduler)
            run_detokenizer_process_func = staticmethod(spawn.run_detokenizer)

        load_plugins()  # before the arguments are parsed: plugins add some and check all
        named = ["--host", config.host, "--port", str(config.port)]
        named += ["--served-model-name", config.model_name]
        self._upstream = Launcher(server_args=prepare_server_args([*arguments, *named]))
        self._manager = self._upstream.tokenizer_manager
        carrier = _PolicyCarrier(self._manager)
        templates = self._upstream.template_manager
        self._chat = self._manager.serving_chat_class(carrier, templates)
        self._completion = OpenAIServingCompletion(carrier, templates)
        self._carrier = carrier
        self._multiprocess_metrics = bool(self._upstream.server_args.enable_metrics)
        self.model = ModelCard(self._manager.model_config.vocab_size, self._manager.context_len)

    async def start(self) -> None:
        """Start SGLang's receiving loop, and keep the signal handler that was there.

        SGLang's own handler would wait for its requests without bound and then kill the process.
        """
        on_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM) if on_main else None
        self._manager.auto_create_handle_loop()
        if on_main:
            self._manager.event_loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)

    async def stop(self) -> None:
        self._upstream.shutdown()

    def is_alive(self) -> bool:
        """Looks at the processes' states, not at their output: a long prefill puts out nothing."""
        import psutil

        stuck = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        try:
            return all(
                psutil.Process(pid).status() not in stuck
                for pid in self._upstream.get_all_child_pids()
            )
        except psutil.NoSuchProcess:
            return False

    def exposition(self) -> tuple[bytes, str]:
        return exposition(self._multiprocess_metrics)

    async def chat(self, fields: Fields, call: Call) -> dict[str, Any] | Events:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        return await self._openai(self._chat, ChatCompletionRequest, fields, call)

    async def complete(self, fields: Fields, call: Call) -> dict[str, Any] | Events:
        from sglang.srt.entrypoints.openai.protocol import CompletionRequest

        return await self._openai(self._completion, CompletionRequest, fields, call)

    async def generate(
        self, fields: Fields, call: Call
    ) -> dict[str, Any] | list[dict[str, Any]] | Outputs:
        from sglang.srt.managers.io_struct import GenerateReqInput

        call.request.state.hierasparse = call
        wish = GenerateReqInput(**_native(fields))
        if fields.get("stream"):
            return self._native_stream(wish, call)
        outputs = self._carrier.generate_request(wish, call.request)
        try:
            async with aclosing(outputs):
                answer: dict[str, Any] | list[dict[str, Any]] = await anext(outputs)
        except Exception as error:
            raise _refusal(error) from error
        return answer

    async def _native_stream(self, wish: Any, call: Call) -> Outputs:
        try:
            async with aclosing(self._carrier.generate_request(wish, call.request)) as outputs:
                async for output in outputs:
                    _raise_if_failed(output["meta_info"].get("finish_reason"))
                    yield output
        except Exception as error:
            raise _refusal(error) from error

    async def _openai(
        self, serving: Any, schema: Callable[..., Any], fields: Fields, call: Call
    ) -> dict[str, Any] | Events:
        call.request.state.hierasparse = call
        try:
            wish = schema(**fields)
        except ValidationError as error:
            raise malformed_fields(error) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # SGLang's validators take apart objects whose shape they have not checked yet.
            _LOG.info("SGLang could not read a request: %r", error)
            raise ApiError(400, "a field of the request has the wrong shape") from None
        answer = await serving.handle_request(wish, call.request)
        if hasattr(answer, "body_iterator"):
            return self._openai_stream(answer.body_iterator, call)
        if hasattr(answer, "status_code"):
            raise _flat_refusal(answer.status_code, bytes(answer.body))
        body: dict[str, Any] = answer.model_dump(mode="json")
        return body

    async def _openai_stream(self, events: AsyncIterator[str | bytes], call: Call) -> Events:
        """SGLang's events; an error among them is raised, so that a first one sets the status."""
        try:
            async for event in events:
                raw = event if isinstance(event, bytes) else event.encode("utf-8")
                if raw.startswith(b'data: {"error"'):
                    raise _nested_refusal(raw)
                yield raw
        finally:
            # Closing the outermost generator does not close SGLang's inner ones at once.
            self._carrier.abort(call)


class _PolicyCarrier:
    """SGLang's TokenizerManager with one change: no generation leaves without its policy.

    The three routes meet in `generate_request`, so the policy is put in and the reports are taken
    out here, for batches and n > 1 too. Everything else is the manager's.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, wish: Any, request: Request | None = None) -> Outputs:
        if request is None:
            raise RuntimeError("a generation without its HTTP request has no policy")
        call: Call = request.state.hierasparse
        request.state.hierasparse_wish = wish
        carried = {CUSTOM_PARAM: call.policy.to_json()}
        if isinstance(wish.sampling_params, list):
            wish.sampling_params = [
                {**each, "custom_params": carried} for each in wish.sampling_params
            ]
        else:
            wish.sampling_params = {**(wish.sampling_params or {}), "custom_params": carried}
        async with aclosing(self._manager.generate_request(wish, request)) as outputs:
            async for output in outputs:
                for each in output if isinstance(output, list) else [output]:
                    _take_report(each["meta_info"], call)
                yield output

    def abort(self, call: Call) -> None:
        """Abort what still runs of this call; what has finished is unknown to SGLang by then."""
        wish = getattr(call.request.state, "hierasparse_wish", None)
        rids = getattr(wish, "rid", None) or []
        for rid in [rids] if isinstance(rids, str) else rids:
            self._manager.abort_request(rid)


def _take_report(meta_info: dict[str, Any], call: Call) -> None:
    """Move the report out of `meta_info`, where it would be one entry for every token."""
    entries = meta_info.pop(REPORT_KEY, None)
    if not meta_info.get("finish_reason") or not entries:
        return
    text = next((entry for entry in reversed(entries) if entry is not None), None)
    if text is None:
        return
    try:
        report = Report.from_json(text)
    except (PolicyError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"the scheduler's report is malformed: {text!r}") from error
    if report.policy != call.policy:
        raise RuntimeError(
            f"asked for the policy {call.policy.to_json()}, served {report.policy.to_json()}"
        )
    call.reports[meta_info["id"]] = report


def _native(fields: Fields) -> dict[str, Any]:
    """Fields of /generate as GenerateReqInput takes them."""
    return {name: value for name, value in fields.items() if value is not None}


def _refusal(error: Exception) -> Exception:
    """SGLang says 400 by ValueError and 503 by HTTPException; what else happens is a defect."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _api_error(error.status_code, str(error.detail))
    if isinstance(error, ValueError):
        return _api_error(400, str(error))
    return error


def _raise_if_failed(finish_reason: Any) -> None:
    """A sequence that the scheduler refused or lost carries a status; a client's abort does not."""
    if isinstance(finish_reason, dict) and finish_reason.get("type") == "abort":
        status = finish_reason.get("status_code")
        if status is not None:
            raise _api_error(int(status), str(finish_reason.get("message", "")))


def _flat_refusal(status: int, body: bytes) -> ApiError:
    """SGLang's error object without the surrounding `error`."""
    return _api_error(status, str(json.loads(body).get("message", "")))


def _nested_refusal(event: bytes) -> ApiError:
    error = json.loads(event.removeprefix(b"data: "))["error"]
    return _api_error(int(error.get("code") or 400), str(error.get("message", "")))


def _api_error(status: int, message: str) -> ApiError:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return ApiError(503, message, code="overloaded", retry_after=1)
    if status >= 500:
        _LOG.error("SGLang answered %s: %s", status, message)
        return ApiError(status, "the engine failed on this request", code="engine_failed")
    if "disconnected from the client" in message:  # nobody reads this; it is for the metrics
        return ApiError(CLIENT_GONE, "the client has left", code="client_gone")
    too_long = any(words in message for words in _TOO_LONG)
    code = "context_length_exceeded" if too_long else "invalid_value"
    return ApiError(status, message.replace(_OPERATORS_ADVICE, ""), code=code)
