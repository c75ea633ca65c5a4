"""Answers are scored as LongBench publishes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.model import Language
from hs_runtime.evaluation.questions import (
    CATEGORIES,
    LONGBENCH,
    PUZZLES,
    longbench_questions,
    ruler_questions,
)
from hs_runtime.evaluation.scores import SCORERS, score
from hs_runtime.evaluation.texts import bundled_texts
from tests.support.languages import language


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "labels", "wanted"),
    [
        ("f1", "The Eiffel Tower!", ["eiffel tower"], (), 1.0),
        ("f1", "in the tower", ["the tower of London", "a bridge"], (), 0.4),
        ("f1", "nothing", ["something"], (), 0.0),
        ("f1", "", ["something"], (), 0.0),
        ("f1", "a a b b", ["b c"], (), 0.5),
        ("rouge_l", "the cat sat on the mat", ["the cat lay on a mat"], (), 8 / 12),
        ("rouge_l", "one two", ["two one"], (), 0.5),
        ("rouge_l", "", ["words"], (), 0.0),
        ("classification", "Type: City", ["City"], ("City", "Country"), 1.0),
        ("classification", "City or Country", ["City"], ("City", "Country"), 0.5),
        ("classification", "Country", ["City"], ("City", "Country"), 0.0),
        ("classification", "Other city", ["Other city"], ("Other city", "city"), 1.0),
        ("numbers", "Paragraph 12", ["Paragraph 12"], (), 1.0),
        ("numbers", "12 or 13", ["Paragraph 12"], (), 0.5),
        ("numbers", "none", ["4"], (), 0.0),
        ("code_similarity", "# note\nreturn x\nmore", ["return x"], (), 1.0),
        ("code_similarity", "\n\nabcd", ["abxd"], (), 0.75),
        ("contains", "It is 48213.", ["48213"], (), 1.0),
        ("contains_all", "AX and BY", ["AX", "BY", "CZ", "DX"], (), 0.5),
        ("f1", "anything", [], (), 0.0),
    ],
)
def test_known_answers_have_known_scores(
    metric: str, prediction: str, references: list[str], labels: tuple[str, ...], wanted: float
) -> None:
    assert score(metric, prediction, references, labels) == pytest.approx(wanted)


def test_sixteen_tasks_in_six_categories() -> None:
    assert len(LONGBENCH) == 16
    assert {task.category for task in LONGBENCH.values()} == set(CATEGORIES)
    assert all(task.metric in SCORERS and "{context}" in task.ask for task in LONGBENCH.values())


def write_task(folder: Path, name: str, rows: int, context: str = "Some context.") -> None:
    lines = [
        {
            "input": f"Which {row}?",
            "context": context,
            "answers": ["one", "two"],
            "all_classes": ["one", "three"] if name == "trec" else None,
        }
        for row in range(rows)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text)


def test_longbench_is_read_from_a_folder(tmp_path: Path) -> None:
    write_task(tmp_path, "trec", 3)
    write_task(tmp_path, "hotpotqa", 2)
    found = longbench_questions("longbench@500", tmp_path, language(), 500, 2)
    assert [each.name for each in found] == ["hotpotqa 0", "hotpotqa 1", "trec 0", "trec 1"]
    multi, few = found[0], found[2]
    assert language().text(multi.prompt).startswith("<user>Several passages follow.")
    assert "Which 0?\nAnswer:<answer>" in language().text(multi.prompt)
    assert few.labels == ("one", "three") and few.first_line and few.category == "Few-Shot"
    assert not language().text(few.prompt).startswith("<user>")


def test_a_long_prompt_loses_its_middle(tmp_path: Path) -> None:
    write_task(tmp_path, "gov_report", 1, "A" * 3000 + "B" * 3000)
    (found,) = longbench_questions("longbench@1000", tmp_path, language(), 1000, 0)
    text = language().text(found.prompt)
    assert len(found.prompt) <= 1000 - 512 + len("<user><answer>")
    assert text.count("A") > 100 and text.count("B") > 100 and "Summary" in text


@pytest.mark.parametrize("name", [None, "absent", "empty"])
def test_without_data_the_message_says_where_it_comes_from(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    folder = tmp_path / name if name else None
    with pytest.raises(ConfigError, match=r"longbench: .*qasper\.jsonl"):
        longbench_questions("longbench", folder, language(), 500, 0)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    write_task(tmp_path, "lcc", 1)
    with (tmp_path / "lcc.jsonl").open("a") as file:
        file.write('{"input": ""}\n')
    with pytest.raises(ConfigError, match=r"line 2 of lcc\.jsonl"):
        longbench_questions("longbench", tmp_path, language(), 500, 0)


def test_puzzles_fit_the_context_and_hold_their_answers() -> None:
    found = ruler_questions("ruler@2000", bundled_texts()[:2], language(), 2000, 2)
    assert [each.category for each in found] == [kind for kind in PUZZLES for _ in range(2)]
    for each in found:
        text = language().text(each.prompt)
        assert 1000 < len(each.prompt) <= 2000
        assert each.references and all(reference in text for reference in each.references)
    assert found == ruler_questions("ruler@2000", bundled_texts()[:2], language(), 2000, 2)
    with pytest.raises(ConfigError, match="too short"):
        ruler_questions("ruler@100", bundled_texts()[:2], language(), 100, 1)


def test_a_language_without_a_chat_form_leaves_prompts_alone() -> None:
    class Plain:
        chat_template = None

    assert Language(Plain()).as_chat("text") == "text"
