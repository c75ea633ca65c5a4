"""One value configures every process: it survives the environment, and refuses what cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hs_runtime.config import (
    CACHE_VARIABLE,
    CONFIG_VARIABLE,
    PLUGIN_FILTER_VARIABLE,
    ConfigError,
    RuntimeConfig,
    cache_dir,
    is_published,
    plugin_filter,
)
from hs_runtime.policies.policy import PRESETS, ServerConstants

CUSTOM = RuntimeConfig(
    constants=ServerConstants(segment=512, window=128, anchor="chunk", chunk=2048),
    default_policy=PRESETS["fast"],
    model_path="/models/a b",
    served_model_name="näme",
    cors_origins=("https://one.example", "*"),
    kv_cache_bytes=1 << 33,
    check_integrity=False,
)


@pytest.fixture(autouse=True)
def _no_published_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set before it is removed, so that what a test publishes is undone even if nothing was set.
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    monkeypatch.delenv(CONFIG_VARIABLE)


@pytest.mark.parametrize("config", [RuntimeConfig(), CUSTOM], ids=["defaults", "custom"])
def test_json_gives_back_an_equal_value(config: RuntimeConfig) -> None:
    text = config.to_json()
    assert RuntimeConfig.from_json(text) == config
    assert RuntimeConfig.from_json(text).to_json() == text
    assert "\n" not in text


def test_a_spawned_process_reads_the_same_value() -> None:
    CUSTOM.to_env()
    program = (
        "from hs_runtime.config import RuntimeConfig; print(RuntimeConfig.from_env().to_json())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert printed.strip() == CUSTOM.to_json()


def test_nothing_published_is_the_defaults_and_says_so() -> None:
    assert not is_published()
    assert RuntimeConfig.from_env() == RuntimeConfig()


def test_publishing_sets_one_variable() -> None:
    before = dict(os.environ)
    variable = CUSTOM.to_env()
    assert is_published()
    assert {**before, **variable} == dict(os.environ)
    assert list(variable) == [CONFIG_VARIABLE]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"sgement": 1}', "sgement"),
        ('{"constants": 3}', "constants"),
        ('{"constants": {"widow": 1}}', "widow"),
        ('{"constants": {"segment": 100}}', "segment"),
        ('{"constants": {"anchor": "middle"}}', "segment, chunk"),
        ('{"default_policy": {"bits": 16}}', "policy"),
        ('{"default_policy": {"bits": 16, "decode": [0, 0], "prefill": [1000, 0]}}', "decode k"),
        ('{"cors_origins": 5}', "int"),
    ],
)
def test_a_malformed_configuration_is_refused_with_the_choices(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RuntimeConfig.from_json(text)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_path", ""),
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("max_request_bytes", 0),
        ("max_running_streams", -2),
        ("drain_seconds", 0.0),
        ("kv_cache_bytes", -1),
        ("cors_origins", ("example.com",)),
    ],
)
def test_an_impossible_setting_is_named(setting: str, value: object) -> None:
    values = json.loads(RuntimeConfig().to_json()) | {setting: value}
    with pytest.raises(ConfigError, match=setting.removesuffix("_path")):
        RuntimeConfig.from_json(json.dumps(values))


def test_the_model_is_called_by_its_folder_unless_it_has_a_name() -> None:
    assert RuntimeConfig(model_path="/models/Llama-3.1-8B/").model_name == "Llama-3.1-8B"
    assert RuntimeConfig(model_path="/models/x", served_model_name="chat").model_name == "chat"


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "hierasparse"


def test_the_plugin_filter_is_read_as_sglang_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_FILTER_VARIABLE, " hierasparse , other,")
    assert plugin_filter() == {"hierasparse", "other"}
    monkeypatch.setenv(PLUGIN_FILTER_VARIABLE, "")
    assert plugin_filter() is None
