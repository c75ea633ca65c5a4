"""The server process: take the port, start the engine, serve until a signal, let requests finish.

`python -m hs_server` serves the configuration in the environment and passes its arguments to
SGLang; `hs-runtime serve` is the way to make both.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvicorn

from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.sglang_seam import StartupRefused

_BACKLOG = 2048
_HEADER_BYTES = 64 << 10  # of one request, all lines together; h11 answers 431 beyond
_KEEP_ALIVE_SECONDS = 30


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is found before the model loads.

    Until it listens, clients are refused, which is what a load balancer expects of a starting
    server. Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def run(config: RuntimeConfig, sglang_arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM; returns when all requests have ended or the drain is over.

    Raises SystemExit with code 2 for a wrong setting: a port that cannot be had, an option of
    SGLang's that cannot be served.
    """
    try:
        bound = take_port(config.host, config.port)
    except ConfigError as error:
        _say(f"hs-runtime serve: {error}")
        raise SystemExit(2) from None
    with bound:
        address, port = bound.getsockname()[:2]
        config = replace(config, port=port)
        _say(f"loading {config.model_path}")
        # Here and not above: importing SGLang takes ten seconds, and spawned processes, which
        # import this module again, must import the package's own start-up code before it.
        from hs_server.app import CLOSING_SECONDS, Server, create_app
        from hs_server.engine import SGLangEngine

        try:
            engine = SGLangEngine(config, list(sglang_arguments))
        except StartupRefused as error:
            _say(f"hs-runtime serve: {error}")
            raise SystemExit(2) from None
        app = create_app(engine, config)
        settings = uvicorn.Config(
            app,
            host=config.host,
            port=port,
            backlog=_BACKLOG,
            http="h11",
            h11_max_incomplete_event_size=_HEADER_BYTES,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2 * CLOSING_SECONDS,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        _say(banner(config, f"http://{f'[{address}]' if ':' in address else address}:{port}"))
        Server(settings, app.state.gate, config.drain_seconds).run(sockets=[bound])
    # The interpreter would collect once more, through all of torch and SGLang: seconds, in vain.
    gc.freeze()


def banner(config: RuntimeConfig, url: str) -> str:
    """What a person wants to know once: where, what, and how KV blocks are stored."""
    constants = config.constants
    without = "" if constants.calibration else " (no calibration file)"
    layers = ", ".join(map(str, constants.dense_layers))
    always = f"; always dense: layers {layers}" if layers else ""
    return (
        f"serving {config.model_name} on {url}\n"
        f"policy {config.default_policy.preset} by default; segment {constants.segment}, "
        f"window {constants.window}, sink {constants.sink}, anchor {constants.anchor}, "
        f"pruner {constants.pruner}{without}{always}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(RuntimeConfig.from_env(), sys.argv[1:])
