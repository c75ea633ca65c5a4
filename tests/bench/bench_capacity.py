"""How many requests a KV cache admits under each preset, asked of the ledger: no device is needed.

    python tests/bench/bench_capacity.py --model DIR --dense-tokens 783360 --output DIR

DIR holds the model's config.json; `--dense-tokens` is what the cache holds when all is dense (as
`bench_e2e.py` prints it for a card). `requests` are whole; `tokens` are those of prompts that fit,
counted in an arena a hundred times as large, where the last request's rounding is lost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

LENGTHS = (8 << 10, 32 << 10, 128 << 10)
MANY = 100


def main() -> None:
    from hs_kernels.block_format import BlockFormat
    from hs_runtime.policies import PRESETS
    from hs_runtime.policies.policy import ServerConstants
    from hs_runtime.pool.sizing import size_pool
    from hs_runtime.scheduler.admission import BlockSizes, requests_at_once
    from hs_runtime.scheduler.lifecycle import Lifecycle

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dense-tokens", type=int, required=True)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    config = json.loads((args.model / "config.json").read_text())
    fmt = BlockFormat(config["head_dim"], config["torch_dtype"])
    rules = Lifecycle.of(ServerConstants())
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    superblocks = size_pool(fmt, args.dense_tokens, spare_pages=0).superblocks

    def fit(policy: str, length: int, times: int) -> int:
        chosen = PRESETS[policy]
        return requests_at_once(rules, sizes, superblocks * times, chosen, length, args.answer)

    for length in LENGTHS:
        for policy in PRESETS:
            for part, times in (("requests", 1), ("tokens", MANY)):
                ours, dense = (fit(name, length, times) for name in (policy, "dense"))
                scale = 1.0 if part == "requests" else length / MANY
                line = {
                    "bench": "capacity",
                    "case": {"L": length, "policy": policy, "part": part, "answer": args.answer},
                    "unit": part,
                    "ours": ours * scale,
                    "baseline": dense * scale,
                    "baseline_name": f"dense, {args.dense_tokens} tokens",
                    "ratio": ours / dense,
                    "versions": {},
                    "date": datetime.date.today().isoformat(),
                }
                print(length, policy, part, line["ours"], round(ours / dense, 3))
                if args.output:
                    args.output.mkdir(parents=True, exist_ok=True)
                    with (args.output / "capacity.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
