"""The server process fails early on a taken port, and says once what it serves."""

from __future__ import annotations

import socket

import pytest

from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.policies.policy import PRESETS, ServerConstants
from hs_server.__main__ import banner, run, take_port


def test_a_taken_port_is_refused_before_anything_loads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with take_port("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use"):
            take_port("127.0.0.1", port)
        with pytest.raises(SystemExit) as ended:
            run(RuntimeConfig(port=port), [])
        assert ended.value.code == 2
        assert "in use" in capsys.readouterr().err


def test_a_taken_port_refuses_clients_until_it_listens() -> None:
    with take_port("127.0.0.1", 0) as bound:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname(), timeout=5)
        bound.listen()
        socket.create_connection(bound.getsockname(), timeout=5).close()


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        take_port("192.0.2.1", 0)


def test_the_banner_names_the_place_the_policy_and_the_pruner() -> None:
    config = RuntimeConfig(
        model_path="/models/llama",
        default_policy=PRESETS["balanced"],
        constants=ServerConstants(segment=512),
    )
    text = banner(config, "http://127.0.0.1:1")
    for part in ("llama", "http://127.0.0.1:1", "balanced", "segment 512", "no calibration file"):
        assert part in text
