"""Runs cases under arms: engine by engine, dense first, then what is compared with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hs_runtime.config import RuntimeConfig
from hs_runtime.device import Device
from hs_runtime.evaluation.arms import Arm
from hs_runtime.evaluation.cases import Case
from hs_runtime.evaluation.records import DECODE, PREFILL, Record, Records, Sums, inputs_digest
from hs_runtime.evaluation.session import Order, Reply, Session
from hs_runtime.evaluation.tap import Job
from hs_runtime.launch import plan_launch
from hs_runtime.policies.policy import DENSE

VERSION: Final = 1  # of what is measured; a change makes old lines incomparable
_BATCH_TOKENS: Final = {"cpu": 16 << 10, "cuda": 96 << 10}
_BATCH_CASES: Final = 16
_REFERENCE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: a model on a device. `fingerprint` is a digest of its weights."""

    device: Device
    model_path: str
    model_config: Mapping[str, Any] | None
    fingerprint: str
    vocabulary: int
    passed: tuple[str, ...] = ()
    kv_cache_bytes: int = 0
    calibration_path: str = ""

    def session(self, arm: Arm, log: Path) -> Session:
        """An engine with the constants of this arm."""
        passed = [*self.passed, "--skip-tokenizer-init"]
        if arm.stock:
            passed += ["--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "flashinfer"]
        elif arm.constants.anchor == "chunk":
            passed += ["--chunked-prefill-size", str(arm.constants.chunk)]
        plan = plan_launch(
            self.device,
            self.model_path,
            self.model_config,
            passed,
            kv_cache_bytes=self.kv_cache_bytes,
        )
        config = RuntimeConfig(
            constants=arm.constants,
            model_path=self.model_path,
            calibration_path=self.calibration_path if arm.constants.calibration else "",
            kv_cache_bytes=plan.kv_cache_bytes,
        )
        return Session("" if arm.stock else config.to_json(), plan.arguments, log)


@dataclass(frozen=True, slots=True)
class Pending:
    """A case that some arms of one engine still have to be asked."""

    case: Case
    arms: tuple[Arm, ...]


def measure_cases(
    target: Target, arms: Sequence[Arm], cases: Sequence[Case], records: Records
) -> None:
    """All arms on all cases, but for what `records` holds; progress goes to stderr."""
    from tqdm import tqdm

    engines = [list(group) for _, group in groupby(sorted(arms, key=_engine), key=_engine)]
    plans = [(group, list(_pending(target, group, cases, records))) for group in engines]
    total = sum(len(each.arms) for _, pending in plans for each in pending)
    with tqdm(total=total, unit="case", file=sys.stderr, disable=None) as bar:
        for group, pending in plans:
            if not pending:
                continue
            bar.set_description(f"loading ({group[0].constants.pruner})")
            with target.session(group[0], records.folder / "engine.log") as session:
                for batch in _batches(target, pending):
                    for arm, case, reply in _measure_batch(session, batch, bar.set_description):
                        records.add(_record(target, arm, case, reply))
                        bar.update()


def case_inputs(target: Target, arm: Arm, case: Case) -> str:
    return inputs_digest(
        VERSION,
        target.fingerprint,
        target.device.kind,
        json.loads(arm.to_json()),
        case.tokens,
        case.prompt,
        case.scored,
    )


def _engine(arm: Arm) -> str:
    """Arms with equal text share an engine."""
    return f"{arm.stock} {arm.constants.to_json()}"


def _pending(
    target: Target, arms: Sequence[Arm], cases: Sequence[Case], records: Records
) -> Iterator[Pending]:
    for case in cases:
        left = tuple(
            arm
            for arm in arms
            if not records.has(case.suite, arm.name, case.name, case_inputs(target, arm, case))
        )
        if left:
            yield Pending(case, left)


def _batches(target: Target, pending: Sequence[Pending]) -> Iterator[list[Pending]]:
    """Cases that run at once: what the cache holds and the references' disk space bound it."""
    batch: list[Pending] = []
    tokens = size = 0
    for each in pending:
        new = len(each.case.scored) * target.vocabulary * 4
        full = tokens + len(each.case.tokens) > _BATCH_TOKENS[target.device.kind]
        if batch and (full or size + new > _REFERENCE_BYTES or len(batch) == _BATCH_CASES):
            yield batch
            batch, tokens, size = [], 0, 0
        batch.append(each)
        tokens, size = tokens + len(each.case.tokens), size + new
    if batch:
        yield batch


def _measure_batch(
    session: Session, batch: Sequence[Pending], say: Callable[[str], None]
) -> Iterator[tuple[Arm, Case, Reply]]:
    """The dense reference of every case, then arm after arm, each with all cases at once."""
    references = [session.folder / f"reference-{index}" for index in range(len(batch))]
    orders = []
    for each, reference in zip(batch, references, strict=True):
        scored = _positions(each.case, any(_scores_prefill(arm) for arm in each.arms))
        job = Job(each.case.tokens, each.case.prompt, scored, str(reference), scored, writes=True)
        orders.append(_order(each.case, DENSE, job))
    say(f"{batch[0].case.suite}: reference")
    for _ in session.run(orders):
        pass
    for arm in {arm.name: arm for each in batch for arm in each.arms}.values():
        say(f"{batch[0].case.suite}: {arm.name}")
        asked, orders = [], []
        for each, reference in zip(batch, references, strict=True):
            if arm in each.arms:
                written = _positions(each.case, any(_scores_prefill(arm) for arm in each.arms))
                scored = _positions(each.case, _scores_prefill(arm))
                job = Job(each.case.tokens, each.case.prompt, scored, str(reference), written)
                asked.append(each.case)
                orders.append(_order(each.case, arm.policy, job))
        for index, reply in session.run(orders):
            yield arm, asked[index], reply
    for reference in references:
        reference.unlink()


def _order(case: Case, policy: Any, job: Job) -> Order:
    prompt = case.tokens[: case.prompt]
    return Order(prompt, policy, job, fresh=bool(job.scored and job.scored[0] <= case.prompt))


def _scores_prefill(arm: Arm) -> bool:
    """Dense prefill is the reference's own, so it is neither computed nor compared again."""
    return arm.stock or not arm.policy.prefill.is_dense


def _positions(case: Case, prefill: bool) -> tuple[int, ...]:
    return case.scored if prefill else case.decode_scored


def _record(target: Target, arm: Arm, case: Case, reply: Reply) -> Record:
    assert reply.scores is not None
    parts = {
        PREFILL: Sums.of(reply.scores, case.prefill_scored),
        DECODE: Sums.of(reply.scores, case.decode_scored),
    }
    found = {name: sums for name, sums in parts.items() if sums is not None}
    return Record(
        suite=case.suite,
        arm=arm.name,
        case=case.name,
        inputs=case_inputs(target, arm, case),
        parts=found,
        score=float(all(reply.scores.correct)) if case.exact else None,
        kv_bytes=int(reply.report.get("kv_bytes", 0)),
        dense_bytes=int(reply.report.get("dense_equivalent_bytes", 0)),
        seconds=reply.seconds,
    )
