"""One engine process of the evaluation, and the requests that are sent to it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hs_runtime.evaluation.tap import Job, TokenScores
from hs_runtime.policies import CUSTOM_PARAM, SparsityPolicy

_START_SECONDS: Final = 1800.0  # a large model from a slow disk
_SILENCE_SECONDS: Final = 3600.0  # without a single answer
_STOP_SECONDS: Final = 60.0
_LOG_TAIL: Final = 3000


class EvaluationError(RuntimeError):
    """The evaluation cannot go on; what is finished is kept. The message says why."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def terminated_in_order() -> Iterator[None]:
    """SIGTERM and SIGINT unwind what runs inside, so that no engine is left alone; SIGINT where a
    shell started this in the background, too, which ignores it. For the main thread."""

    def stop(*_: object) -> None:
        raise Terminated

    handlers: dict[int, Callable[..., object]] = {
        signal.SIGTERM: stop,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Order:
    """One request: `job` if it is teacher-forced, else at most `answer_tokens` free ones. A timed
    one is streamed, and does not end before it has them all."""

    prompt: tuple[int, ...]
    policy: SparsityPolicy
    job: Job | None = None
    answer_tokens: int = 1
    timed: bool = False
    fresh: bool = False  # reads nothing from the prefix cache, so that all of it is computed


@dataclass(frozen=True, slots=True)
class Reply:
    """`report` is what the scheduler says of the blocks, {} of a stock engine."""

    tokens: tuple[int, ...]
    scores: TokenScores | None
    report: Mapping[str, Any]
    first_seconds: float
    seconds: float
    cached: int


class Session:
    """A running engine: `config` is RuntimeConfig as JSON, "" for stock SGLang. With `layers` it
    leaves `layers.FILE` in its folder."""

    def __init__(
        self, config: str, arguments: Sequence[str], log: Path, *, layers: bool = False
    ) -> None:
        """Starts the processes and loads the model. Raises EvaluationError."""
        self._log, self._sent, self._buffer = log, 0, b""
        self._folder = tempfile.TemporaryDirectory(prefix="hs-eval-")
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hs_runtime.evaluation.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        options = {
            "config": config,
            "arguments": list(arguments),
            "tap_folder": str(self.folder),
            "layers": layers,
        }
        try:
            self._send(options)
            self._receive(_START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """For jobs and references: gone when the session is closed."""
        return Path(self._folder.name)

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[int, Reply]]:
        """Sends all at once; yields (index, reply) as they finish. Raises EvaluationError."""
        base = self._sent
        for order in orders:
            rid = f"eval-{self._sent}"
            if order.job is not None:
                order.job.save(self.folder, rid)
            self._send({"id": self._sent, "fields": _fields(order, rid)})
            self._sent += 1
        for _ in orders:
            answer = self._receive(_SILENCE_SECONDS)
            index = answer["id"] - base
            yield index, self._reply(orders[index], answer)

    def _reply(self, order: Order, answer: Mapping[str, Any]) -> Reply:
        output = answer["output"]
        meta = output["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise EvaluationError(f"the engine refused a request: {finish.get('message')}")
        scores = None
        if order.job is not None and order.job.scored:
            try:
                scores = TokenScores.load(self.folder, meta["id"])
            except FileNotFoundError:
                raise EvaluationError(
                    f"the tap did not see all of request {meta['id']} ({meta}); see {self._log}"
                ) from None
        reports = [each for each in meta.get("hierasparse") or [] if each]
        return Reply(
            tokens=tuple(output.get("output_ids") or ()),
            scores=scores,
            report=json.loads(reports[-1]) if reports else {},
            first_seconds=output["first_seconds"],
            seconds=output["seconds"],
            cached=meta.get("cached_tokens", 0),
        )

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode("utf-8") + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EvaluationError(self._ended()) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EvaluationError(f"the engine said nothing for {seconds:.0f} s; {self._log}")
            if not self._selector.select(left):
                continue
            block = os.read(self._process.stdout.fileno(), 1 << 20)
            if not block:
                raise EvaluationError(self._ended())
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EvaluationError(f"the engine could not answer: {answer['error']}")
        return answer

    def _ended(self) -> str:
        tail = self._log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
        return f"the engine's process ended; the end of {self._log}:\n{tail}"

    def close(self) -> None:
        """Ends the processes; the session's own group, should they not go by themselves."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_STOP_SECONDS)
        self._selector.close()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _fields(order: Order, rid: str) -> dict[str, Any]:
    """As GenerateReqInput takes them."""
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": order.answer_tokens,
        "custom_params": {CUSTOM_PARAM: order.policy.to_json()},
    }
    if order.job is not None:
        sampling["max_new_tokens"] = len(order.job.tokens) - order.job.prompt
        sampling["ignore_eos"] = True
    if order.timed:
        sampling["ignore_eos"] = True
    fields = {
        "rid": rid,
        "input_ids": list(order.prompt),
        "sampling_params": sampling,
        "stream": order.timed,
    }
    return {**fields, "extra_key": rid} if order.fresh else fields
