"""What goes wrong costs whom it concerns and nobody else: clients that leave, memory that is short,
compression that fails, processes that die."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hs_kernels.block_format import BlockFormat
from hs_runtime.config import CONFIG_VARIABLE, PLUGIN_FILTER_VARIABLE, RuntimeConfig
from hs_runtime.device import Device
from hs_runtime.launch import plan_launch
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.policies.policy import ServerConstants
from hs_runtime.pool.sizing import size_pool
from hs_runtime.scheduler.admission import BlockSizes, request_need
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.engine_process import PAGE_DIGESTS
from tests.support.engines import (
    STRICT_CHECKS,
    Ask,
    Engine,
    EngineFailed,
    EngineOptions,
    Engines,
    policy,
    token_ids,
    with_environment,
)
from tests.support.golden import Golden, assert_answer
from tests.support.server_process import ServerProcess, free_port, refused, running

pytestmark = pytest.mark.integration

POLICIES = {**PRESETS, "half": policy((500, 500)), "more": policy((300, 0), (750, 500))}
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4  # of the tiny model: layers, sides, kv heads, channels, float32
NEW = 24
SETTLE_SECONDS = 120.0
END_SECONDS = 240.0  # SGLang examines a dead child for a minute before it gives up


# ---- an engine whose every step can be seen -----------------------------------------------------


@pytest.fixture(scope="module")
def strict(small: EngineOptions) -> EngineOptions:
    """Every law is checked after every batch, by us and by SGLang."""
    options = replace(small, chunk=512, tokens=6144, runtime=(("check_integrity_always", True),))
    return with_environment(options, *STRICT_CHECKS, (PAGE_DIGESTS, "1"))


def known(golden: Golden, options: EngineOptions, name: str, length: int) -> Ask:
    chosen = POLICIES[name]
    return Ask(golden.prompt(options, [chosen], length, max_new=NEW), chosen, NEW)


def assert_known(golden: Golden, options: EngineOptions, engine: Engine, *asks: Ask) -> None:
    """All at once, and each answered as the rules say."""
    for ask, answer in zip(asks, engine.run(*asks), strict=True):
        assert ask.policy is not None
        want = golden.answer(options, ask.policy, ask.prompt, NEW)
        assert_answer(ask.policy.to_json(), answer, want)


def rids_of(event: dict[str, Any], kind: str) -> list[list[Any]]:
    return event["rows"] if event["kind"] == kind else []


@pytest.mark.parametrize("moment", ["queue", "chunk", "transition", "decode"])
def test_an_abort_at_any_moment_leaves_nothing(
    engines: Engines, golden: Golden, strict: EngineOptions, moment: str
) -> None:
    engine, rid = engines.get(strict), f"gone-{moment}-"
    length = 4000 if moment == "chunk" else 900
    ahead = [Ask(token_ids(3500, seed), PRESETS["dense"], 8) for seed in range(3)]
    before = [engine.send(ask) for ask in ahead] if moment == "queue" else []
    number = engine.send(Ask(token_ids(length, 7), PRESETS["fast"], 400, rid=rid))
    if moment == "chunk":
        engine.await_event(lambda e: any(r[0] == rid and r[2] < r[3] for r in rids_of(e, "extend")))
    elif moment == "transition":
        engine.await_event(lambda e: e["kind"] == "private" and e["rid"] == rid)
    elif moment == "decode":
        engine.await_event(lambda e: any(r[0] == rid for r in rids_of(e, "decode")))
    engine.abort(rid)
    answer = engine.take(number)
    assert answer.finish == "abort" and len(answer.tokens) < 400
    for each in before:
        assert engine.take(each).finish == "length"
    seen = [r for e in engine.events() for k in ("extend", "decode") for r in rids_of(e, k)]
    ran = [row for row in seen if row[0] == rid]
    assert bool(ran) == (moment != "queue")
    if moment == "chunk":
        assert max(row[2] for row in ran) < length
    assert_known(golden, strict, engine, known(golden, strict, "fast", 430))
    engine.assert_nothing_leaked()


def test_a_pool_for_one_request_serves_them_all(
    engines: Engines, golden: Golden, strict: EngineOptions
) -> None:
    """The bound of a dense request is the whole arena; what can never fit is refused, in bytes."""
    engine = engines.get(replace(strict, tokens=2176))
    fmt = BlockFormat(64, "float32")
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    rules = Lifecycle(segment=128, window=64)
    assert request_need(rules, sizes, PRESETS["dense"], 1500, NEW) == 4
    assert size_pool(fmt, 2176, spare_pages=0).superblocks == 4
    asks = [known(golden, strict, name, 1500) for name in POLICIES]
    assert_known(golden, strict, engine, *asks, *asks)
    with pytest.raises(EngineFailed, match=r"needs \d+ bytes of KV cache and \d+ bytes exist"):
        engine.run(Ask(token_ids(2500), PRESETS["dense"], 4))
    assert engine.run(Ask(token_ids(2500), PRESETS["max"], 4))[0].finish == "length"
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("first, second", [("dense", "max"), ("max", "dense")])
def test_an_arena_full_of_one_kind_gives_way_to_the_other(
    engines: Engines, golden: Golden, strict: EngineOptions, first: str, second: str
) -> None:
    engine = engines.get(replace(strict, tokens=2048))
    engine.flush()
    for seed in range(8):
        engine.run(Ask(token_ids(700, 100 + seed), PRESETS[first], 2))
    books = engine.books()
    capacity = books["superblocks"]
    assert books["used"] == books["evictable"] > capacity * 10, "the prefix tree fills the arena"
    asks = [known(golden, strict, second, length) for length in (430, 800, 900)]
    assert_known(golden, strict, engine, *asks)
    assert_known(golden, strict, engine, *asks, known(golden, strict, first, 430))
    engine.assert_nothing_leaked()


def test_a_flush_under_load_is_refused_and_changes_nothing(
    engines: Engines, golden: Golden, strict: EngineOptions
) -> None:
    engine = engines.get(strict)
    asks = [known(golden, strict, name, 800) for name in POLICIES]
    numbers = [engine.send(ask) for ask in asks]
    flushed = [engine._wait(engine._send({"op": "flush"}), SETTLE_SECONDS) for _ in range(5)]
    assert not flushed[0], "the engine was idle already"
    for ask, number in zip(asks, numbers, strict=True):
        assert ask.policy is not None
        want = golden.answer(strict, ask.policy, ask.prompt, NEW)
        assert_answer(ask.policy.to_json(), engine.take(number), want)
    engine.assert_nothing_leaked()


# ---- a server -----------------------------------------------------------------------------------


@contextlib.contextmanager
def server(
    model: Path, log: Path, *, tokens: int = 6144, **settings: Any
) -> Iterator[ServerProcess]:
    """Segments of 128, a window of 64; `settings` are fields of RuntimeConfig."""
    device = Device("cpu", "a CPU", total_bytes=8 << 30)
    passed = ["--chunked-prefill-size", "512", "--sleep-on-idle"]
    size = tokens * TOKEN_BYTES
    plan = plan_launch(device, str(model), None, passed, kv_cache_bytes=size)
    port = free_port()
    config = RuntimeConfig(
        constants=ServerConstants(segment=128, window=64),
        model_path=str(model),
        served_model_name="tiny",
        port=port,
        kv_cache_bytes=size,
        check_integrity_always=True,
        **settings,
    )
    env = {
        **dict(STRICT_CHECKS),
        CONFIG_VARIABLE: config.to_json(),
        PLUGIN_FILTER_VARIABLE: "hierasparse",
    }
    words = [sys.executable, "-m", "hs_server", *plan.arguments]
    with running(words, port, log, env) as started:
        yield started


def sample(running: ServerProcess, name: str, **labels: str) -> float:
    """One value of /metrics, 0 if it was never set; of a counter, all that fit are added up."""
    total = 0.0
    for line in running.client.get("/metrics").text.splitlines():
        found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if found and all(f'{k}="{v}"' in (found[1] or "") for k, v in labels.items()):
            total += float(found[2])
    return total


def settle(running: ServerProcess) -> None:
    """Waits until nothing is served; then nothing but the prefix tree may hold bytes."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        held = sample(running, "hierasparse_kv_bytes", state="used")
        if not held and not sample(running, "hierasparse_requests_in_flight"):
            return
        time.sleep(0.2)
    raise AssertionError(f"{held} bytes are still held:\n{running.log.read_text()[-3000:]}")


