"""`hs-runtime serve` as a user starts it: its own process group, on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from hs_runtime.config import CONFIG_VARIABLE

ROOT = Path(__file__).parents[2]
START_SECONDS = 420.0
REFUSED_SECONDS = 240.0
STOP_SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "server")])
    env["OMP_NUM_THREADS"] = "1"
    return env | dict(extra or {})


def command(model: Path, port: int, *options: str) -> list[str]:
    words = [str(Path(sys.executable).with_name("hs-runtime")), "serve", "--model", str(model)]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *options]


class ServerProcess:
    """A running server; `client` speaks to it. `stop` sends SIGTERM and gives the exit code."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server as a user starts it (see `running`)."""
    port = free_port()
    with running(command(model, port, *options), port, log, env) as server:
        yield server


@contextlib.contextmanager
def running(
    words: Sequence[str], port: int, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that answers /ready; the process group is gone afterwards whatever happened."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(env),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServerProcess(process, port, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{log.read_text(errors='replace')[-4000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if server.client.get("/ready").status_code == 200:
                    break
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        yield server
    finally:
        server.kill()


def refused(words: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What a start that is refused prints; fails if it does not end, or ends well."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=REFUSED_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0, output[-4000:]
    return output
