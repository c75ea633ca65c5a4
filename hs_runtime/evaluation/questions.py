"""Free answers: LongBench from a local folder, and synthetic tasks in the manner of RULER.

LongBench is read in its public format, `<task>.jsonl` with `input`, `context`, `answers` and
`all_classes`. Its English and code tasks are here in the six categories of the paper; the prompts
say in our words what the benchmark's description asks for, so scores of published tables are near
but not equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.texts import Text


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` in tokens; the answer is scored by `metric` against `references`."""

    suite: str
    name: str
    category: str
    prompt: tuple[int, ...]
    answer_tokens: int
    references: tuple[str, ...]
    metric: str
    labels: tuple[str, ...] = ()
    first_line: bool = False  # what follows it is not part of the answer


@dataclass(frozen=True, slots=True)
class Task:
    """One LongBench task. `ask` holds {context} and {input}; `raw` tasks continue a text and are
    not put into the model's chat form."""

    category: str
    metric: str
    answer_tokens: int
    ask: str
    raw: bool = False
    first_line: bool = False


_SHORT: Final = "Answer with the shortest phrase that is right, and write nothing else."
_DOCUMENTS: Final = (
    "Several passages follow. Answer the question from what they say. "
    + _SHORT
    + "\n\n{context}\n\nQuestion, to be answered from the passages above: {input}\nAnswer:"
)
LONGBENCH: Final[Mapping[str, Task]] = {
    "narrativeqa": Task(
        "Single-Doc", "f1", 128,
        "Read this story (a book or a film script), then answer a question about it. " + _SHORT
        + "\n\n{context}\n\nQuestion about the story: {input}\nAnswer:",
    ),
    "qasper": Task(
        "Single-Doc", "f1", 128,
        "Read this scientific article, then answer a question about it in a phrase or a sentence. "
        "If the article does not tell, write \"unanswerable\"; if it is a question of yes or no, "
        "write \"yes\", \"no\" or \"unanswerable\".\n\n{context}\n\nQuestion about the article: "
        "{input}\nAnswer:",
    ),
    "multifieldqa_en": Task(
        "Single-Doc", "f1", 64,
        "Read this text.\n\n{context}\n\nAnswer a question about it. " + _SHORT
        + "\n\nQuestion: {input}\nAnswer:",
    ),
    "hotpotqa": Task("Multi-Doc", "f1", 32, _DOCUMENTS),
    "2wikimqa": Task("Multi-Doc", "f1", 32, _DOCUMENTS),
    "musique": Task("Multi-Doc", "f1", 32, _DOCUMENTS),
    "gov_report": Task(
        "Summ.", "rouge_l", 512,
        "Here is a report by a government agency. Summarise it on one page.\n\n{context}\n\n"
        "Summary of the report:",
    ),
    "qmsum": Task(
        "Summ.", "rouge_l", 512,
        "Here is the transcript of a meeting, then a request about it. Answer in a few sentences."
        "\n\n{context}\n\nRequest: {input}\nAnswer:",
    ),
    "multi_news": Task(
        "Summ.", "rouge_l", 512,
        "Here are several news articles on one event. Summarise them on one page.\n\n{context}\n\n"
        "Summary of the news:",
    ),
    "trec": Task(
        "Few-Shot", "classification", 64,
        "Say of which type a question is. Some examples come first.\n\n{context}\n{input}",
        raw=True, first_line=True,
    ),
    "triviaqa": Task(
        "Few-Shot", "f1", 32,
        "Answer the question from the passage, with the answer alone. Some examples come first."
        "\n\n{context}\n\n{input}",
        raw=True, first_line=True,
    ),
    "samsum": Task(
        "Few-Shot", "rouge_l", 128,
        "Summarise the dialogue in a few sentences. Some examples come first.\n\n{context}\n\n"
        "{input}",
        raw=True, first_line=True,
    ),
    "passage_count": Task(
        "Synth.", "numbers", 32,
        "Some of these paragraphs may be copies of others. Count how many different ones there "
        "are.\n\n{context}\n\nWrite only the number of different paragraphs.\nNumber:",
    ),
    "passage_retrieval_en": Task(
        "Synth.", "numbers", 32,
        "Here are numbered paragraphs, then a summary of one of them. Say which paragraph it "
        "summarises.\n\n{context}\n\nSummary: {input}\n\nWrite the name of the paragraph, such as "
        "\"Paragraph 1\".\nAnswer: ",
    ),
    "lcc": Task(
        "Code", "code_similarity", 64,
        "Write the next line of this code.\n{context}Next line of code:\n", raw=True,
    ),
    "repobench-p": Task(
        "Code", "code_similarity", 64,
        "Write the next line of this code.\n{context}{input}Next line of code:\n", raw=True,
    ),
}  # fmt: skip
CATEGORIES: Final = ("Single-Doc", "Multi-Doc", "Summ.", "Few-Shot", "Synth.", "Code")


