"""Runs all items under all arms: engine by engine, dense first, then what is compared with it."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Generic, TypeVar

from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.device import Device
from hs_runtime.evaluation.arms import Arm
from hs_runtime.evaluation.cases import Case
from hs_runtime.evaluation.layers import FILE, LayerStatistics
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.questions import Question
from hs_runtime.evaluation.records import DECODE, PREFILL, Record, Records, Sums, inputs_digest
from hs_runtime.evaluation.scores import score
from hs_runtime.evaluation.session import Order, Reply, Session, terminated_in_order
from hs_runtime.evaluation.tap import Job
from hs_runtime.launch import plan_launch
from hs_runtime.policies.policy import DENSE

VERSION: Final = 1  # of what is measured; a change makes old lines incomparable
REFERENCES: Final = "references"
_BATCH_TOKENS: Final = {"cpu": 32 << 10, "cuda": 96 << 10}
_BATCH_CASES: Final = 16
_ITEM_BYTES: Final = 4
_BATCH_BYTES: Final = 2 << 30  # of references
_KEPT_BYTES: Final = 16 << 30  # beyond this a reference is made anew for every engine


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
    say: Callable[[str], None],
) -> None:
    """All arms on all items, but for what `records` holds; progress goes to stderr. SIGTERM ends it
    as Ctrl-C does: KeyboardInterrupt, and no engine runs any more."""
    from tqdm import tqdm

    if any(arm.stock for arm in arms) and target.device.kind != "cuda":
        raise ConfigError("arms: 'fp8' needs a CUDA device")
    groups: dict[str, list[Arm]] = {}
    for arm in sorted(arms, key=lambda arm: arm.stock):
        groups.setdefault(_engine(arm), []).append(arm)
    plans = [list(_pending(target, group, items, records)) for group in groups.values()]
    references = References(target, records.folder / REFERENCES, plans)
    left = sum(len(each.arms) for pending in plans for each in pending)
    total = len(items) * len(arms)
    say(
        f"{_counted(len(items), 'case')} under {_counted(len(arms), 'arm')}: {total - left} of "
        f"{total} done, and what is done is kept in {records.folder}"
    )
    progress = tqdm(total=left, unit="case", file=sys.stderr, disable=None)
    with terminated_in_order(), progress as bar:
        for pending in plans:
            if not pending:
                continue
            arm = pending[0].arms[0]
            log = records.folder / "engine.log"
            bar.set_description(f"loading ({arm.constants.pruner})")
            if arm.stock:  # it has no dense arm of its own
                cases = [each.case for each in pending if isinstance(each.case, Case)]
                with target.session(replace(arm, stock=False), log) as session:
                    references.write_with(partial(_run_all, session), cases)
            with target.session(arm, log) as session:
                for record in _measure_engine(
                    target, language, session, pending, references, bar.set_description
                ):
                    records.add(record)
                    bar.update()
    references.remove_all()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class References:
    """The dense arm's log-probs of cases, as files that outlive an engine: all that is compared
    with dense is compared with one run of it, however many engines there are. What a stopped run
    leaves is used by the next."""

    def __init__(
        self, target: Target, folder: Path, plans: Sequence[Sequence[Pending[Any]]]
    ) -> None:
        """`plans` are what every engine will be asked."""
        self._target, self._folder = target, folder
        self._scored: dict[tuple[str, str], tuple[int, ...]] = {}
        self._users: Counter[tuple[str, str]] = Counter()
        for each in (each for plan in plans for each in plan if isinstance(each.case, Case)):
            key = each.case.suite, each.case.name
            prefill = any(map(_scores_prefill, each.arms))
            self._users[key] += 1
            self._scored[key] = max(
                self._scored.get(key, ()), _positions(each.case, prefill), key=len
            )
        kept = sum(map(len, self._scored.values())) * target.vocabulary * _ITEM_BYTES
        stock = any(arm.stock for plan in plans for each in plan for arm in each.arms)
        self._keeps = stock or kept <= _KEPT_BYTES

    def positions(self, case: Case) -> tuple[int, ...]:
        """Those of the reference: of all parts that some arm compares."""
        return self._scored[case.suite, case.name]

    def path(self, case: Case) -> Path:
        target = self._target
        shape = (VERSION, target.fingerprint, target.device.kind, *target.passed)
        return self._folder / f"{inputs_digest(*shape, case.tokens, self.positions(case))}.f32"

    def write_with(self, run: Callable[[Sequence[Order]], Any], cases: Sequence[Case]) -> None:
        """Runs the dense arm of the cases that have no file yet; `run` returns when all ended."""
        self._folder.mkdir(exist_ok=True)
        orders, files = [], []
        for case in cases:
            path, scored = self.path(case), self.positions(case)
            if not path.exists():
                begun = path.with_suffix(".partial")
                begun.unlink(missing_ok=True)
                job = Job(case.tokens, case.prompt, scored, str(begun), scored, writes=True)
                orders.append(_order(case, DENSE, job))
                files.append((begun, path))
        run(orders)
        for begun, path in files:
            begun.rename(path)

    def release(self, case: Case) -> None:
        """One engine is done with it."""
        key = case.suite, case.name
        self._users[key] -= 1
        if not self._keeps or not self._users[key]:
            self.path(case).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def item_inputs(target: Target, arm: Arm, item: Item) -> str:
    """Digest of all that shapes a record."""
    shape: list[Any] = [VERSION, target.fingerprint, target.device.kind, json.loads(arm.to_json())]
    if isinstance(item, Case):
        shape += [item.tokens, item.prompt, item.scored]
    else:
        shape.append(asdict(item))
    return inputs_digest(*shape, *target.passed)


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
    references: References,
    say: Callable[[str], None],
) -> Iterator[Record]:
    """All that is left for one engine: what is compared with dense, what is asked, what is timed
    (last, when everything is warm)."""
    cases = [each for each in pending if isinstance(each.case, Case)]
    for batch in _batches(target, cases):
        for arm, case, reply in _measure_batch(session, batch, references, say):
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
        new = len(each.case.scored) * target.vocabulary * _ITEM_BYTES
        full = tokens + len(each.case.tokens) > _BATCH_TOKENS[target.device.kind]
        if batch and (full or size + new > _BATCH_BYTES or len(batch) == _BATCH_CASES):
            yield batch
            batch, tokens, size = [], 0, 0
        batch.append(each)
        tokens, size = tokens + len(each.case.tokens), size + new
    if batch:
        yield batch


def _measure_batch(
    session: Session,
    batch: Sequence[Pending[Case]],
    references: References,
    say: Callable[[str], None],
) -> Iterator[tuple[Arm, Case, Reply]]:
    """The dense reference of every case, then arm after arm, each with all cases at once."""
    say(f"{batch[0].case.suite}: reference")
    references.write_with(partial(_run_all, session), [each.case for each in batch])
    for arm in _arms_of(batch):
        say(f"{batch[0].case.suite}: {arm.name}")
        asked = [each.case for each in batch if arm in each.arms]
        orders = []
        for case in asked:
            scored = _positions(case, _scores_prefill(arm))
            written = references.positions(case)
            job = Job(case.tokens, case.prompt, scored, str(references.path(case)), written)
            orders.append(_order(case, arm.policy, job))
        for index, reply in session.run(orders):
            yield arm, asked[index], reply
    for each in batch:
        references.release(each.case)


def _run_all(session: Session, orders: Sequence[Order]) -> None:
    for _ in session.run(orders):
        pass


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
    kv_bytes, dense_bytes = _bytes(target, arm, len(case.tokens), reply)
    return Record(
        suite=case.suite,
        arm=arm.name,
        case=case.name,
        inputs=item_inputs(target, arm, case),
        parts=found,
        score=float(all(reply.scores.correct)) if case.exact else None,
        kv_bytes=kv_bytes,
        dense_bytes=dense_bytes,
        seconds=reply.seconds,
    )


def _question_record(
    target: Target, language: Language, arm: Arm, question: Question, reply: Reply
) -> Record:
    answer = language.text(reply.tokens)
    if question.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    tokens = len(question.prompt) + len(reply.tokens)
    kv_bytes, dense_bytes = _bytes(target, arm, tokens, reply)
    return Record(
        suite=question.suite,
        arm=arm.name,
        case=question.name,
        inputs=item_inputs(target, arm, question),
        score=score(question.metric, answer, question.references, question.labels),
        category=question.category,
        kv_bytes=kv_bytes,
        dense_bytes=dense_bytes,
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
    tokens = len(speed.prompts[0]) + speed.answer_tokens
    bytes_ = [_bytes(target, arm, tokens, reply) for reply in replies]
    first = median(reply.first_seconds for reply in replies)
    step = median(
        (reply.seconds - reply.first_seconds) / (speed.answer_tokens - 1) for reply in replies
    )
    return Record(
        suite=speed.suite,
        arm=arm.name,
        case=speed.name,
        inputs=item_inputs(target, arm, speed),
        kv_bytes=sum(used for used, _ in bytes_),
        dense_bytes=sum(dense for _, dense in bytes_),
        seconds=sum(reply.seconds for reply in replies),
        values={"TTFT s": first, "TPOT ms": 1000 * step},
    )


def _bytes(target: Target, arm: Arm, tokens: int, reply: Reply) -> tuple[int, int]:
    """KV bytes of a request and of a dense one. Of stock SGLang, which does not tell, by its
    element sizes: one byte instead of two."""
    if not arm.stock:
        report = reply.report
        return int(report.get("kv_bytes", 0)), int(report.get("dense_equivalent_bytes", 0))
    config = target.model_config or {}
    try:
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        elements = 2 * tokens * heads * int(head_dim) * int(config["num_hidden_layers"])
    except (KeyError, TypeError):
        return 0, 0
    return elements, 2 * elements


def measure_layers(
    target: Target, arm: Arm, prompts: Sequence[tuple[int, ...]], log: Path
) -> LayerStatistics:
    """K and V of these prompts, prefilled densely one after the other. Ends as `measure` does."""
    with terminated_in_order(), target.session(arm, log, layers=True) as session:
        for prompt in prompts:
            _run_all(session, [Order(prompt, DENSE)])
        return LayerStatistics.load(session.folder / FILE)
