"""What would silently serve dense KV, or crash later, is refused at start and named."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.support.server_process import command, environment, free_port, refused

pytestmark = pytest.mark.integration

# Starts what a server starts, up to the check that everything took hold, without a model.
VERIFY = """
from hs_runtime import spawn, sglang_seam
from hs_runtime.config import RuntimeConfig
{breakage}
RuntimeConfig().to_env()
spawn._load_plugin()
print("everything took hold")
"""


def verify(breakage: str = "") -> list[str]:
    return [sys.executable, "-c", VERIFY.format(breakage=breakage)]


def test_a_whole_plugin_is_accepted() -> None:
    import subprocess

    done = subprocess.run(
        verify(), env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "everything took hold" in done.stdout


def test_a_hook_whose_target_is_gone_is_named() -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.no_such_method"
    breakage = f"""
hooks = sglang_seam._hooks
sglang_seam._hooks = lambda: {{**hooks(), "{target}": ("AROUND", lambda orig, *a: orig(*a))}}
"""
    assert target in refused(verify(breakage))


def test_a_plugin_that_fails_is_not_served_around() -> None:
    breakage = """
def broken():
    raise ImportError("half installed")
sglang_seam._hooks = broken
"""
    assert "hierasparse plugin" in refused(verify(breakage))


def test_a_plugin_that_is_not_loaded_is_named() -> None:
    output = refused(verify(), env={"SGLANG_PLUGINS": "another"})
    assert "SGLANG_PLUGINS" in output and "hierasparse" in output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--page-size", "1"), "--page-size 64"),
        (("--enable-mixed-chunk",), "--enable-mixed-chunk"),
        (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype"),
        (("--attention-backend", "torch_native"), "--attention-backend"),
        (("--anchor", "chunk", "--chunked-prefill-size", "512", "--window", "512"), "window"),
        (("--segment", "100"), "multiple of 128"),
        (("--pruner", "psychic"), "magnitude"),
    ],
)
def test_an_option_that_cannot_be_served_names_the_legal_one(
    tiny: Path, options: tuple[str, ...], named: str
) -> None:
    said = refused(command(tiny, free_port(), *options))
    assert named in said and "hs-runtime serve: " in said and "Traceback" not in said, said[-3000:]


def test_a_taken_port_is_found_before_the_model_is_loaded(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(command(tiny, port))
