"""A process with one SGLang engine for the evaluation; it talks JSON lines on stdin and stdout.

Its own process, because SGLang kills its parent when a scheduler fails, and because one run starts
several engines, of which a stock one must not share an interpreter with our hooks. The processes
that SGLang spawns import this module again, so it imports nothing heavy at the top.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from typing import Any

from hs_runtime import spawn
from hs_runtime.config import (
    PLUGIN_FILTER_VARIABLE,
    PLUGIN_NAME,
    RuntimeConfig,
    is_published,
    quiet_foreign_warnings,
    set_process_environment,
)


def start(options: dict[str, Any]) -> Any:
    """`options`: config (RuntimeConfig as JSON, "" for stock SGLang), arguments,
    tap_folder, layers (whether to add up K and V)."""
    stock = not options["config"]
    if not stock:
        RuntimeConfig.from_json(options["config"]).to_env()
    elif is_published():
        raise RuntimeError("a stock engine cannot start under the configuration of a server")
    # Only our plugin: the others that SGLang's dependencies install hook its command line.
    set_process_environment({PLUGIN_FILTER_VARIABLE: PLUGIN_NAME})
    quiet_foreign_warnings()
    spawn.prepare_process()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    class Launcher(Engine):
        run_scheduler_process_func = staticmethod(
            functools.partial(
                spawn.run_evaluated_scheduler,
                tap_folder=options["tap_folder"],
                layers=options["layers"],
                stock=stock,
            )
        )
        run_detokenizer_process_func = staticmethod(spawn.run_detokenizer)

    load_plugins()  # before the arguments are parsed: plugins check them
    return Launcher(server_args=prepare_server_args(options["arguments"]))


async def generate(engine: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The final output of one request, with the seconds to its first and to its last token."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    clock = asyncio.get_running_loop().time
    begin, first, last = clock(), 0.0, {}
    async for output in engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None):
        first, last = first or clock() - begin, output
    return {**last, "first_seconds": first, "seconds": clock() - begin}


async def serve(engine: Any, answers: Any) -> None:
    """Answers orders as they finish, until stdin ends."""
    loop, running = asyncio.get_running_loop(), set()
    reader = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def answer(order: dict[str, Any]) -> None:
        try:
            reply = {"id": order["id"], "output": await generate(engine, order["fields"])}
        except Exception as error:  # told to the evaluation, which stops with it
            reply = {"id": order["id"], "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")

    answers.write(json.dumps({"id": "ready"}) + "\n")
    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    """Waits for its options, one JSON line on stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints goes to the log
    with os.fdopen(os.dup(0), "rb", buffering=0) as orders:  # unbuffered: later lines stay there
        line = orders.readline()
    if not line:
        return
    engine = start(json.loads(line))
    try:
        engine.loop.run_until_complete(serve(engine, answers))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
