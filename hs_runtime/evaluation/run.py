"""One run of the evaluation: suites by name, all arms, and the files that it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.arms import Arm
from hs_runtime.evaluation.cases import SUITES, Case, Wishes
from hs_runtime.evaluation.measure import Target, measure_cases
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.records import Records
from hs_runtime.evaluation.report import Row, markdown, rows_of
from hs_runtime.evaluation.texts import Text

TABLE: Final = "results.md"
ROWS: Final = "results.json"


@dataclass(frozen=True, slots=True)
class Suite:
    """A kind of suite at a context length; `name` is how records call it."""

    kind: str
    context: int

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.context}"


def parse_suites(texts: Sequence[str]) -> list[Suite]:
    """Of `kl,passkey@2048`: kinds, each with a context of its own if wanted. ConfigError."""
    found = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        kind, at, context = word.partition("@")
        if kind not in SUITES:
            raise ConfigError(f"suite: {kind!r} (choose {', '.join(SUITES)}, or KIND@TOKENS)")
        if at and not (context.isdecimal() and int(context) > 0):
            raise ConfigError(f"suite: {word!r} (the context is a number of tokens)")
        found.append(Suite(kind, int(context) if at else SUITES[kind][1]))
    return found


def build_cases(
    suite: Suite, texts: Sequence[Text], language: Language, wishes: Wishes
) -> list[Case]:
    """The suite's cases, each with the tokens that the model expects at the start."""
    build, _ = SUITES[suite.kind]
    cases = build(suite.name, texts, language.tokenize, suite.context, wishes)
    more = len(language.start)
    return [
        replace(
            case,
            tokens=(*language.start, *case.tokens),
            prompt=case.prompt + more,
            scored=tuple(position + more for position in case.scored),
        )
        for case in cases
    ]


def run_suites(
    target: Target,
    arms: Sequence[Arm],
    suites: Sequence[Suite],
    texts: Sequence[Text],
    language: Language,
    wishes: Wishes,
    folder: Path,
    say: Callable[[str], None],
) -> list[Row]:
    """Measures what is missing in `folder`, writes its tables and gives all its rows."""
    records = Records(folder)
    cases = [each for suite in suites for each in build_cases(suite, texts, language, wishes)]
    say(f"{len(cases)} cases under {len(arms)} arms; finished ones are kept in {folder}")
    measure_cases(target, arms, cases, records)
    return write_tables(records, Path(target.model_path).name)


def write_tables(records: Records, model: str) -> list[Row]:
    rows = rows_of(records.all())
    (records.folder / TABLE).write_text(
        markdown(rows, f"Answers of {model} under each policy"), encoding="utf-8"
    )
    (records.folder / ROWS).write_text(
        json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    return rows
