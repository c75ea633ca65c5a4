"""Real engines for tests: one process group each, started once for a configuration, never two too
many at a time, and killed with all their children whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hs_runtime.calibration import digest
from hs_runtime.config import CONFIG_VARIABLE, PLUGIN_FILTER_VARIABLE, RuntimeConfig
from hs_runtime.policies import CUSTOM_PARAM, SparsityPolicy
from hs_runtime.policies.policy import ServerConstants, Sparsity

ROOT = Path(__file__).parents[2]
START_SECONDS = 420.0  # an import of SGLang takes ten seconds on an idle machine
ANSWER_SECONDS = 300.0
END_SECONDS = 20.0
SOCKET_PATH_LIMIT = 80  # of 108, less the name of the socket
STRICT_CHECKS = (
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1"),
    ("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1"),
    ("SGLANG_DEBUG_MEMORY_POOL", "1"),
)


def forced_retraction(interval: int) -> tuple[tuple[str, str], ...]:
    """SGLang's switch: every `interval` forwards the least preferred request goes back to the
    queue, unless it is alone. At 3 that is before the token of its replay counts, so it waits."""
    return (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", str(interval)))


def policy(
    prefill: tuple[int, int] = (0, 0), decode: tuple[int, int] | None = None
) -> SparsityPolicy:
    """Shares of (K, V) in thousandths; decode is by default that of prefill."""
    return SparsityPolicy(Sparsity(*prefill), Sparsity(*(decode or prefill)))


def token_ids(count: int, seed: int = 0) -> list[int]:
    """Random bytes as tokens of the tiny Llama."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@dataclass(frozen=True)
class EngineOptions:
    """One configuration. `tokens` is the size of the KV cache in dense tokens, `runtime` holds
    further fields of RuntimeConfig. `calibration_digest` is by default that of the file."""

    model: Path
    segment: int = 1024
    window: int = 256
    chunk: int = 1024
    tokens: int = 16384
    stock: bool = False
    dense_layers: tuple[int, ...] = ()
    pruner: str = "magnitude"
    calibration: Path | None = None
    calibration_digest: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    runtime: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()

    def server_arguments(self) -> dict[str, Any]:
        common: dict[str, Any] = {
            "model_path": str(self.model),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "float32",
            "disable_cuda_graph": True,
            "max_total_tokens": self.tokens,
            "chunked_prefill_size": self.chunk,
            "max_prefill_tokens": self.chunk,
            "max_running_requests": 16,
            "log_level": "warning",
            "random_seed": 1,
            "sleep_on_idle": True,  # or an idle engine takes a core from the one under test
        }
        if self.stock:
            backend = {"attention_backend": "torch_native", "page_size": 1}
        else:
            backend = {"attention_backend": "hierasparse", "page_size": 64}
        return common | backend | dict(self.arguments)

    def process_environment(self) -> dict[str, str]:
        """What its processes have besides `common_environment`."""
        env = {PLUGIN_FILTER_VARIABLE: "none" if self.stock else "hierasparse"}
        if not self.stock:
            known = self.calibration_digest
            if self.calibration is not None and not known:
                known = digest(self.calibration)
            constants = ServerConstants(
                segment=self.segment,
                window=self.window,
                pruner=self.pruner,
                calibration=known,
                dense_layers=self.dense_layers,
            )
            path = str(self.calibration or "")
            config = RuntimeConfig(constants=constants, calibration_path=path, **dict(self.runtime))
            env[CONFIG_VARIABLE] = config.to_json()
        return env | dict(self.environment)


