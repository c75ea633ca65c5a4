"""TTFT, TPOT and saturation of real SGLang processes, one JSON line for each case.

    python tests/bench/bench_e2e.py --model DIR --arm stock --scratch /tmp/e2e.json
    python tests/bench/bench_e2e.py --model DIR --arm fp8 --scratch /tmp/e2e.json
    python tests/bench/bench_e2e.py --model DIR --arm ours --scratch /tmp/e2e.json --output DIR

DIR holds a config.json; weights are SGLang's `--load-format dummy`, prompts are random token ids.
The arms stock (FlashAttention-3, bf16 KV) and fp8 (the same with fp8 KV) write what they measured
to the scratch file, ours reads it there, so that all ran on one machine. TTFT is from sending to
the first token, TPOT the time from the first to the last token over the tokens between, each the
median of `--repeat` prompts, of more where they are short.

Saturation (`--saturate LENGTH:ANSWER,...`): as many prompts of that length as the cache admits are
sent at once and answered with so many tokens each. `window` is output tokens a second from the last
first token to the first last one, when all decode and none prefills; `whole` is all output tokens
over all the time.

`--profile DIR` keeps a trace of prefill and seven decode steps at the first length.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

POLICIES = ("dense", "light", "balanced", "fast", "max")
CHUNK = 32768


def build_engine(model: str, arm: str, context: int, rows: int) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    from hs_runtime import spawn
    from hs_runtime.config import RuntimeConfig

    class Ours(Engine):
        run_scheduler_process_func = staticmethod(spawn.run_scheduler)
        run_detokenizer_process_func = staticmethod(spawn.run_detokenizer)

    options: dict[str, Any] = {
        "model_path": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": context,
        "chunked_prefill_size": CHUNK,
        "max_prefill_tokens": CHUNK,
        "max_running_requests": rows,
        "mem_fraction_static": 0.8,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_max_bs_decode": rows,
        "disable_radix_cache": True,
        "log_level": "warning",
    }
    if arm != "ours":
        if arm == "fp8":
            options["kv_cache_dtype"] = "fp8_e4m3"
        return Engine(**options, attention_backend="fa3")
    RuntimeConfig().to_env()
    return Ours(**options, attention_backend="hierasparse", page_size=64)


def parameters(policy: str | None, tokens: int) -> dict[str, Any]:
    from hs_runtime.policies import CUSTOM_PARAM, PRESETS

    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if policy is not None:
        params["custom_params"] = {CUSTOM_PARAM: PRESETS[policy].to_json()}
    return params


async def one(engine: Any, ids: list[int], policy: str | None, tokens: int) -> dict[str, Any]:
    """`events`: (seconds since the clock's zero, output tokens so far), as they arrived."""
    start = time.perf_counter()
    events: list[tuple[float, int]] = []
    report: dict[str, Any] = {}
    stream = await engine.async_generate(
        input_ids=ids, sampling_params=parameters(policy, tokens), stream=True
    )
    async for output in stream:
        events.append((time.perf_counter(), output["meta_info"]["completion_tokens"]))
        texts = [text for text in output["meta_info"].get("hierasparse") or [] if text]
        if texts:
            report = json.loads(texts[-1])
    (first, _), (last, count) = events[0], events[-1]
    if count != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {count}")
    tpot = (last - first) / (tokens - 1)
    return {"ttft": first - start, "tpot": tpot, "report": report, "events": events}


def prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(1000, 100_000) for _ in range(length)]


def measure(
    engine: Any, length: int, policy: str | None, tokens: int, repeat: int
) -> dict[str, Any]:
    rng = random.Random(length)
    runs = [
        engine.loop.run_until_complete(one(engine, prompt(length, rng), policy, tokens))
        for _ in range(repeat)
    ]
    middle = {name: statistics.median(run[name] for run in runs) for name in ("ttft", "tpot")}
    return {**middle, "report": runs[-1]["report"]}


