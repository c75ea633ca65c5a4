"""TTFT and TPOT of real SGLang processes with random weights, one JSON line for each case.

    python tests/bench/bench_e2e.py --model DIR --arm stock --scratch /tmp/e2e.json
    python tests/bench/bench_e2e.py --model DIR --arm ours --scratch /tmp/e2e.json --output DIR

DIR holds a config.json; weights are SGLang's `--load-format dummy`, prompts are random token ids.
The stock arm (FlashAttention-3, bf16 KV) writes its times to the scratch file, ours reads them
there, so that both ran on one machine. TTFT is from sending to the first token, TPOT the time from
the first to the last token over the tokens between, each the median of `--repeat` prompts.
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


def build_engine(model: str, arm: str, context: int) -> Any:
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
        "max_running_requests": 16,
        "mem_fraction_static": 0.8,
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_max_bs_decode": 8,
        "disable_radix_cache": True,
        "log_level": "warning",
    }
    if arm == "stock":
        return Engine(**options, attention_backend="fa3")
    RuntimeConfig().to_env()
    return Ours(**options, attention_backend="hierasparse", page_size=64)


async def one(engine: Any, ids: list[int], policy: str | None, tokens: int) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if policy is not None:
        from hs_runtime.policies import CUSTOM_PARAM, PRESETS

        params["custom_params"] = {CUSTOM_PARAM: PRESETS[policy].to_json()}
    start = time.perf_counter()
    first = last = 0.0
    report: dict[str, Any] = {}
    stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
    async for output in stream:
        last = time.perf_counter()
        first = first or last
        texts = [text for text in output["meta_info"].get("hierasparse") or [] if text]
        if texts:
            report = json.loads(texts[-1])
    return {"ttft": first - start, "tpot": (last - first) / (tokens - 1), "report": report}


def measure(
    engine: Any, length: int, policy: str | None, tokens: int, repeat: int
) -> dict[str, Any]:
    rng = random.Random(length)
    runs = []
    for _ in range(repeat):
        ids = [rng.randrange(1000, 100_000) for _ in range(length)]
        runs.append(engine.loop.run_until_complete(one(engine, ids, policy, tokens)))
    middle = {name: statistics.median(run[name] for run in runs) for name in ("ttft", "tpot")}
    return {**middle, "report": runs[-1]["report"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--arm", choices=("stock", "ours"), required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--lengths", default="32768,130048")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]

    engine = build_engine(args.model, args.arm, max(lengths) + 1024)
    asyncio.set_event_loop(engine.loop)
    policies = [None] if args.arm == "stock" else args.policies.split(",")
    known = json.loads(args.scratch.read_text()) if args.arm == "ours" else {}
    measure(engine, 2048, policies[0], 9, 1)  # compiles and warms what the first request would
    import torch

    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for length in lengths:
        for policy in policies:
            found = measure(engine, length, policy, args.tokens, args.repeat)
            print(args.arm, length, policy, {k: round(found[k], 5) for k in ("ttft", "tpot")})
            if args.arm == "stock":
                known[str(length)] = found
                continue
            for name, unit in (("ttft", "s"), ("tpot", "s")):
                baseline = known[str(length)][name]
                line = {
                    "bench": f"e2e_{name}",
                    "case": {
                        "B": 1,
                        "L": length,
                        "policy": policy,
                        "data": "random, dummy weights",
                    },
                    "unit": unit,
                    "ours": found[name],
                    "baseline": baseline,
                    "baseline_name": "stock SGLang 0.5.17, fa3, bf16 KV",
                    "ratio": baseline / found[name],
                    "kv_bytes": found["report"].get("kv_bytes"),
                    "dense_equivalent_bytes": found["report"].get("dense_equivalent_bytes"),
                    "versions": versions,
                    "date": datetime.date.today().isoformat(),
                }
                print(name, policy, round(line["ratio"], 3), flush=True)
                if args.output:
                    args.output.mkdir(parents=True, exist_ok=True)
                    with (args.output / f"e2e_{name}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
    if args.arm == "stock":
        args.scratch.write_text(json.dumps(known))
    engine.shutdown()


if __name__ == "__main__":
    main()