def common_environment() -> dict[str, str]:
    """Of every engine process, before it knows its options."""
    env = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    roots = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "server")]
    env["PYTHONPATH"] = os.pathsep.join([*roots, *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONWARNINGS"] = "ignore"
    env["OMP_NUM_THREADS"] = "1"  # small tensors: threads only cost, and wait for each other
    return env


@dataclass(frozen=True)
class Ask:
    """One generation. `sampling` and `fields` are further parameters of it and of the request."""

    prompt: Sequence[int]
    policy: SparsityPolicy | None = None
    max_new: int = 40
    rid: str | None = None
    logprob_start: int = -1
    abort_after: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def order(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": self.max_new,
            "ignore_eos": True,
        }
        if self.policy is not None:
            sampling["custom_params"] = {CUSTOM_PARAM: self.policy.to_json()}
        fields = {
            "input_ids": list(self.prompt),
            "sampling_params": sampling | self.sampling,
            "return_logprob": True,
            "logprob_start_len": self.logprob_start,
            **({"rid": self.rid} if self.rid else {}),
            **self.fields,
        }
        return {"op": "generate", "fields": fields, "abort_after": self.abort_after}


@dataclass(frozen=True)
class Answer:
    """`report` is what the scheduler says of the request's blocks, {} if it was aborted."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    cached: int
    retractions: int
    finish: str
    report: dict[str, Any]

    @classmethod
    def of(cls, output: dict[str, Any]) -> Answer:
        meta = output["meta_info"]
        chosen = meta.get("output_token_logprobs") or []
        prompt = [each[0] for each in meta.get("input_token_logprobs") or []]
        reports = [each for each in meta.get("hierasparse") or [] if each]
        reason = meta.get("finish_reason") or {}
        return cls(
            tokens=[each[1] for each in chosen],
            logprobs=[each[0] for each in chosen],
            prompt_logprobs=[each for each in prompt if each is not None],
            cached=meta.get("cached_tokens", 0),
            retractions=meta.get("num_retractions", 0),
            finish=reason.get("type", "") if isinstance(reason, dict) else str(reason),
            report=json.loads(reports[-1]) if reports else {},
        )


class EngineFailed(RuntimeError):
    """The engine's process ended, refused or did not answer in time; with the end of its log."""


class Process:
    """A process that has begun to import SGLang and waits for an engine's options."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = common_environment()
        if len(str(folder)) < SOCKET_PATH_LIMIT:
            env["TMPDIR"] = str(folder)  # SGLang leaves its sockets behind
        with (folder / "log").open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.support.engine_process"],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )


class Engine:
    """A running engine. Requests may be sent from one thread and awaited in any order."""

    def __init__(
        self, options: EngineOptions, folder: Path, waiting: Process | None = None
    ) -> None:
        waiting = waiting or Process(folder)
        self.options, self.process = options, waiting.popen
        self.log, self.probe = waiting.folder / "log", waiting.folder / "probe"
        self.probe.touch()
        self._answers: dict[int, dict[str, Any]] = {}
        self._news: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = -1
        threading.Thread(target=self._read, daemon=True).start()
        try:
            number = self._send(
                {
                    "stock": options.stock,
                    "probe": str(self.probe),
                    "arguments": options.server_arguments(),
                    "environment": options.process_environment(),
                }
            )
            self._wait(number, START_SECONDS)
        except EngineFailed:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(json.loads(line))
        self._news.put(None)

    def _send(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        self._number += 1
        line = json.dumps({**order, "id": self._number}) + "\n"
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("is gone") from None
        return self._number

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"the engine {what}; its log ends:\n{self.log_text()[-6000:]}")

    def _wait(self, number: int, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            try:
                news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failed(f"did not answer within {seconds:.0f} s") from None
            if news is None:
                raise self._failed("ended")
            self._answers[news["id"]] = news
        answer = self._answers.pop(number)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer["value"]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    # requests

    def send(self, ask: Ask) -> int:
        return self._send(ask.order())

    def take_all(self, number: int, seconds: float = ANSWER_SECONDS) -> list[Answer]:
        return [Answer.of(output) for output in self._wait(number, seconds)]

    def take(self, number: int, seconds: float = ANSWER_SECONDS) -> Answer:
        (answer,) = self.take_all(number, seconds)
        return answer

    def answered(self, number: int) -> bool:
        """Whether the answer has come; does not wait for it."""
        with contextlib.suppress(queue.Empty):
            while news := self._news.get_nowait():
                self._answers[news["id"]] = news
            raise self._failed("ended")
        return number in self._answers

    def run_as_one(self, *asks: Ask, seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """In one order, so that all arrive while the first is prefilled, on a busy machine, too."""
        fields = [ask.order()["fields"] for ask in asks]
        names = ("input_ids", "sampling_params", "rid")
        listed = {name: [each[name] for each in fields] for name in names}
        return self.take_all(self._send({"op": "generate", "fields": fields[0] | listed}), seconds)

    def run(self, *asks: Ask, seconds: float = ANSWER_SECONDS) -> list[Answer]:
        """One right after the other; the answers in the order of the requests."""
        numbers = [self.send(ask) for ask in asks]
        return [self.take(number, seconds) for number in numbers]

    def cold(self, ask: Ask) -> Answer:
        """The answer with nothing cached and nobody else on the server."""
        self.flush()
        (answer,) = self.run(ask)
        assert answer.cached == 0
        return answer

    def flush(self) -> None:
        """Empties the prefix cache; a scheduler that has just answered may need a moment."""
        for _ in range(200):
            if self._wait(self._send({"op": "flush"}), ANSWER_SECONDS):
                return
            time.sleep(0.02)
        raise self._failed("did not become idle")

    def abort(self, rid: str) -> None:
        self._wait(self._send({"op": "abort", "rid": rid}), ANSWER_SECONDS)

    # evidence

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the scheduler has done since it started (see `engine_process.Probe`)."""
        lines = self.probe.read_text().split("\n")[:-1]
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["kind"])]

    def await_event(
        self, wanted: Callable[[dict[str, Any]], bool], seconds: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """The first event for which `wanted` holds, soon after it happened."""
        deadline, seen = time.monotonic() + seconds, 0
        with self.probe.open() as file:
            rest = ""
            while time.monotonic() < deadline:
                rest += file.read()
                *lines, rest = rest.split("\n")
                for event in map(json.loads, lines):
                    seen += 1
                    if wanted(event):
                        return event
                time.sleep(0.002)
        raise self._failed(f"never did what was awaited in {seen} events")

    def await_extend(self, rid: str) -> None:
        """Until a chunk of the request's prompt has been scheduled."""

        def holds(event: dict[str, Any]) -> bool:
            return event["kind"] == "extend" and any(row[0] == rid for row in event["rows"])

        self.await_event(holds)

    def books(self) -> dict[str, Any]:
        """What the scheduler holds, as soon as it is idle and has checked it."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            last = self.events()[-1]
            if last["kind"] == "idle":
                return last
            time.sleep(0.02)
        raise self._failed("never checked its books")

    def page_digests(self) -> dict[str, str]:
        """Of the cached pages at rest, by page id (with `engine_process.PAGE_DIGESTS` set)."""
        self.books()
        return dict(self.events("pages")[-1]["digests"])

    def assert_nothing_leaked(self) -> None:
        """At idle only the prefix cache holds anything, and without it nothing is left."""
        books = self.books()
        assert books["checked"]
        assert books["used"] == books["evictable"], books
        assert books["free_pages"] + books["cached_pages"] == books["pages"], books
        self.flush()
        books = self.books()
        assert books["used"] == books["evictable"] == books["cached_pages"] == 0, books
        assert books["free_pages"] == books["pages"], books

    # end

    def close(self) -> None:
        """Ends the process and its children outright: an orderly end takes SGLang seconds."""
        kill_group(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the session that the process leads; its children are in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_SECONDS)


class Engines:
    """Running engines by configuration; at most `limit`, the least recently used ends first.

    One process more imports SGLang meanwhile, so that the next engine starts sooner.
    """

    def __init__(self, folder: Path, limit: int = 2) -> None:
        self.folder, self.limit = folder, limit
        self._running: dict[EngineOptions, Engine] = {}
        self._waiting: Process | None = None
        self._count = 0

    def _next_process(self) -> Process:
        self._count += 1
        folder = self.folder / f"engine-{self._count}"
        folder.mkdir()
        return Process(folder)

    def get(self, options: EngineOptions) -> Engine:
        engine = self._running.pop(options, None)
        if engine is None or engine.process.poll() is not None:
            if engine is not None:
                engine.close()
            while len(self._running) >= self.limit:
                self._running.pop(next(iter(self._running))).close()
            process, self._waiting = self._waiting or self._next_process(), None
            engine = Engine(options, process.folder, process)
            self._waiting = self._next_process()
        self._running[options] = engine
        return engine

    def close(self) -> None:
        if self._waiting is not None:
            kill_group(self._waiting.popen)
            self._waiting = None
        while self._running:
            self._running.popitem()[1].close()


def with_environment(options: EngineOptions, *pairs: tuple[str, str]) -> EngineOptions:
    return replace(options, environment=options.environment + pairs)
