"""The command line gathers values, refuses what cannot be, and starts exactly what it shows."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from filelock import FileLock
from typer.testing import CliRunner

from hs_kernels import build
from hs_runtime import __version__, cli, doctor
from hs_runtime.calibration import FILE_NAME, digest, load_calibration
from hs_runtime.cli import app
from hs_runtime.config import (
    CACHE_VARIABLE,
    CONFIG_VARIABLE,
    PLUGIN_FILTER_VARIABLE,
    RuntimeConfig,
)
from hs_runtime.demo_model import MODEL_NAME, DemoModelError
from hs_runtime.device import Device
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.session import Terminated
from tests.support.calibrations import write_calibration
from tests.support.checkpoints import tiny_llama
from tests.support.languages import language

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _nothing_leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (CONFIG_VARIABLE, PLUGIN_FILTER_VARIABLE, "PYTHONWARNINGS"):
        monkeypatch.setenv(variable, "")  # what `serve` publishes is undone afterwards
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def planned(*words: str) -> tuple[RuntimeConfig, list[str]]:
    """What `serve` would start on a CPU."""
    result = invoke("serve", "--dry-run", "--device", "cpu", *words)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    return RuntimeConfig.from_json(json.dumps(shown["config"])), shown["sglang_arguments"]


def refusal(*words: str) -> str:
    result = invoke("serve", "--dry-run", "--device", "cpu", *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize("command", ["serve", "eval"])
def test_help_names_every_pruner(command: str) -> None:
    from hs_runtime.policies.pruner import PRUNERS

    said = invoke(command, "--help").output
    missing = {name for name in PRUNERS if name not in said}
    assert missing <= ({"unstructured"} if command == "serve" else set())  # it is simulated


def test_no_arguments_print_help_and_version_prints_one_line() -> None:
    assert "serve" in invoke().output
    assert invoke("--version").stdout == f"hs-runtime {__version__}\n"


def test_serve_without_options_serves_the_demonstration_model_locally() -> None:
    config, arguments = planned()
    assert (config.host, config.port) == ("127.0.0.1", 30000)
    assert config.model_name == MODEL_NAME
    assert config.default_policy.preset == "dense"
    assert arguments[:2] == ["--model-path", "demo"]


def test_options_become_the_configuration(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    config, arguments = planned(
        *("--model", str(model), "--port", "0", "--default-policy", "fast"),
        *("--segment", "512", "--window", "128", "--sink", "128", "--anchor", "chunk"),
        *("--kv-cache", "1.5GiB", "--api-key-file", str(keys)),
        *("--cors-origin", "https://a.example", "--cors-origin", "https://b.example"),
    )
    constants = config.constants
    assert (constants.segment, constants.window, constants.sink) == (512, 128, 128)
    assert (constants.anchor, constants.pruner, constants.calibration) == ("chunk", "magnitude", "")
    assert config.default_policy.preset == "fast"
    assert config.model_name == "tiny-model"
    assert config.kv_cache_bytes == GIB * 3 // 2
    assert config.api_key_file == str(keys)
    assert config.cors_origins == ("https://a.example", "https://b.example")
    assert arguments[:2] == ["--model-path", str(model)]
    assert "secret" not in " ".join(arguments)


def test_the_chunk_that_sglang_cuts_is_the_chunk_of_the_constants() -> None:
    config, arguments = planned("--chunked-prefill-size", "1024")
    assert config.constants.chunk == 1024
    assert arguments.count("--chunked-prefill-size") == 1


def test_unknown_flags_pass_to_sglang(model: Path) -> None:
    _, arguments = planned("--model", str(model), "--context-length", "4096", "--", "--tp-size=1")
    assert arguments[-3:] == ["--context-length", "4096", "--tp-size=1"]


def chosen(*words: str) -> tuple[str, str, str]:
    config, _ = planned(*words)
    return config.constants.pruner, config.constants.calibration, config.calibration_path


def test_a_calibration_file_is_named_by_its_content_and_chooses_the_pruner(
    tmp_path: Path, tiny: Path
) -> None:
    path = write_calibration(tmp_path / "constants", tiny)
    named = ("calibrated", hashlib.sha256(path.read_bytes()).hexdigest(), str(path))
    given = ("--model", str(tiny), "--calibration", str(path))
    assert chosen(*given) == named
    assert chosen(*given, "--pruner", "channel") == ("channel", *named[1:])
    assert chosen(*given, "--pruner", "magnitude") == ("magnitude", "", "")


def test_a_calibration_beside_the_model_is_found_and_its_absence_said(tiny: Path) -> None:
    words = ("serve", "--dry-run", "--device", "cpu", "--model", str(tiny))
    without = invoke(*words)
    assert "hs-runtime calibrate --model" in without.stderr and "magnitude" in without.stderr
    assert "hs-runtime calibrate --model" in refusal("--model", str(tiny), "--pruner", "calibrated")
    path = write_calibration(tiny / FILE_NAME, tiny)
    assert chosen("--model", str(tiny)) == ("calibrated", digest(path), str(path))
    assert not invoke(*words).stderr
    assert chosen("--model", str(tiny), "--pruner", "random") == ("random", "", "")


def test_the_demonstration_model_comes_with_its_calibration() -> None:
    pruner, _, path = chosen()
    assert pruner == "calibrated"
    calibration = load_calibration(Path(path))
    assert calibration.permutation.shape == (30, 3, 64)


def test_a_calibration_of_another_model_is_refused(tmp_path: Path, tiny: Path) -> None:
    other = tiny_llama(tmp_path / "other", seed=1)
    path = write_calibration(tmp_path / "constants", other)
    words = ("--calibration", str(path))
    assert "another model" in refusal("--model", str(tiny), *words)
    assert "folder" in refusal("--model", "hub/name", *words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "hub/name"], "no folder on this disk"),
        (["--output", "./no-such-folder/file"], "no-such-folder is no folder"),
        (["--text", "./no-such-text"], "cannot read"),
        (["--tokens", "10"], "at least 512"),
        (["--device", "tpu"], "auto, cpu, cuda"),
    ],
)
def test_a_calibration_that_cannot_be_made_is_refused_at_once(
    tiny: Path, words: list[str], named: str
) -> None:
    result = invoke("calibrate", "--device", "cpu", "--model", str(tiny), *words)
    assert result.exit_code == 2
    assert named in result.stderr


def test_what_cannot_be_stored_is_simulated_and_not_served() -> None:
    assert "hs-runtime eval" in refusal("--pruner", "unstructured")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--segment", "100"], "multiple of 128"),
        (["--anchor", "middle"], "segment, chunk"),
        (["--default-policy", "fastest"], "dense, light, balanced, fast, max"),
        (["--port", "70000"], "0 to 65535"),
        (["--pruner", "psychic"], "magnitude"),
        (["--model", "./no-such-folder"], "no folder"),
        (["--calibration", "./no-such-file"], "no file"),
        (["--calibration", __file__], "no calibration file"),
        (["--api-key-file", "./no-such-file"], "cannot read"),
        (["--kv-cache", "much"], "GiB"),
        (["--kv-cache", "0GiB"], "GiB"),
        (["--kv-cache", "infGiB"], "GiB"),
        (["--cors-origin", "example.com"], "https://"),
        (["--api-key", "x"], "--api-key-file"),
        (["--chunked-prefill-size", "-1"], "multiple of 128"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_choices(words: list[str], named: str) -> None:
    assert named in refusal(*words)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal("--model", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * GIB), ("512MiB", 512 << 20), ("1GB", 10**9), ("1.5kB", 1500), ("77", 77)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert cli._size_bytes(text) == size


def test_an_unknown_device_and_a_missing_gpu_are_different_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "auto, cpu, cuda" in invoke("serve", "--dry-run", "--device", "tpu").stderr
    monkeypatch.setattr(cli, "probe_devices", lambda wanted: [])
    assert "no CUDA device" in invoke("serve", "--dry-run", "--device", "cuda").stderr


def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RuntimeConfig, tuple[str, ...]]]:
    """Puts a server in place of ours that records with what it was started."""
    calls: list[tuple[RuntimeConfig, tuple[str, ...]]] = []

    def run(config: RuntimeConfig, arguments: tuple[str, ...]) -> None:
        calls.append((config, arguments))

    module = types.ModuleType("hs_server.__main__")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hs_server.__main__", module)
    return calls


def test_serve_publishes_what_it_hands_to_the_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = started(monkeypatch)
    words = ("--model", str(model), "--segment", "512")
    assert invoke("serve", "--device", "cpu", *words).exit_code == 0
    (config, arguments) = calls[0]
    assert RuntimeConfig.from_env() == config
    assert (config, list(arguments)) == planned(*words)
    assert cli.PLUGIN_NAME in (doctor.plugin_filter() or ())


def test_the_demonstration_model_is_fetched_when_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = started(monkeypatch)
    monkeypatch.setattr(cli, "ensure_demo_model", lambda: Path("/cache/models/demo"))
    monkeypatch.setattr(cli, "_model_config", lambda path: {"hidden_size": 64})
    assert invoke("serve", "--device", "cpu").exit_code == 0
    assert calls[0][0].model_path == "/cache/models/demo"
    assert calls[0][0].model_name == MODEL_NAME


def test_a_demonstration_model_that_cannot_be_had_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Path:
        raise DemoModelError("the package registry did not deliver it")

    calls = started(monkeypatch)
    monkeypatch.setattr(cli, "ensure_demo_model", fail)
    result = invoke("serve", "--device", "cpu")
    assert (result.exit_code, calls) == (2, [])
    assert "did not deliver" in result.stderr


CPU = Device("cpu", "a CPU", total_bytes=64 * GIB, free_bytes=40 * GIB)


def checks(monkeypatch: pytest.MonkeyPatch, devices: list[Device]) -> dict[str, doctor.Check]:
    seam = types.ModuleType("hs_runtime.sglang_seam")
    seam.refusal_table = tuple  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hs_runtime.sglang_seam", seam)
    monkeypatch.setattr(doctor, "probe_devices", lambda wanted: devices)
    return {check.name: check for check in doctor.examine().checks}


def test_a_healthy_machine_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks(monkeypatch, [CPU])
    assert [check for check in found.values() if not check.passed] == []
    assert "reference" in found["kernels"].detail


def test_a_gpu_is_described_by_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("cuda", "H200", 141 * GIB, 100 * GIB, (9, 0), "580.1")
    detail = checks(monkeypatch, [card])["device 0"].detail
    for part in ("H200", "9.0", "141.0 GiB", "100.0 GiB free", "580.1"):
        assert part in detail


@pytest.mark.parametrize(
    ("device", "remedy"),
    [
        (Device("cuda", "V100", 32 * GIB, None, (7, 0)), "compute capability 8.0"),
        (Device("cpu", "a CPU", 2 * GIB, GIB), "GiB of memory"),
    ],
    ids=["an old GPU", "little memory"],
)
def test_a_device_that_cannot_serve_fails_its_check(
    device: Device, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = checks(monkeypatch, [device])["device 0"]
    assert not check.passed
    assert remedy in check.remedy


def test_kernels_are_ready_or_can_be_compiled_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = Device("cuda", "H200", 141 * GIB, None, (9, 0))
    monkeypatch.setattr(build, "AHEAD_OF_TIME", tmp_path / "none")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    assert "compiled at the first start" in checks(monkeypatch, [hopper])["kernels"].detail
    (tmp_path / build.library_name("90a", build.digest("90a"))).touch()
    assert "sm_90a: ready" in checks(monkeypatch, [hopper])["kernels"].detail
    unknown = Device("cuda", "?", 141 * GIB, None, (12, 0))
    check = checks(monkeypatch, [unknown])["kernels"]
    assert not check.passed
    assert "12.0" in check.detail


def test_no_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checks(monkeypatch, [])["device"].passed


def test_a_plugin_that_sglang_may_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_FILTER_VARIABLE, "other")
    check = checks(monkeypatch, [CPU])["plugin"]
    assert not check.passed
    assert "other" in check.detail


def test_another_sglang_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.5.23")
    check = checks(monkeypatch, [CPU])["sglang"]
    assert not check.passed
    assert "sglang==0.5.17" in check.remedy


def report(passed: bool) -> doctor.Report:
    check = doctor.Check("device 0", passed, "a CPU", "" if passed else "buy memory")
    refused = {"option": "--pp-size", "reason": "not tested", "legal": "1"}
    return doctor.Report((check,), (CPU,), (refused,))


@pytest.mark.parametrize("passed", [True, False])
def test_doctor_exits_with_what_it_found(passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda device: report(passed))
    text, as_json = invoke("doctor"), invoke("doctor", "--json")
    assert text.exit_code == as_json.exit_code == (0 if passed else 1)
    assert ("buy memory" in text.stdout) is not passed
    assert "--pp-size: 1 (not tested)" in text.stdout
    loaded: dict[str, Any] = json.loads(as_json.stdout)
    assert loaded["passed"] is passed
    assert loaded["devices"][0]["total_bytes"] == 64 * GIB


# ---- eval ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "poems"), "suite: 'poems' (choose kl, copy"),
        (("--arms", "maximal"), "arms: 'maximal'"),
        (("--arms", "max+pruner=none"), "unknown pruner 'none'"),
        (("--text", "/nowhere"), "text: '/nowhere' does not exist"),
        (("--segment", "100"), "segment=100"),
        (("--suite", "longbench"), "longbench: no folder given"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_a_model_loads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], said: str
) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 320, "hidden_size": 64}))
    monkeypatch.setattr(Language, "load", lambda path: language())
    fixed = ("--device", "cpu", "--model", str(model), "--output", str(tmp_path / "out"))
    result = invoke("eval", *fixed, *words)
    assert result.exit_code == 2 and said in result.stderr, result.output


def test_the_evaluation_measures_what_was_asked_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 320, "hidden_size": 64}))
    monkeypatch.setattr(Language, "load", lambda path: language())
    asked: dict[str, Any] = {}

    def measure(*given: Any) -> None:
        target, _, arms, items, records, _ = given
        asked.update(target=target, arms=arms, items=items, folder=records.folder)

    monkeypatch.setattr("hs_runtime.evaluation.run.measure", measure)
    words = ("--suite", "kl@900,passkey", "--documents", "2", "--prompts", "3", "--steps", "9")
    fixed = ("--device", "cpu", "--model", str(model), "--output", str(tmp_path / "out"))
    result = invoke("eval", *fixed, *words, "--arms", "light,paper", "--max-total-tokens", "4096")
    assert result.exit_code == 0, result.output
    assert [arm.name for arm in asked["arms"]] == ["light", "paper"]
    assert asked["arms"][0].constants.pruner == "magnitude"
    assert [each.suite for each in asked["items"]] == ["kl@900"] * 2 + ["passkey@1100"] * 3
    assert len(asked["items"][0].tokens) == 900 + 9 + 1
    assert asked["target"].passed == ("--max-total-tokens", "4096")
    assert asked["target"].vocabulary == 320 and asked["folder"] == tmp_path / "out"
    assert (tmp_path / "out" / "results.md").is_file()
    with FileLock(tmp_path / "out" / ".lock"):
        second = invoke("eval", *fixed, *words, "--arms", "light")
    assert second.exit_code == 2 and "another evaluation is writing" in second.stderr
    advice = invoke("eval", *fixed, *words, "--arms", "light", "--recommend")
    assert advice.exit_code == 2 and "no arm is within 0.05 (measured: none)" in advice.stderr


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_stopped_evaluation_says_how_to_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type, code: int
) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 320, "hidden_size": 64}))
    monkeypatch.setattr(Language, "load", lambda path: language())

    def measure(*_: Any) -> None:
        raise stop

    monkeypatch.setattr("hs_runtime.evaluation.run.measure", measure)
    fixed = ("--device", "cpu", "--model", str(model), "--output", str(tmp_path / "out"))
    result = invoke("eval", *fixed, "--suite", "kl@900", "--documents", "1", "--arms", "light")
    assert result.exit_code == code and "the same command goes on" in result.stderr


def test_a_pruner_without_calibration_does_not_look_at_the_one_beside_the_model(
    tmp_path: Path,
) -> None:
    """Nor at a given one: `--pruner magnitude` is what the refusal of a wrong file advises."""
    tiny_llama(tmp_path)
    (tmp_path / "hierasparse.calibration").write_bytes(b"of nobody")
    words = ("serve", "--dry-run", "--device", "cpu", "--model", str(tmp_path))
    assert "is no calibration file" in invoke(*words).output
    assert invoke(*words, "--pruner", "magnitude").exit_code == 0


def test_capacity_of_a_demonstration_model_that_is_not_here_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HS_CACHE_DIR", str(tmp_path))
    result = invoke("doctor", "--capacity", "--device", "cpu")
    assert result.exit_code == 2 and "`hs-runtime serve` fetches it" in result.output


def test_capacity_stops_at_the_model_s_context(tmp_path: Path) -> None:
    tiny_llama(tmp_path, context=8192)
    result = invoke("doctor", "--capacity", "--device", "cpu", "--model", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "1K" in result.output and "8K" not in result.output
    assert "`serve` runs 16 at once" in result.output
