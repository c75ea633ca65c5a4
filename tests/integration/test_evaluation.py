"""`hs-runtime eval` with a real engine: dense is dense, pruning costs, a stopped run goes on."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hs_runtime.evaluation.records import FILE, Record
from hs_runtime.evaluation.run import ROWS, TABLE
from tests.support.server_process import environment

pytestmark = pytest.mark.integration

SECONDS = 400.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(rng.choice("abcdefgh \n") for _ in range(2000)))
    return path


def command_line(model: Path, text: Path, output: Path, *options: str) -> list[str]:
    command = [str(Path(sys.executable).with_name("hs-runtime")), "eval", "--device", "cpu"]
    command += ["--model", str(model), "--text", str(text), "--output", str(output)]
    command += ["--segment", "128", "--window", "64", "--documents", "2", "--prompts", "1"]
    command += ["--suite", "kl@600,ruler@600,speed@500", "--streams", "2"]
    command += ["--steps", "70", "--scored-prompt", "200", "--chunked-prefill-size", "256"]
    command += ["--max-total-tokens", "8192", "--pruner", "magnitude"]
    return [*command, *options]


def evaluate(model: Path, text: Path, output: Path, *options: str) -> Any:
    done = subprocess.run(
        command_line(model, text, output, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def records(output: Path) -> dict[tuple[str, str], Record]:
    """Those that compare with dense."""
    found = [Record.from_json(line) for line in (output / FILE).read_text().splitlines()]
    return {(each.arm, each.case): each for each in found if each.suite == "kl@600"}


def kl(record: Record, part: str) -> float:
    sums = record.parts[part]
    return sums.kl / sums.tokens


def test_arms_are_compared_with_dense_and_a_stopped_run_goes_on(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    evaluate(tiny, text, output, "--arms", "dense,decode=1/1,max")
    first = records(output)
    cases = {case for _, case in first}
    assert len(cases) == 2 and len(first) == 6
    for case in cases:
        dense, decode, both = (first[arm, case] for arm in ("dense", "decode=1/1", "max"))
        assert dense.parts["decode"].tokens == decode.parts["decode"].tokens == 70
        assert both.parts["prefill"].tokens == 200
        assert abs(kl(dense, "decode")) < 1e-6 and dense.kv_bytes == dense.dense_bytes
        assert dense.parts["decode"].agrees == 70
        assert kl(decode, "decode") > 1e-4 and kl(both, "prefill") > 1e-4
        assert kl(both, "decode") > 1e-4 and both.kv_bytes < both.dense_bytes
        assert "prefill" not in decode.parts and "prefill" not in dense.parts
        assert math.isfinite(both.parts["prefill"].nll)

    lines = (output / FILE).read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["arm"] != "max"]
    lost = next(line for line in lines if json.loads(line)["arm"] == "max")
    (output / FILE).write_text("".join(kept) + lost[:100])  # as a kill would leave it
    log = (output / "engine.log").stat().st_size
    evaluate(tiny, text, output, "--arms", "dense,decode=1/1,max")
    again = records(output)
    assert (output / "engine.log").stat().st_size > log, "the lost arm was not measured again"
    assert (output / FILE).read_text().startswith("".join(kept)), "finished lines were not kept"
    for key, record in first.items():
        for part in record.parts:
            assert kl(again[key], part) == pytest.approx(kl(record, part), abs=1e-5), key

    log = (output / "engine.log").stat().st_size
    done = evaluate(tiny, text, output, "--arms", "dense,max", "--recommend", "--kl-budget", "9")
    assert (output / "engine.log").stat().st_size == log, "an engine was started for nothing"
    assert "recommended: decode=1/1 (KL" in done.stdout, "equal bytes, less KL"
    assert "| `max` | 2 |" in (output / TABLE).read_text()
    rows = {(r["suite"], r["arm"]): r for r in json.loads((output / ROWS).read_text())}
    asked = {arm: rows["ruler@600", arm] for arm in ("dense", "max")}
    assert all(row["cases"] == 5 and 0 <= row["score"] <= 1 for row in asked.values())
    assert asked["max"]["kv_share"] < asked["dense"]["kv_share"] == 1
    timed = {arm: rows["speed@500", arm]["values"] for arm in ("dense", "max")}
    assert all(values["TPOT ms"] > 0 and values["TTFT s"] > 0 for values in timed.values())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_no_engine(
    tiny: Path, text: Path, tmp_path: Path, number: int, code: int
) -> None:
    """Stopped while the engine loads, which takes longest to end. Started as a shell's background
    job, which ignores SIGINT."""
    output = tmp_path / "out"
    process = subprocess.Popen(
        command_line(tiny, text, output, "--arms", "dense"),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (engines := psutil.Process(process.pid).children(recursive=True)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == code and "the same command goes on" in said, said[-3000:]
    assert not any(each.is_running() for each in engines)
    assert "Traceback" not in (output / "engine.log").read_text()


def test_k_and_v_are_looked_at_by_layer(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    evaluate(tiny, text, output, "--layers", "--documents", "1")
    found = json.loads((output / "layers.json").read_text())
    assert [each["layer"] for each in found["layers"]] == [0, 1] and found["tokens"] > 1000
    for layer in found["layers"]:
        assert all(0.1 < loss < 0.4 for side in "KV" for loss in layer[side]["loss"])
