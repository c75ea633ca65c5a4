"""A bounded random mix on a real engine, with requests in between whose answers are known.

    python -m tests.soak.soak --seconds 1800

Policies (presets and fractional masks), lengths, prefixes that end inside segments, aborts at any
moment, forced retraction and retraction for want of bytes. The engine checks the pool's laws after
every batch, SGLang its own; whenever the mix has drained nothing may be held. The answers that are
known come from the rules, computed naively (`tests.support.oracle`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.policies.policy import Sparsity
from tests.support.checkpoints import tiny_llama
from tests.support.engines import STRICT_CHECKS, Answer, Ask, Engine, EngineOptions, policy
from tests.support.golden import Golden, assert_answer
from tests.support.oracle import Greedy

SEGMENT, WINDOW = 128, 64
CACHE_TOKENS = 6144  # about three of the longest prompts: requests wait, are evicted, are retracted
OUTSTANDING = (3, 8, 14)  # requests at once, drawn for each round: a warm cache, or want of bytes
ROUND_SECONDS = 30.0
STUCK_SECONDS = 300.0
GOLDEN_NEW = 24
RETRACT_INTERVAL = 150  # forwards between two forced retractions
FLOORS = {
    "requests": 2000,
    "aborts": 200,
    "retractions": 50,
    "sparse_prefix_hits": 200,
    "fractional": 200,
}
FLOORS_FROM_SECONDS = 1800.0
GROWTH_LIMIT = 0.05


@dataclass(frozen=True)
class Known:
    """A prompt with its answer under a policy."""

    prompt: tuple[int, ...]
    policy: SparsityPolicy
    want: Greedy


@dataclass
class Pending:
    number: int
    ask: Ask
    known: Known | None
    sent: float
    abort_at: float | None = None


class Mix:
    """Draws requests; the same seed, the same sequence."""

    def __init__(self, seed: int, golden: Golden, options: EngineOptions) -> None:
        self.rng = random.Random(seed)
        self.documents = [self._tokens(self.rng.randrange(500, 1500)) for _ in range(4)]
        self.prefills = [Sparsity(*each) for each in ((0, 500), (500, 500), (300, 750), (250, 0))]
        self.count = 0
        self.known = [
            self._known(golden, options, chosen, length)
            for chosen in (
                *PRESETS.values(),
                policy((500, 500)),
                policy((300, 0), (750, 500)),
                policy((0, 0), (500, 250)),
            )
            for length in (170, 430, 800, 1300)
        ]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(count)]

    def _known(
        self, golden: Golden, options: EngineOptions, chosen: SparsityPolicy, length: int
    ) -> Known:
        """Half of each prompt is the start of a document, which other requests share; of one that
        leaves no close call (see `golden`)."""
        for document in self.rng.sample(self.documents, len(self.documents)):
            shared = document[: length // 2 + self.rng.randrange(64)]
            with contextlib.suppress(AssertionError):
                prompt = golden.prompt(
                    options, [chosen], length, max_new=GOLDEN_NEW, prefix=shared, tries=20
                )
                answer = golden.answer(options, chosen, prompt, GOLDEN_NEW)
                return Known(tuple(prompt), chosen, answer)
        raise AssertionError(f"no document starts a clear prompt of {length} tokens")

    def _policy(self) -> SparsityPolicy:
        if self.rng.random() < 0.6:
            return self.rng.choice(list(PRESETS.values()))
        before = self.rng.choice(self.prefills)
        after = (
            self.rng.choice([each, (each + 1000) // 2, 1000]) for each in (before.key, before.value)
        )
        return SparsityPolicy(before, Sparsity(*after))

    def _prompt(self) -> list[int]:
        length = int(100 * 20 ** self.rng.random())
        shared: list[int] = []
        if self.rng.random() < 0.75:
            document = self.rng.choice(self.documents)
            limit = min(length, len(document))
            shared = document[: self.rng.randrange(limit // 2, limit)]
        return shared + self._tokens(length - len(shared))

    def next(self) -> tuple[Ask, Known | None, float | None]:
        """A request; its known answer, if it has one; after how many seconds to abort it, if so."""
        rng = self.rng
        self.count += 1
        rid = f"soak-{self.count}-"
        if rng.random() < 0.12:
            known = rng.choice(self.known)
            return Ask(known.prompt, known.policy, GOLDEN_NEW, rid=rid), known, None
        new = rng.randrange(150, 300) if rng.random() < 0.05 else rng.randrange(1, 40)
        abort_after = abort_seconds = None
        if rng.random() < 0.14:
            if rng.random() < 0.4:
                abort_after, new = rng.randrange(1, 12), max(new, 20)
            else:
                abort_seconds = rng.random() ** 2 * 6
        ask = Ask(self._prompt(), self._policy(), new, rid=rid, abort_after=abort_after)
        return ask, None, abort_seconds


@dataclass
class Soak:
    engine: Engine
    mix: Mix
    tally: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)
    _read: int = 0

    def send(self, now: float) -> None:
        ask, known, abort_seconds = self.mix.next()
        abort_at = None if abort_seconds is None else now + abort_seconds
        self.pending.append(Pending(self.engine.send(ask), ask, known, now, abort_at))

    def collect(self, now: float) -> bool:
        """Aborts what is due and takes what has come; whether anything had."""
        came = [each for each in self.pending if self.engine.answered(each.number)]
        for each in came:
            self.pending.remove(each)
            self._count(each, self.engine.take(each.number))
        for each in self.pending:
            if each.abort_at is not None and now >= each.abort_at:
                each.abort_at = None
                assert each.ask.rid is not None
                self.engine.abort(each.ask.rid)
            if now - each.sent > STUCK_SECONDS:
                raise TimeoutError(f"{each.ask.rid} has had no answer for {STUCK_SECONDS:.0f} s")
        return bool(came)

    def _count(self, each: Pending, answer: Answer) -> None:
        tally, ask = self.tally, each.ask
        assert ask.policy is not None
        shares = (ask.policy.prefill, ask.policy.decode)
        tally["requests"] += 1
        tally["output_tokens"] += len(answer.tokens)
        tally["aborts"] += answer.finish == "abort"
        tally["fractional"] += any(0 < x < 1000 for s in shares for x in (s.key, s.value))
        if not ask.policy.prefill.is_dense:
            tally["sparse_prefix_hits"] += answer.cached > 0
            if answer.finish == "length":
                tally["compressed_segments"] += (len(ask.prompt) - answer.cached) // SEGMENT
        if each.known is None:
            if answer.finish == "length" and len(answer.tokens) != ask.max_new:
                self._say_wrong(f"{len(answer.tokens)} of {ask.max_new} tokens", ask, answer)
            return
        tally["golden"] += 1
        tally["golden_retracted"] += answer.retractions > 0
        tally["golden_cached"] += answer.cached > 0
        try:
            assert_answer(str(ask.rid), answer, each.known.want)
        except AssertionError as error:
            self._say_wrong(str(error), ask, answer)

    def _say_wrong(self, what: str, ask: Ask, answer: Answer) -> None:
        assert ask.policy is not None
        text = (
            f"{ask.rid}: {what}; {ask.policy.to_json()}, prompt of {len(ask.prompt)} tokens, "
            f"abort after {ask.abort_after}, cached {answer.cached}, "
            f"retracted {answer.retractions}"
        )
        self.wrong.append(text)
        print("WRONG", text, flush=True)

    def drain(self) -> None:
        """Waits until all have ended and the scheduler has checked its books at idle."""
        self._idle_events()
        while self.pending:
            if not self.collect(time.monotonic()):
                time.sleep(0.02)
        # A last request whose end the scheduler sees after the drain began: idle comes after it.
        self.engine.run(Ask(self.mix.documents[0][:70], PRESETS["dense"], 1))
        deadline = time.monotonic() + STUCK_SECONDS
        while not self._idle_events():
            if time.monotonic() > deadline:
                raise TimeoutError("the scheduler never checked its books")
            time.sleep(0.05)
        self.tally["checked_idle"] += 1
        self.tally["leaked_bytes"] += self.idle["held_bytes"]

    def _idle_events(self) -> bool:
        """Reads what the scheduler has reported since the last call; whether it was idle last."""
        with self.engine.probe.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read += whole
        last = ""
        for line in text[:whole].splitlines():
            event = json.loads(line)
            last = event["kind"]
            if last == "idle":
                self.idle = event
        return last == "idle"

    def measure(self, now: float) -> None:
        root = psutil.Process(self.engine.process.pid)
        total = sum(each.memory_info().rss for each in (root, *root.children(recursive=True)))
        self.memory.append((now, total))

    def growth(self) -> float:
        """Of resident memory from the second fifth of the run to the last."""
        start, end = self.memory[0][0], self.memory[-1][0]
        fifth = max((end - start) / 5, 1e-9)
        parts: dict[int, list[int]] = {}
        for moment, size in self.memory:
            parts.setdefault(min(int((moment - start) / fifth), 4), []).append(size)
        early = parts.get(1) or parts[0]
        return statistics.median(parts[4]) / statistics.median(early) - 1

    def run(self, seconds: float) -> None:
        start = now = time.monotonic()
        while now - start < seconds:
            stop = min(now + ROUND_SECONDS, start + seconds)
            outstanding = self.mix.rng.choice(OUTSTANDING)
            while (now := time.monotonic()) < stop:
                while len(self.pending) < outstanding and self.mix.rng.random() < 0.7:
                    self.send(now)
                if not self.collect(now):
                    time.sleep(0.02)
            self.drain()
            if self.mix.rng.random() < 0.2:
                self.engine.flush()
                self.tally["flushes"] += 1
            self.measure(time.monotonic())
            self.say(time.monotonic() - start)

    def say(self, seconds: float) -> None:
        t = self.tally
        print(
            f"{seconds:5.0f} s  requests {t['requests']}  golden {t['golden']}"
            f"  wrong {len(self.wrong)}  aborts {t['aborts']}"
            f"  retractions {self.idle['retractions']}  sparse hits {t['sparse_prefix_hits']}"
            f"  fractional {t['fractional']}  leaked {t['leaked_bytes']}"
            f"  rss {self.memory[-1][1] / 2**20:.0f} MiB",
            flush=True,
        )

    def summary(self, seconds: float) -> dict[str, Any]:
        log = self.engine.log_text()
        return {
            "seconds": round(seconds),
            **{name: self.tally[name] for name in sorted(self.tally)},
            "retractions": self.idle["retractions"],
            "retractions_for_want_of_bytes": log.count("KV cache pool is full"),
            "compressed_blocks": self.idle["compressed"],
            "slots_moved": self.idle["moves"],
            "wrong_answers": len(self.wrong),
            "resident_mib": round(self.memory[-1][1] / 2**20),
            "resident_growth": round(self.growth(), 4),
        }


def failures(summary: dict[str, Any]) -> list[str]:
    """What the run must show and does not; floors count from half an hour on."""
    found = [
        f"{name} {summary[name]}, not 0"
        for name in ("wrong_answers", "leaked_bytes")
        if summary[name]
    ]
    if summary["seconds"] >= FLOORS_FROM_SECONDS:
        short = {name: least for name, least in FLOORS.items() if summary[name] < least}
        found += [f"{name} {summary[name]} < {least}" for name, least in short.items()]
        if summary["resident_growth"] >= GROWTH_LIMIT:
            found.append(f"resident memory grew by {summary['resident_growth']:.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder) / "model")
        options = EngineOptions(
            model,
            segment=SEGMENT,
            window=WINDOW,
            chunk=512,
            tokens=CACHE_TOKENS,
            environment=(
                *STRICT_CHECKS,
                ("SGLANG_TEST_RETRACT", "1"),
                ("SGLANG_TEST_RETRACT_INTERVAL", str(RETRACT_INTERVAL)),
            ),
            runtime=(("check_integrity_always", True),),
        )
        mix = Mix(arguments.seed, Golden(model), options)
        print(f"{len(mix.known)} known answers", flush=True)
        engine = Engine(options, Path(folder))
        started = time.monotonic()
        try:
            soak = Soak(engine, mix)
            soak.run(arguments.seconds)
            summary = soak.summary(time.monotonic() - started)
        finally:
            engine.close()
    print(json.dumps(summary))
    for text in (problems := [*soak.wrong[:10], *failures(summary)]):
        print("FAILED", text)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
