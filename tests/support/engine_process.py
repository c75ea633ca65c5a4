"""A process that runs one SGLang engine for a test and talks JSON lines; started by `engines`.

Its own process, because SGLang kills its parent when a scheduler fails, and because a stock engine
must not share an interpreter with our hooks. This module is imported again by the processes that
SGLang spawns, so it imports nothing heavy at the top.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import sys
from typing import Any

from hs_runtime import spawn

PAGE_DIGESTS = "HS_TEST_PAGE_DIGESTS"  # at idle, a digest of every cached page's bytes
SKEWED = "skewed"  # a request of this id makes the second rank count a retraction that was none


class Probe:
    """Appends what the scheduler does to a file, one JSON object a line: the evidence that a test
    saw chunks, retractions or an idle check, and did not pass for want of them."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", buffering=1)
        self.last = ""

    def write(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        if line != self.last:  # an idle scheduler repeats itself
            self.file.write(line + "\n")
            self.last = line

    def install(self) -> None:
        from hs_runtime.batching import BatchPlanner
        from hs_runtime.pool.radix_cache import HieraRadixCache

        plan_extend, plan_decode = BatchPlanner.plan_extend, BatchPlanner.plan_decode
        check_idle, make_private = HieraRadixCache.check_idle, HieraRadixCache.make_private
        reset = HieraRadixCache.reset

        @functools.wraps(plan_extend)
        def extend(planner: Any, chunks: Any) -> Any:
            rows = [(s.rid, s.position, end, s.n, s.decoding) for s, end, _ in chunks]
            plan = plan_extend(planner, chunks)
            self.write("extend", rows=rows)
            return plan

        @functools.wraps(plan_decode)
        def decode(planner: Any, steps: Any) -> Any:
            rows = [(s.rid, s.position) for s, _ in steps]
            plan = plan_decode(planner, steps)
            self.write("decode", rows=rows)
            return plan

        @functools.wraps(make_private)
        def private(tree: Any, state: Any) -> Any:
            self.write("private", rid=state.rid, pages=state.protected)
            return make_private(tree, state)

        @functools.wraps(reset)
        def flush(tree: Any) -> None:
            reset(tree)
            self.write("flush")

        @functools.wraps(check_idle)
        def idle(tree: Any) -> None:
            fresh = PAGE_DIGESTS in os.environ and not tree._checked
            check_idle(tree)
            if fresh:
                self.write("pages", digests=page_digests(tree))
            pool, storage = tree.block_pool, tree.storage
            self.write(
                "idle",
                checked=tree._check,
                used=sum(pool.ledger.used.values()),
                held_bytes=pool.used_bytes - pool.evictable_bytes,
                evictable=sum(pool.evictable.values()),
                superblocks=pool.ledger.superblocks,
                free_pages=tree.free_page_count(),
                cached_pages=tree.evictable_pages(),
                pages=pool.pages,
                moves=pool.ledger.moves,
                retractions=storage.retractions,
                compressed=storage.compressed_blocks,
            )

        BatchPlanner.plan_extend, BatchPlanner.plan_decode = extend, decode
        HieraRadixCache.check_idle, HieraRadixCache.make_private = idle, private
        HieraRadixCache.reset = flush


def page_digests(tree: Any) -> dict[str, str]:
    """By page id, of the pages in the prefix cache: refs and the blocks behind them, all layers."""
    pool, nodes, found = tree.block_pool, [tree.root_node], {}
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        for page in tree.pages_of(node) if node is not tree.root_node else ():
            digest = hashlib.blake2b(digest_size=16)
            for layer in range(pool.layers):
                dense, sparse = pool.dense_view(layer), pool.sparse_view(layer)
                for ref_of_side in pool.refs[layer, :, page].tolist():
                    for head, ref in enumerate(ref_of_side):
                        block = dense[ref, head] if ref > 0 else sparse[-ref, head]
                        digest.update(bytes([ref > 0]) + block.numpy().tobytes())
            found[str(page)] = digest.hexdigest()
    return found


def run_scheduler(*args: Any, probe: str = "", **kwargs: Any) -> None:
    if not spawn.has_cuda_driver():
        _ranks_of_the_cpu_need_no_nccl()
    if probe:
        Probe(probe).install()
        _skew()
    spawn.run_scheduler(*args, **kwargs)


def _skew() -> None:
    from torch import distributed

    from hs_runtime.batching import BatchPlanner

    plan_decode = BatchPlanner.plan_decode

    @functools.wraps(plan_decode)
    def decode(planner: Any, steps: Any) -> Any:
        skewed = any(state.rid == SKEWED for state, _ in steps)
        if skewed and distributed.get_rank() == 1:
            planner.storage.retractions += 1
        return plan_decode(planner, steps)

    BatchPlanner.plan_decode = decode


def _ranks_of_the_cpu_need_no_nccl() -> None:
    """SGLang's tensor parallelism on the CPU reduces with gloo, but makes a communicator for NCCL
    first, which wants a CUDA device."""
    from sglang.srt.distributed.device_communicators import pynccl

    class Disabled:
        disabled = True

        def __init__(self, **kwargs: Any) -> None: ...

        def change_state(self, enable: bool = False) -> Any:
            return contextlib.nullcontext()

    pynccl.PyNcclCommunicator = Disabled


def run_stock_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's own target; importing this module has put the stand-in for sgl_kernel in place."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    if HookRegistry._patched:
        raise RuntimeError(f"not a stock SGLang: {sorted(HookRegistry._patched)}")
    run_scheduler_process(*args, **kwargs)


def start(options: dict[str, Any]) -> Any:
    """`options`: stock, probe (a file), arguments (of SGLang's ServerArgs), environment."""
    from sglang.srt.entrypoints.engine import Engine

    class Launcher(Engine):
        run_scheduler_process_func = staticmethod(
            run_stock_scheduler
            if options["stock"]
            else functools.partial(run_scheduler, probe=options["probe"])
        )
        run_detokenizer_process_func = staticmethod(spawn.run_detokenizer)

    return Launcher(**options["arguments"])


async def generate(engine: Any, order: dict[str, Any]) -> list[dict[str, Any]]:
    """The final outputs of one GenerateReqInput; aborted after `abort_after` tokens if given."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    fields, abort_after = order["fields"], order.get("abort_after")
    wish = GenerateReqInput(**fields, stream=abort_after is not None)
    last: Any = None
    async for output in engine.tokenizer_manager.generate_request(wish, None):
        last = output
        if abort_after is not None and output["meta_info"]["completion_tokens"] >= abort_after:
            engine.tokenizer_manager.abort_request(output["meta_info"]["id"])
            abort_after = None
    return last if isinstance(last, list) else [last]


async def serve(engine: Any, answers: Any) -> None:
    loop, running = asyncio.get_running_loop(), set()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def answer(order: dict[str, Any]) -> None:
        try:
            if order["op"] == "generate":
                value: Any = await generate(engine, order)
            elif order["op"] == "flush":
                value = (await engine.tokenizer_manager.flush_cache()).success
            else:
                value = engine.tokenizer_manager.abort_request(order["rid"])
            reply = {"id": order["id"], "value": value}
        except Exception as error:
            reply = {"id": order["id"], "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")

    answers.write(json.dumps({"id": 0, "value": "ready"}) + "\n")
    while line := await reader.readline():
        order = json.loads(line)
        task = asyncio.create_task(answer(order))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    """Imports SGLang, which takes long, then waits for its options: one JSON line on stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints goes to the log
    import sglang.srt.entrypoints.engine  # noqa: F401

    with os.fdopen(os.dup(0), "rb", buffering=0) as orders:  # unbuffered: later lines stay there
        line = orders.readline()
    if not line:
        return
    options = json.loads(line)
    os.environ.update(options["environment"])
    engine = start(options)
    try:
        engine.loop.run_until_complete(serve(engine, answers))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