def longbench_questions(
    suite: str, folder: Path | None, language: Language, context: int, per_task: int
) -> list[Question]:
    """The first `per_task` lines (0: all) of every task whose file is in `folder`; prompts of more
    than `context` tokens lose their middle. Raises ConfigError when there is nothing to read."""
    wanted = ", ".join(f"{name}.jsonl" for name in LONGBENCH)
    if folder is None or not folder.is_dir():
        where = "no folder given" if folder is None else f"{folder} is no folder"
        raise ConfigError(
            f"longbench: {where}. Unpack the benchmark's data (THUDM/LongBench on the hub, "
            f"data.zip) and name it with --longbench FOLDER; it holds {wanted}"
        )
    found = []
    for name, task in LONGBENCH.items():
        path = folder / f"{name}.jsonl"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines[: per_task or None]):
                found.append(
                    _longbench_question(suite, name, task, number, line, language, context)
                )
    if not found:
        raise ConfigError(f"longbench: {folder} holds none of {wanted}")
    return found


def _longbench_question(
    suite: str, name: str, task: Task, number: int, line: str, language: Language, context: int
) -> Question:
    try:
        row: dict[str, Any] = json.loads(line)
        text = task.ask.replace("{input}", row["input"]).replace("{context}", row["context"])
        references, labels = tuple(row["answers"]), tuple(row.get("all_classes") or ())
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"longbench: line {number + 1} of {name}.jsonl: {error!r}") from error
    text = without_middle(text, language, context - task.answer_tokens)
    return Question(
        suite=suite,
        name=f"{name} {number}",
        category=task.category,
        prompt=(*language.start, *language.tokenize(text if task.raw else language.as_chat(text))),
        answer_tokens=task.answer_tokens,
        references=references,
        metric=task.metric,
        labels=labels,
        first_line=task.first_line,
    )


def without_middle(text: str, language: Language, limit: int) -> str:
    """The text, or its first and last `limit // 2` tokens if it is longer than `limit`."""
    tokens = language.tokenize(text)
    if len(tokens) <= limit:
        return text
    half = limit // 2
    return language.text(tuple(tokens[:half])) + language.text(tuple(tokens[-half:]))


_NOUNS: Final = (
    *("anchor", "basket", "candle", "desert", "engine", "falcon", "garden", "hammer", "island"),
    *("jacket", "kettle", "ladder", "magnet", "needle", "orange", "pillow", "quartz", "ribbon"),
    *("saddle", "temple", "urchin", "violin", "walnut", "yellow", "zipper", "bridge", "copper"),
)
_PEOPLE: Final = (
    "Ada",
    "Bruno",
    "Clara",
    "David",
    "Edith",
    "Felix",
    "Greta",
    "Hugo",
    "Irma",
    "Jan",
)
_TRADES: Final = ("baker", "sailor", "tailor", "doctor", "farmer", "printer", "weaver", "smith")


@dataclass(frozen=True, slots=True)
class _Puzzle:
    """Lines to hide in a text, the question, and what the answer must have in it."""

    lines: tuple[str, ...]
    question: str
    wanted: tuple[str, ...]
    fills: bool = False  # the lines are repeated until the context is full, without a text


def _single_needle(rng: random.Random) -> _Puzzle:
    word, number = rng.choice(_NOUNS), str(rng.randrange(10_000, 100_000))
    return _Puzzle(
        (f"The secret number of the {word} is {number}.",),
        f"What is the secret number of the {word}? The secret number of the {word} is",
        (number,),
    )