def profile(engine: Any, length: int, policy: str | None, folder: Path) -> None:
    """A trace of a prefill and the decode steps after it, for Perfetto or chrome://tracing."""
    from sglang.srt.managers.io_struct import ProfileReq

    ids = prompt(length, random.Random(1))
    steps = -(-length // CHUNK) + 7
    wish = ProfileReq(
        output_dir=str(folder), num_steps=steps, activities=["CPU", "GPU"], with_stack=False
    )

    async def traced() -> None:
        await engine.tokenizer_manager.start_profile(wish)
        stream = await engine.async_generate(
            input_ids=ids, sampling_params=parameters(policy, 64), stream=True
        )
        async for _ in stream:
            pass

    engine.loop.run_until_complete(traced())


def admitted(
    engine: Any, policy: str | None, length: int, answer: int, rows: int
) -> tuple[int, int]:
    """How many such requests the cache holds at once, and its dense tokens."""
    info = engine.get_server_info()
    tokens = int(info["max_total_num_tokens"])
    if policy is None:
        return tokens // (length + answer), tokens
    from hs_kernels.block_format import BlockFormat
    from hs_runtime.policies import PRESETS
    from hs_runtime.policies.policy import ServerConstants
    from hs_runtime.scheduler.admission import BlockSizes, requests_at_once
    from hs_runtime.scheduler.lifecycle import Lifecycle

    # The launcher asks for page ids of an arena all of sparse blocks, and some to spare.
    fmt, constants = BlockFormat(128, "bfloat16"), ServerConstants()
    spare = (constants.window + 2 * constants.segment) // 64 * rows
    superblocks = (tokens // 64 - spare) // fmt.sparse_per_superblock
    dense = superblocks * fmt.dense_per_superblock // 2 * 64
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    rules = Lifecycle.of(constants)
    return requests_at_once(rules, sizes, superblocks, PRESETS[policy], length, answer), dense


def saturate(
    engine: Any, length: int, policy: str | None, answer: int, rows: int
) -> dict[str, Any]:
    count, dense = admitted(engine, policy, length, answer, rows)
    count = min(count, rows)
    rng = random.Random(length)
    prompts = [prompt(length, rng) for _ in range(count)]

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(engine, ids, policy, answer) for ids in prompts))

    start = time.perf_counter()
    runs = engine.loop.run_until_complete(together())
    end = time.perf_counter()
    opens = max(run["events"][0][0] for run in runs)
    closes = min(run["events"][-1][0] for run in runs)

    def at(events: list[tuple[float, int]], moment: float) -> int:
        return max((tokens for when, tokens in events if when <= moment), default=0)

    inside = sum(at(run["events"], closes) - at(run["events"], opens) for run in runs)
    return {
        "requests": count,
        "dense_tokens": dense,
        "window": inside / (closes - opens),
        "window_seconds": closes - opens,
        "whole": count * answer / (end - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--arm", choices=("stock", "fp8", "ours"), required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--lengths", default="512,4096,32768,130048", help="of TTFT and TPOT; '' for none"
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--saturate", default="", metavar="LENGTH:ANSWER,...")
    parser.add_argument("--saturate-policies", default="max")
    parser.add_argument("--profile", type=Path, metavar="DIR")
    parser.add_argument("--rows", type=int, default=48, help="requests at once, at most")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",") if text]
    ours = args.arm == "ours"
    if ours and not args.scratch.is_file():
        parser.error(f"--scratch {args.scratch}: run the arm stock first")

    full = [tuple(map(int, text.split(":"))) for text in args.saturate.split(",") if text]
    context = max([length + args.tokens for length in lengths] + [sum(each) for each in full])
    context += 1024
    engine = build_engine(args.model, args.arm, context, args.rows)
    asyncio.set_event_loop(engine.loop)
    known = json.loads(args.scratch.read_text()) if args.scratch.is_file() else {}
    results = known.setdefault(args.arm, {})
    policies = args.policies.split(",") if ours else [None]
    measure(engine, 2048, policies[-1], 9, 1)  # compiles and warms what the first request would
    import torch

    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def write(bench: str, case: dict[str, Any], unit: str, value: float, stock: float) -> None:
        better = stock / value if unit == "s" else value / stock
        line = {
            "bench": bench,
            "case": {**case, "data": "random, dummy weights"},
            "unit": unit,
            "ours": value,
            "baseline": stock,
            "baseline_name": "stock SGLang 0.5.17, fa3, bf16 KV",
            "ratio": better,
            "versions": versions,
            "date": datetime.date.today().isoformat(),
        }
        print(bench, case, round(better, 3), flush=True)
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            with (args.output / f"{bench}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    if args.profile:
        profile(engine, (lengths or [full[0][0]])[0], policies[-1], args.profile / args.arm)
    for length in lengths:
        for policy in policies:
            repeat = max(args.repeat, min(20, 32768 // length))  # short ones vary, and are cheap
            found = measure(engine, length, policy, args.tokens, repeat)
            results[f"{length} {policy}"] = found
            times = {name: round(found[name], 5) for name in ("ttft", "tpot")}
            print(args.arm, length, policy, times, found["report"], flush=True)
            if not ours:
                continue
            report = found["report"]
            bytes_of = {key: report[key] for key in ("kv_bytes", "dense_equivalent_bytes")}
            case = {"B": 1, "L": length, "policy": policy, **bytes_of}
            for name in ("ttft", "tpot"):
                write(f"e2e_{name}", case, "s", found[name], known["stock"][f"{length} None"][name])
    for length, answer in full:
        for policy in args.saturate_policies.split(",") if ours else [None]:
            found = saturate(engine, length, policy, answer, args.rows)
            results[f"saturation {length} {policy}"] = found
            print(args.arm, "saturation", length, policy, found, flush=True)
            args.scratch.write_text(json.dumps(known))
            if not ours:
                continue
            for part in ("window", "whole"):
                case = {"L": length, "answer": answer, "policy": policy, "part": part}
                name = f"saturation {length} None"
                for arm in ("stock", "fp8"):
                    if name in known.get(arm, {}):
                        other = known[arm][name]
                        case[arm] = {"requests": other["requests"], "tokens_per_s": other[part]}
                case["requests"] = found["requests"]
                stock = known["stock"][name][part]
                write("saturation", case, "output tokens/s", found[part], stock)
    args.scratch.write_text(json.dumps(known))
    engine.shutdown()


if __name__ == "__main__":
    main()
