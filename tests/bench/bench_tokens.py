"""Greedy tokens of the demonstration model on this device against those of the CPU in float32.

    python tests/bench/bench_tokens.py --device cpu --write /tmp/tokens.json
    python tests/bench/bench_tokens.py --device cuda --against /tmp/tokens.json --output DIR

Prompts are passages of the Python language reference that comes with the interpreter. An answer
counts up to its first token that differs (a flip); a flip is explained by how far apart the CPU
held the two tokens. `largest_distance` is that of the log-probabilities that both give the CPU's
tokens, `without_distance` how many of those are not among the ten most likely here. One JSON line
for each policy, bench `quality`, part `greedy tokens`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

POLICIES = ("dense", "balanced", "max")
PROMPTS, TOKENS, CANDIDATES = 8, 64, 10
LENGTHS = (600, 900, 1200, 1500, 1800, 2100, 2400, 2700)
EXPLAINED = 0.05  # nats between the two tokens


def passages(model: str) -> list[list[int]]:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids
    step = len(ids) // PROMPTS
    return [ids[i * step : i * step + length] for i, length in enumerate(LENGTHS)]


def build_engine(model: str, device: str, dtype: str, pruner: str) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    from hs_runtime import spawn
    from hs_runtime.calibration.file import DEMO_FILE, digest
    from hs_runtime.config import RuntimeConfig
    from hs_runtime.policies import ServerConstants

    class Ours(Engine):
        run_scheduler_process_func = staticmethod(spawn.run_scheduler)
        run_detokenizer_process_func = staticmethod(spawn.run_detokenizer)

    calibrated = pruner == "calibrated"
    constants = ServerConstants(pruner=pruner, calibration=digest(DEMO_FILE) if calibrated else "")
    RuntimeConfig(
        constants=constants,
        model_path=model,
        calibration_path=str(DEMO_FILE) if calibrated else "",
    ).to_env()
    options: dict[str, Any] = {
        "model_path": model,
        "device": device,
        "dtype": dtype,
        "attention_backend": "hierasparse",
        "page_size": 64,
        "skip_tokenizer_init": True,
        "max_total_tokens": 16384,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 8192,
        "max_running_requests": 8,
        "disable_cuda_graph": device == "cpu",
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_max_bs_decode": 8,
        "log_level": "warning",
    }
    if device == "cpu":
        del options["cuda_graph_backend_prefill"], options["cuda_graph_max_bs_decode"]
    else:
        options["mem_fraction_static"] = 0.3
    return Ours(**options)


def answer(engine: Any, prompt: list[int], policy: str) -> dict[str, Any]:
    """Tokens, and at each place the most likely ones with their log-probabilities."""
    from hs_runtime.policies import CUSTOM_PARAM, PRESETS

    output = engine.generate(
        input_ids=prompt,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
            "custom_params": {CUSTOM_PARAM: PRESETS[policy].to_json()},
        },
        return_logprob=True,
        top_logprobs_num=CANDIDATES,
    )
    meta = output["meta_info"]
    return {
        "tokens": [each[1] for each in meta["output_token_logprobs"]],
        "likely": [
            {str(each[1]): each[0] for each in place} for place in meta["output_top_logprobs"]
        ],
    }


def compare(policy: str, pruner: str, got: list[Any], want: list[Any]) -> dict[str, Any]:
    compared = equal = 0
    flips = []
    distances = []  # of a token's log-probability, where both had the same tokens before
    unlikely = 0  # tokens of the CPU that are not even among ours that were kept
    for number, (ours, reference) in enumerate(zip(got, want, strict=True)):
        pairs = list(zip(ours["tokens"], reference["tokens"], strict=True))
        same = [a == b for a, b in pairs]
        first = same.index(False) if False in same else len(same)
        equal += first
        compared += min(first + 1, len(same))
        for (_, wanted), found, known in list(
            zip(pairs, ours["likely"], reference["likely"], strict=True)
        )[: first + 1]:
            if (token := str(wanted)) in found:
                distances.append(abs(found[token] - known[token]))
            else:
                unlikely += 1
        if first < len(same):
            likely = reference["likely"][first]
            mine, theirs = (str(token) for token in pairs[first])
            gap = likely[theirs] - likely.get(mine, -float("inf"))
            flips.append({"prompt": number, "place": first, "gap": gap})
    unexplained = [flip for flip in flips if flip["gap"] >= EXPLAINED]
    return {
        "bench": "quality",
        "case": {"policy": policy, "part": "greedy tokens", "pruner": pruner},
        "unit": "share of tokens equal to the CPU's before and at the first that differs",
        "ours": equal / compared,
        "baseline": 1.0,
        "baseline_name": "float32 on the CPU",
        "ratio": equal / compared,
        "flips": flips,
        "largest_distance": max(distances),
        "without_distance": unlikely,
        "unexplained": len(unexplained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the demonstration model's folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", help="default: float32 on the CPU, float16 elsewhere")
    parser.add_argument("--pruner", choices=("calibrated", "magnitude"), default="calibrated")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.model is None:
        from hs_runtime.demo_model import ensure_demo_model

        args.model = str(ensure_demo_model())
    known = json.loads(args.against.read_text()) if args.against else {}
    prompts = known.get("prompts") or passages(args.model)
    if known.get("pruner", args.pruner) != args.pruner:
        parser.error(f"{args.against} was made by --pruner {known['pruner']}")
    dtype = args.dtype or ("float32" if args.device == "cpu" else "float16")
    engine = build_engine(args.model, args.device, dtype, args.pruner)
    found: dict[str, Any] = {"prompts": prompts, "pruner": args.pruner}
    for policy in POLICIES:
        found[policy] = [answer(engine, prompt, policy) for prompt in prompts]
        print(policy, "done", flush=True)
    engine.shutdown()
    if args.write:
        args.write.write_text(json.dumps(found))
    if not known:
        return
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {dtype}"
    versions = {"device": name, "torch": torch.__version__}
    for policy in POLICIES:
        line = compare(policy, args.pruner, found[policy], known[policy])
        line |= {"versions": versions, "date": datetime.date.today().isoformat()}
        print(json.dumps(line), flush=True)
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            with (args.output / "quality.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