def _many_keys(rng: random.Random) -> _Puzzle:
    words = rng.sample(_NOUNS, 8)
    values = [str(each) for each in rng.sample(range(10_000, 100_000), 8)]
    pairs = zip(words, values, strict=True)
    return _Puzzle(
        tuple(f"The secret number of the {word} is {value}." for word, value in pairs),
        f"What is the secret number of the {words[3]}? The secret number of the {words[3]} is",
        (values[3],),
    )


def _variable_tracking(rng: random.Random) -> _Puzzle:
    names = rng.sample([a + b for a in "ABCDEFGH" for b in "XYZ"], 8)
    values = [str(each) for each in rng.sample(range(10_000, 100_000), 2)]
    lines = []
    for chain, value in ((names[:4], values[0]), (names[4:], values[1])):
        lines.append(f"VAR {chain[0]} = {value}.")
        lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(chain)]
    return _Puzzle(
        tuple(lines),
        f"Which four variables hold the value {values[0]}? They are",
        tuple(names[:4]),
    )


def _common_words(rng: random.Random) -> _Puzzle:
    words = rng.sample(_NOUNS, 15)
    common, rare = words[:3], words[3:]
    lines = [word for word in common for _ in range(8)] + rare
    rng.shuffle(lines)
    return _Puzzle(
        tuple(lines),
        "Which three words are the most frequent in the list above? They are",
        tuple(common),
        fills=True,
    )


def _who(rng: random.Random) -> _Puzzle:
    people, trades = rng.sample(_PEOPLE, 6), rng.sample(_TRADES, 6)
    cities = [f"{noun.capitalize()}ville" for noun in rng.sample(_NOUNS, 6)]
    facts = zip(people, trades, cities, strict=True)
    return _Puzzle(
        tuple(f"{name} is a {trade} and lives in {city}." for name, trade, city in facts),
        f"Where does the {trades[2]} live? The {trades[2]} lives in",
        (cities[2],),
    )


PUZZLES: Final[Mapping[str, Callable[[random.Random], _Puzzle]]] = {
    "niah_single": _single_needle,
    "niah_multikey": _many_keys,
    "variable_tracking": _variable_tracking,
    "common_words": _common_words,
    "qa": _who,
}


def ruler_questions(
    suite: str, texts: Sequence[Text], language: Language, context: int, per_task: int
) -> list[Question]:
    """`per_task` puzzles of every kind, hidden in texts so that the prompt has `context` tokens
    at most."""
    filler = [paragraph for text in texts for paragraph in text.text.split("\n\n") if paragraph]
    found = []
    for kind, make in PUZZLES.items():
        for index in range(per_task):
            rng = random.Random(f"{kind} {context} {index}")
            puzzle = make(rng)
            prompt = language.tokenize(_hide(rng, puzzle, filler, language, context))
            found.append(
                Question(
                    suite=suite,
                    name=f"{kind} {index}",
                    category=kind,
                    prompt=(*language.start, *prompt),
                    answer_tokens=32,
                    references=puzzle.wanted,
                    metric="contains_all",
                )
            )
    return found


def _hide(
    rng: random.Random, puzzle: _Puzzle, filler: list[str], language: Language, context: int
) -> str:
    head = "Remember the facts in the text below; a question about them follows.\n\n"
    used = len(language.tokenize(head + "\n".join(puzzle.lines) + puzzle.question)) + 16
    if used > context:
        raise ConfigError(f"suite: a context of {context} is too short for a puzzle ({used})")
    pieces = list(puzzle.lines)
    if puzzle.fills:
        each = len(language.tokenize(" ".join(pieces))) + 1
        pieces *= max(1, (context - used) // each)
        rng.shuffle(pieces)
        return f"{head}{' '.join(pieces)}\n\n{puzzle.question}"
    start = rng.randrange(len(filler))
    paragraphs: list[str] = []
    for step in range(len(filler)):
        paragraph = filler[(start + step) % len(filler)]
        used += len(language.tokenize(paragraph + "\n\n"))
        if used > context:
            break
        paragraphs.append(paragraph)
    places = sorted(rng.randrange(len(paragraphs) + 1) for _ in pieces)
    for offset, (place, piece) in enumerate(zip(places, pieces, strict=True)):
        paragraphs.insert(place + offset, piece)
    return head + "\n\n".join(paragraphs) + f"\n\n{puzzle.question}"
