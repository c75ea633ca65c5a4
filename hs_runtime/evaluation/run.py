"""One run of the evaluation: suites by name, all arms, and the files that it leaves."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.arms import Arm
from hs_runtime.evaluation.cases import SUITES, Case, Wishes
from hs_runtime.evaluation.layers import markdown as layer_table
from hs_runtime.evaluation.measure import Item, Speed, Target, measure, measure_layers
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.plots import INSTALL, can_plot, plot_layers, plot_pareto
from hs_runtime.evaluation.presets import FILE as PRESET_FILE
from hs_runtime.evaluation.presets import preset_numbers
from hs_runtime.evaluation.questions import longbench_questions, ruler_questions
from hs_runtime.evaluation.records import Records
from hs_runtime.evaluation.report import Row, markdown, recommend, rows_of
from hs_runtime.evaluation.texts import Text, bundled_texts, cut_documents
from hs_runtime.policies.policy import ServerConstants

TABLE: Final = "results.md"
ROWS: Final = "results.json"
# Kind of suite -> the tokens of its prompts unless the user says another number.
CONTEXTS: Final = {
    **{kind: context for kind, (_, context) in SUITES.items()},
    **{"ruler": 4096, "longbench": 7500, "speed": 4096},
}


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
        if kind not in CONTEXTS:
            raise ConfigError(f"suite: {kind!r} (choose {', '.join(CONTEXTS)}, or KIND@TOKENS)")
        if at and not (context.isdecimal() and int(context) > 0):
            raise ConfigError(f"suite: {word!r} (the context is a number of tokens)")
        found.append(Suite(kind, int(context) if at else CONTEXTS[kind]))
    return found


def build_items(
    suite: Suite,
    texts: Sequence[Text],
    language: Language,
    wishes: Wishes,
    longbench: Path | None = None,
) -> Sequence[Item]:
    """What the suite asks; every prompt begins with what the model expects at the start."""
    if suite.kind == "ruler":
        return ruler_questions(suite.name, texts, language, suite.context, wishes.prompts)
    if suite.kind == "longbench":
        return longbench_questions(suite.name, longbench, language, suite.context, wishes.prompts)
    if suite.kind == "speed":
        documents = cut_documents(
            texts, language.tokenize, count=wishes.streams, length=suite.context
        )
        prompts = tuple((*language.start, *each.tokens) for each in documents)
        return [Speed(suite.name, f"{len(prompts)} at once", prompts, wishes.steps)]
    build, _ = SUITES[suite.kind]
    cases = build(suite.name, texts, language.tokenize, suite.context, wishes)
    return [_begun(case, language.start) for case in cases]


def _begun(case: Case, start: tuple[int, ...]) -> Case:
    return replace(
        case,
        tokens=(*start, *case.tokens),
        prompt=case.prompt + len(start),
        scored=tuple(position + len(start) for position in case.scored),
    )


def run_suites(
    target: Target,
    arms: Sequence[Arm],
    suites: Sequence[Suite],
    texts: Sequence[Text],
    language: Language,
    wishes: Wishes,
    folder: Path,
    say: Callable[[str], None],
    longbench: Path | None = None,
    constants: ServerConstants | None = None,
    calibration: str = "",
) -> list[Row]:
    """Measures what is missing in `folder`, writes its tables and plots and gives all its rows.

    With the command line's `constants` and `calibration` (a digest) it also writes what presets
    were measured to cost.
    """
    records = Records(folder)
    items = [
        item for suite in suites for item in build_items(suite, texts, language, wishes, longbench)
    ]
    try:
        with FileLock(folder / ".lock", timeout=0):
            measure(target, language, arms, items, records, say)
    except Timeout:
        raise ConfigError(f"output: another evaluation is writing to {folder}") from None
    rows = write_tables(records, Path(target.model_path).name)
    if constants is not None:
        about = {
            "model": Path(target.model_path).name,
            "text": _described(texts),
            "device": "CPU, float32" if target.device.kind == "cpu" else target.device.name,
            "date": datetime.date.today().isoformat(),
        }
        sets = preset_numbers(rows, constants, calibration, about)
        (folder / PRESET_FILE).write_text(json.dumps(sets, indent=1) + "\n", encoding="utf-8")
    if can_plot():
        plot_pareto(rows, folder)
    else:
        say(f"no plots without matplotlib ({INSTALL})")
    return rows


def _described(texts: Sequence[Text]) -> str:
    names = {text.name for text in texts}
    bundled = {text.name for text in bundled_texts()}
    return "bundled novels" if names == bundled else f"{len(names)} texts of the user's"


def write_tables(records: Records, model: str) -> list[Row]:
    """The tables of all records, as Markdown and as JSON in which what is unknown is null."""
    rows = rows_of(records.all())
    (records.folder / TABLE).write_text(
        markdown(rows, f"Answers of {model} under each policy"), encoding="utf-8"
    )
    values = [_without_nan(asdict(row)) for row in rows]
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    (records.folder / ROWS).write_text(text + "\n", encoding="utf-8")
    return rows


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def run_layers(
    target: Target,
    arm: Arm,
    texts: Sequence[Text],
    language: Language,
    wishes: Wishes,
    folder: Path,
    say: Callable[[str], None],
) -> str:
    """Statistics of K and V by layer over the documents; gives the table that it writes."""
    length = CONTEXTS["copy"]
    documents = cut_documents(texts, language.tokenize, count=wishes.documents, length=length)
    prompts = [(*language.start, *each.tokens) for each in documents]
    folder.mkdir(parents=True, exist_ok=True)
    found = measure_layers(target, arm, prompts, folder / "engine.log")
    table = layer_table(found, arm.constants.pruner)
    (folder / "layers.md").write_text(table, encoding="utf-8")
    (folder / "layers.json").write_text(json.dumps(found.as_json(), indent=1), encoding="utf-8")
    if can_plot():
        plot_layers(found, arm.constants.pruner, folder)
    else:
        say(f"no plots without matplotlib ({INSTALL})")
    return table


def recommendation(
    rows: Sequence[Row], arms: Sequence[Arm], budget: float, own_pruner: str = "magnitude"
) -> str:
    """The cheapest arm within the budget as a sentence, and how to serve it in another.
    `own_pruner` is what `serve` takes unless told. ConfigError if no arm is within the budget."""
    row = recommend(rows, budget)
    if row is None:
        known = {row.arm: row.kl for row in rows if not math.isnan(row.kl)}
        listed = ", ".join(f"{arm} {kl:.4f}" for arm, kl in sorted(known.items(), key=_second))
        raise ConfigError(f"kl_budget: no arm is within {budget} (measured: {listed or 'none'})")
    return (
        f"recommended: {row.arm} (KL {row.kl:.4f} of at most {budget}, KV cache "
        f"{row.kv_share:.3f} of a dense one, worst suite {row.suite})\n"
        + _how_to_serve(row.arm, {arm.name: arm for arm in arms}.get(row.arm), own_pruner)
    )


def _how_to_serve(name: str, arm: Arm | None, own_pruner: str) -> str:
    from hs_runtime.policies.pruner import build_pruner  # torch, which `--help` need not wait for

    if arm is None:
        return f"An earlier run measured {name} in this folder: its options are those of that run."
    if arm.stock:
        return "SGLang gives it without this runtime, by --kv-cache-dtype fp8_e4m3."
    if not build_pruner(arm.constants.pruner).is_stored:
        return f"No server gives it: pruner {arm.constants.pruner} can only be simulated."
    options = shlex.join(arm.serve_options(own_pruner))
    return f"`serve` gives it, with --model and --calibration as here, by {options}"


def _second(pair: tuple[str, float]) -> float:
    return pair[1]
