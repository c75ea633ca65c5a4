"""Runs all items under all arms: engine by engine, dense first, then what is compared with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final, Generic, TypeVar

from hs_runtime.config import RuntimeConfig
from hs_runtime.device import Device
from hs_runtime.evaluation.arms import Arm
from hs_runtime.evaluation.cases import Case
from hs_runtime.evaluation.layers import FILE, LayerStatistics
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.questions import Question
from hs_runtime.evaluation.records import DECODE, PREFILL, Record, Records, Sums, inputs_digest
from hs_runtime.evaluation.scores import score
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

    def session(self, arm: Arm, log: Path, *, layers: bool = False) -> Session:
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
        published = "" if arm.stock else config.to_json()
        return Session(published, plan.arguments, log, layers=layers)


@dataclass(frozen=True, slots=True)
class Speed:
    """Prompts that are sent at once, each with an answer of `answer_tokens`, and timed."""

    suite: str
    name: str
    prompts: tuple[tuple[int, ...], ...]
    answer_tokens: int


Item = Case | Question | Speed
T = TypeVar("T", Case, Question, Speed)


@dataclass(frozen=True, slots=True)
class Pending(Generic[T]):
    """A case that some arms of one engine still have to be asked."""

    case: T
    arms: tuple[Arm, ...]


def measure(
    target: Target,
    language: Language,
    arms: Sequence[Arm],
    items: Sequence[Item],
    records: Records,
) -> None:
    """All arms on all items, but for what `records` holds; progress goes to stderr."""
    from tqdm import tqdm

    engines = [list(group) for _, group in groupby(sorted(arms, key=_engine), key=_engine)]
    plans = [(group, list(_pending(target, group, items, records))) for group in engines]
    total = sum(len(each.arms) for _, pending in plans for each in pending)
    with tqdm(total=total, unit="case", file=sys.stderr, disable=None) as bar:
        for group, pending in plans:
            if not pending:
                continue
            bar.set_description(f"loading ({group[0].constants.pruner})")
            with target.session(group[0], records.folder / "engine.log") as session:
                for record in _measure_engine(
                    target, language, session, pending, bar.set_description
                ):
                    records.add(record)
                    bar.update()


def item_inputs(target: Target, arm: Arm, item: Item) -> str:
    """Digest of all that shapes a record."""
    shape: list[Any] = [VERSION, target.fingerprint, target.device.kind, json.loads(arm.to_json())]
    if isinstance(item, Case):
        shape += [item.tokens, item.prompt, item.scored]
    else:
        shape.append(asdict(item))
    return inputs_digest(*shape)


def _engine(arm: Arm) -> str:
    """Arms with equal text share an engine."""
    return f"{arm.stock} {arm.constants.to_json()}"


def _pending(
    target: Target, arms: Sequence[Arm], items: Sequence[Item], records: Records
) -> Iterator[Pending[Any]]:
    for item in items:
        left = tuple(
            arm
            for arm in arms
            if not records.has(item.suite, arm.name, item.name, item_inputs(target, arm, item))
        )
        if left:
            yield Pending(item, left)


def _measure_engine(
    target: Target,
    language: Language,
    session: Session,
    pending: Sequence[Pending[Any]],
    say: Callable[[str], None],
) -> Iterator[Record]:
    """All that is left for one engine: what is compared with dense, what is asked, what is timed
    (last, when everything is warm)."""
    cases = [each for each in pending if isinstance(each.case, Case)]
    for batch in _batches(target, cases):
        for arm, case, reply in _measure_batch(session, batch, say):
            yield _case_record(target, arm, case, reply)
    questions = [each for each in pending if isinstance(each.case, Question)]
    for arm in _arms_of(questions):
        say(f"questions: {arm.name}")
        asked = [each.case for each in questions if arm in each.arms]
        for start in range(0, len(asked), _BATCH_CASES):
            part = asked[start : start + _BATCH_CASES]
            orders = [
                Order(each.prompt, arm.policy, answer_tokens=each.answer_tokens) for each in part
            ]
            for index, reply in session.run(orders):
                yield _question_record(target, language, arm, part[index], reply)
    speeds = [each for each in pending if isinstance(each.case, Speed)]
    for arm in _arms_of(speeds):
        for each in speeds:
            if arm in each.arms:
                say(f"{each.case.suite}: {arm.name}")
                yield _measure_speed(target, session, arm, each.case)


def _arms_of(pending: Sequence[Pending[Any]]) -> list[Arm]:
    return list({arm.name: arm for each in pending for arm in each.arms}.values())


def _batches(target: Target, pending: Sequence[Pending[Case]]) -> Iterator[list[Pending[Case]]]:
    """Cases that run at once: what the cache holds and the references' disk space bound it."""
    batch: list[Pending[Case]] = []
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
    session: Session, batch: Sequence[Pending[Case]], say: Callable[[str], None]
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
    for arm in _arms_of(batch):
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


def _case_record(target: Target, arm: Arm, case: Case, reply: Reply) -> Record:
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
        inputs=item_inputs(target, arm, case),
        parts=found,
        score=float(all(reply.scores.correct)) if case.exact else None,
        kv_bytes=int(reply.report.get("kv_bytes", 0)),
        dense_bytes=int(reply.report.get("dense_equivalent_bytes", 0)),
        seconds=reply.seconds,
    )


def _question_record(
    target: Target, language: Language, arm: Arm, question: Question, reply: Reply
) -> Record:
    answer = language.text(reply.tokens)
    if question.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return Record(
        suite=question.suite,
        arm=arm.name,
        case=question.name,
        inputs=item_inputs(target, arm, question),
        score=score(question.metric, answer, question.references, question.labels),
        category=question.category,
        kv_bytes=int(reply.report.get("kv_bytes", 0)),
        dense_bytes=int(reply.report.get("dense_equivalent_bytes", 0)),
        seconds=reply.seconds,
    )


def _measure_speed(target: Target, session: Session, arm: Arm, speed: Speed) -> Record:
    """Medians over the prompts of the second of two rounds; nothing is read from the cache."""
    orders = [
        Order(prompt, arm.policy, answer_tokens=speed.answer_tokens, timed=True, fresh=True)
        for prompt in speed.prompts
    ]
    for _ in range(2):
        replies = [reply for _, reply in session.run(orders)]
    first = median(reply.first_seconds for reply in replies)
    step = median(
        (reply.seconds - reply.first_seconds) / (speed.answer_tokens - 1) for reply in replies
    )
    return Record(
        suite=speed.suite,
        arm=arm.name,
        case=speed.name,
        inputs=item_inputs(target, arm, speed),
        kv_bytes=sum(int(reply.report.get("kv_bytes", 0)) for reply in replies),
        dense_bytes=sum(int(reply.report.get("dense_equivalent_bytes", 0)) for reply in replies),
        seconds=sum(reply.seconds for reply in replies),
        values={"TTFT s": first, "TPOT ms": 1000 * step},
    )


def measure_layers(
    target: Target, arm: Arm, prompts: Sequence[tuple[int, ...]], log: Path
) -> LayerStatistics:
    """K and V of these prompts, prefilled densely one after the other."""
    with target.session(arm, log, layers=True) as session:
        for prompt in prompts:
            for _ in session.run([Order(prompt, DENSE)]):
                pass
        return LayerStatistics.load(session.folder / FILE)