def wish(prompt: list[int], new: int, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **extra}


def headers(chosen: SparsityPolicy) -> dict[str, str]:
    def dictionary(k: int, v: int) -> str:
        return f"k={k / 1000}, v={v / 1000}"

    return {
        "HieraSparse-Prefill": dictionary(chosen.prefill.key, chosen.prefill.value),
        "HieraSparse-Decode": dictionary(chosen.decode.key, chosen.decode.value),
    }


def assert_served(running: ServerProcess, golden: Golden, options: EngineOptions, ask: Ask) -> None:
    assert ask.policy is not None
    reply = running.client.post(
        "/generate",
        json=wish(list(ask.prompt), NEW, return_logprob=True),
        headers=headers(ask.policy),
    )
    assert reply.status_code == 200, reply.text
    tokens = [each[1] for each in reply.json()["meta_info"]["output_token_logprobs"]]
    assert tokens == golden.answer(options, ask.policy, ask.prompt, NEW).tokens


def processes_of(group: int) -> list[str]:
    """Names of what still runs in a process group."""
    found = []
    for each in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(each.pid) == group and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.name())
    return found


def assert_ends(running: ServerProcess) -> int:
    """Its exit code; nothing of its process group is left soon after."""
    code = running.process.wait(END_SECONDS)
    deadline = time.monotonic() + 30
    while (left := processes_of(running.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"orphans: {left}"
    return code


@pytest.fixture(scope="module")
def steady(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server(tiny, tmp_path_factory.mktemp("steady") / "log", drain_seconds=120) as started:
        yield started


def test_clients_that_leave_at_random_times_leave_nothing(
    steady: ServerProcess, golden: Golden, strict: EngineOptions
) -> None:
    rng = random.Random(5)
    left: list[str] = []

    def client(number: int, delay: float, patience: float, events: int | None) -> None:
        chosen = list(POLICIES.values())[number % len(POLICIES)]
        body = wish(token_ids(100 + 97 * (number % 18), number), 60, stream=True)
        time.sleep(delay)
        try:
            with httpx.Client(timeout=httpx.Timeout(300, read=patience)) as own:
                url = f"http://127.0.0.1:{steady.port}/generate"
                with own.stream("POST", url, json=body, headers=headers(chosen)) as reply:
                    assert reply.status_code == 200, reply.read()
                    for _ in itertools.islice(reply.iter_lines(), events):
                        pass
            left.append("ended" if events is None else "left")
        except httpx.ReadTimeout:
            left.append("impatient")

    threads = []
    for number in range(60):
        kind = number % 3
        patience = 0.02 + rng.random() ** 2 * 3 if kind == 0 else 300
        events = rng.randrange(1, 40) if kind == 1 else None
        plan = (number, rng.random() * 6, patience, events)
        threads.append(threading.Thread(target=client, args=plan))
        threads[-1].start()
    for thread in threads:
        thread.join(END_SECONDS)
    assert len(left) == 60, "a client failed"
    assert min(left.count(kind) for kind in ("left", "impatient", "ended")) >= 5, left
    settle(steady)
    assert sample(steady, "hierasparse_requests_total", outcome="disconnected") >= 10
    assert sample(steady, "hierasparse_requests_total", outcome="failed") == 0
    for name in ("dense", "fast", "half"):
        assert_served(steady, golden, strict, known(golden, strict, name, 430))


def test_metrics_tell_what_the_pool_holds(steady: ServerProcess) -> None:
    settle(steady)
    states = ("used", "evictable", "free")
    held = {s: sample(steady, "hierasparse_kv_bytes", state=s) for s in states}
    assert held["used"] == 0 < held["evictable"]
    fmt = BlockFormat(64, "float32")
    superblocks = size_pool(fmt, 6144, spare_pages=0).superblocks
    assert sum(held.values()) == superblocks * fmt.superblock_bytes * 2 * 2  # layers, kv heads
    for phase in ("prefill", "transition", "decode"):
        formed = sample(steady, "hierasparse_blocks_total", phase=phase, kind="sparse")
        assert formed > 0, phase
    assert sample(steady, "hierasparse_plan_seconds_count", phase="decode") > 100
    for _ in range(3):
        body = wish(token_ids(900, 1), 300, stream=True)
        with steady.client.stream("POST", "/generate", json=body) as reply:
            lines = reply.iter_lines()
            seen = [next(lines) for _ in range(120)]
            usage, used = (
                sample(steady, name, **labels)
                for name, labels in (
                    ("sglang:token_usage", {}),
                    ("hierasparse_kv_bytes", {"state": "used"}),
                )
            )
        assert seen
    # SGLang writes its gauge every few dozen steps, rounded to hundredths.
    assert abs(usage - used / sum(held.values())) < 0.02 < used / sum(held.values())
    settle(steady)


def test_a_second_server_on_the_port_is_refused(steady: ServerProcess, tiny: Path) -> None:
    from tests.support.server_process import command

    output = refused(command(tiny, steady.port))
    assert f"cannot listen on 127.0.0.1:{steady.port}" in output
    assert steady.client.get("/ready").status_code == 200


def test_sigterm_under_load_finishes_what_runs_and_refuses_the_rest(
    steady: ServerProcess,
) -> None:
    """The last test of this server."""
    body = wish(token_ids(900), 120, stream=True)
    with steady.client.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        steady.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while steady.client.get("/ready").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        late = steady.client.post("/generate", json=wish([1, 2, 3], 2))
        assert late.status_code == 503 and int(late.headers["Retry-After"]) > 0
        rest = list(lines)
    assert "data: [DONE]" in rest and '"type":"length"' in rest[-4]
    assert assert_ends(steady) == 0


def test_a_drain_is_bounded(tiny: Path, tmp_path: Path) -> None:
    """What runs longer is told so: a stream by its last event, others by their status."""
    completion = {"model": "tiny", "prompt": token_ids(900), "max_tokens": 1500, "ignore_eos": True}
    asks = [
        ("/generate", wish(token_ids(900), 1500)),
        ("/v1/completions", completion),
        ("/v1/completions", completion | {"stream": True}),
    ]
    with server(tiny, tmp_path / "log", drain_seconds=2) as started:
        url = f"http://127.0.0.1:{started.port}"
        body = wish(token_ids(900), 1500, stream=True)
        with (
            ThreadPoolExecutor(len(asks)) as clients,
            started.client.stream("POST", "/generate", json=body) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            others = [clients.submit(httpx.post, url + p, json=b, timeout=300) for p, b in asks]
            deadline = time.monotonic() + END_SECONDS
            while sample(started, "hierasparse_requests_in_flight") < 4:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            begun = time.monotonic()
            started.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
            replies = [each.result() for each in others]
            assert time.monotonic() - begun < 30
            assert assert_ends(started) == 0
            assert time.monotonic() - begun < 60
    assert '"code":"stopping"' in rest[-2] and rest[-1] == "data: [DONE]"
    for late in replies[:2]:
        assert late.status_code == 503 and late.json()["error"]["code"] == "stopping"
    # The last one has or has not seen its first token.
    assert replies[2].status_code in (200, 503) and '"code":"stopping"' in replies[2].text
    log = (tmp_path / "log").read_text()
    assert "stopping: waiting up to 2 s for 4 requests " in log
    assert "Traceback" not in log, log[-4000:]


def test_a_failed_compression_costs_its_batch_and_nobody_else(
    tiny: Path, tmp_path: Path, golden: Golden, strict: EngineOptions
) -> None:
    """Every third one fails: 500 for the requests of that forward, counted, and nothing leaks."""
    with server(tiny, tmp_path / "log", injected_fault="compression:3") as started:
        names = [name for name in POLICIES for _ in range(3)]
        asks = [known(golden, strict, name, (170, 430, 800)[i % 3]) for i, name in enumerate(names)]
        statuses: list[int] = []

        def client(ask: Ask) -> None:
            assert ask.policy is not None
            body = wish(list(ask.prompt), NEW, return_logprob=True)
            url = f"http://127.0.0.1:{started.port}/generate"
            reply = httpx.post(url, json=body, headers=headers(ask.policy), timeout=300)
            if reply.status_code == 200:
                found = [x[1] for x in reply.json()["meta_info"]["output_token_logprobs"]]
                if found != golden.answer(strict, ask.policy, ask.prompt, NEW).tokens:
                    statuses.append(-1)
                    return
            else:
                assert reply.json()["error"]["code"] == "engine_failed", reply.text
            statuses.append(reply.status_code)

        for start in range(0, len(asks), 4):
            threads = [threading.Thread(target=client, args=(a,)) for a in asks[start : start + 4]]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(END_SECONDS)
        assert set(statuses) == {200, 500} and len(statuses) == len(asks), statuses
        settle(started)
        failed = statuses.count(500)
        assert sample(started, "hierasparse_requests_total", outcome="failed") == failed
        assert 1 <= sample(started, "hierasparse_compression_failures_total") <= failed
        assert_served(started, golden, strict, known(golden, strict, "dense", 430))
        assert started.client.get("/health").status_code == 200
        assert started.stop() == 0


@pytest.mark.parametrize("cause", ["device fault", "killed scheduler"])
def test_a_dead_scheduler_ends_the_server(tiny: Path, tmp_path: Path, cause: str) -> None:
    """An error of the device leaves its memory unknown: the process must not live on."""
    fault = "device:1" if cause == "device fault" else ""
    with server(tiny, tmp_path / "log", injected_fault=fault) as started:
        if fault:
            with contextlib.suppress(httpx.HTTPError):
                body = wish(token_ids(400), 4)
                reply = started.client.post(
                    "/generate", json=body, headers={"HieraSparse-Policy": "max"}
                )
                assert reply.status_code >= 500
        else:
            children = psutil.Process(started.process.pid).children(recursive=True)
            (scheduler,) = [each for each in children if "scheduler" in each.name()]
            scheduler.send_signal(signal.SIGKILL)
        assert assert_ends(started) != 0


def test_an_engine_without_a_server_is_not_left_behind(tiny: Path, tmp_path: Path) -> None:
    """The server process is killed outright: its children notice and end."""
    with server(tiny, tmp_path / "log") as started:
        started.process.send_signal(signal.SIGKILL)
        assert assert_ends(started) == -signal.SIGKILL


def test_the_group_is_seen() -> None:
    """What the tests above rely on: a process of a group is found, an ended one is not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    assert processes_of(child.pid)
    child.kill()
    child.wait(30)
    assert not processes_of(child.pid)
