"""What the rules say a request must be answered, and prompts for which they say it clearly.

Two float32 computations of one prompt differ in the last bits, so where two of four elements are
equal within rounding they may prune differently, and both are right. Tests of answers therefore
take prompts on which no decision is that close: `Golden.prompt` finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hs_runtime.policies import SparsityPolicy
from tests.support.engines import Answer, EngineOptions, token_ids
from tests.support.oracle import Greedy, Llama, Magnitude, Rules, Shares, greedy

TOLERANCE = 1e-4
TRIES = 60


class Golden:
    """Answers of the oracle on one checkpoint, each computed once."""

    def __init__(self, folder: Path, pruning: Magnitude | None = None) -> None:
        self.model = Llama(folder)
        self.pruning = pruning or Magnitude()
        self._answers: dict[tuple[object, ...], Greedy] = {}

    def answer(
        self,
        options: EngineOptions,
        policy: SparsityPolicy,
        prompt: Sequence[int],
        max_new: int = 40,
    ) -> Greedy:
        rules = Rules(options.segment, options.window, dense_layers=options.dense_layers)
        shares = Shares(*((each.key, each.value) for each in (policy.prefill, policy.decode)))
        key = (rules, shares, tuple(prompt), max_new)
        if key not in self._answers:
            self._answers[key] = greedy(self.model, rules, shares, prompt, max_new, self.pruning)
        return self._answers[key]

    def prompt(
        self,
        options: EngineOptions,
        policies: Iterable[SparsityPolicy],
        length: int,
        *,
        max_new: int = 40,
        prefix: Sequence[int] = (),
        tries: int = TRIES,
    ) -> list[int]:
        """The first of some random continuations of `prefix` that leaves no policy a close call."""
        margin = 5e-6 if length <= 1024 and not prefix else 2e-6
        # The sparser, the more is decided, so the sooner a prompt is found to be unclear.
        chosen = sorted(policies, key=lambda p: -sum((p.decode.key, p.decode.value)))
        for seed in range(tries):
            prompt = [*prefix, *token_ids(length - len(prefix), seed + 1000 * length)]
            if all(self.answer(options, p, prompt, max_new).margin > margin for p in chosen):
                return prompt
        raise AssertionError(f"none of {tries} prompts of {length} tokens is clear")


def assert_answer(case: str, got: Answer, want: Greedy) -> None:
    """Equal tokens, equal log-probabilities, and the request ended as it was asked to."""
    assert got.finish == "length", f"{case}: ended by {got.finish!r}"
    assert got.tokens == want.tokens, f"{case}: tokens"
    worst = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    assert worst < TOLERANCE, f"{case}: log-probabilities off by {worst:.2g}"
