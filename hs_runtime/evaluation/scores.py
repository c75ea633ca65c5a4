"""How a free answer is scored against its references, 0 to 1.

The rules are those published with LongBench. ROUGE-L is the F1 of the longest common subsequence of
words; LongBench's package unites subsequences over sentences, so its summaries score a little
differently, and only arms of one run should be compared.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def normalised_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """Of the words they share, counted as often as both have them."""
    ours, theirs = normalised_words(prediction), normalised_words(reference)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def rouge_l(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """F1 of the longest common subsequence of words, in linear space."""
    ours, theirs = prediction.split(), reference.split()
    if not ours or not theirs:
        return 0.0
    row = [0] * (len(theirs) + 1)
    for word in ours:
        above = 0  # of the cell to the left, before this row overwrote it
        for column, other in enumerate(theirs, start=1):
            before = row[column]
            row[column] = above + 1 if word == other else max(row[column], row[column - 1])
            above = before
    return 2 * row[-1] / (len(ours) + len(theirs))


def classification(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """1 over the number of labels that the answer names, if the right one is among them."""
    named = [label for label in labels if label in prediction]
    named = [label for label in named if label == reference or label not in reference]
    return 1 / len(named) if reference in named else 0.0


def numbers(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """The share of the answer's numbers that are the last number of the reference."""
    right = re.findall(r"\d+", reference)
    found = re.findall(r"\d+", prediction)
    return found.count(right[-1]) / len(found) if found and right else 0.0


def code_similarity(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """Edit similarity of the answer's first line of code."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((each for each in lines if not re.search(r"`|#|//", each)), "")
    return SequenceMatcher(None, line, reference, autojunk=False).ratio()


def contains(prediction: str, reference: str, labels: Sequence[str] = ()) -> float:
    """Whether the answer has the reference in it, whatever the case."""
    return float(reference.lower() in prediction.lower())


Scorer = Callable[[str, str, Sequence[str]], float]
SCORERS: Final[Mapping[str, Scorer]] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "numbers": numbers,
    "code_similarity": code_similarity,
    "contains": contains,
    "contains_all": contains,
}


def score(
    metric: str, prediction: str, references: Sequence[str], labels: Sequence[str] = ()
) -> float:
    """The best over the references; their mean for `contains_all`, whose references are all
    wanted. KeyError on an unknown metric."""
    found = [SCORERS[metric](prediction, reference, labels) for reference in references]
    if not found:
        return 0.0
    return sum(found) / len(found) if metric == "contains_all" else max(found)
