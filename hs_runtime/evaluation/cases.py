"""What the arms are asked: teacher-forced sequences with the positions that are scored.

In the retrieval suites the question is decoded like the answer, so that every token of the answer
reads the context under the decode policy, and the fact lies before the window that stays dense.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.texts import Document, Text, Tokenize, cut_documents

COPIED: Final = 64  # scored tokens of a copied passage
_CUE: Final = 24  # of its tokens before those, which say what is to be copied
_CITIES: Final = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Rome", "Athens", "Dublin", "Prague", "Vienna"),
    *("Tokyo", "Seoul", "Delhi", "Perth", "Boston", "Denver", "Havana", "Tunis", "Accra", "Riga"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`tokens` are prompt and continuation. `scored` positions up to `prompt` are those of prefill
    (see `tap`). `exact` says that the scored continuation is the one right answer."""

    suite: str
    name: str
    tokens: tuple[int, ...]
    prompt: int
    scored: tuple[int, ...]
    exact: bool = False

    @property
    def prefill_scored(self) -> tuple[int, ...]:
        return tuple(p for p in self.scored if p <= self.prompt)

    @property
    def decode_scored(self) -> tuple[int, ...]:
        return tuple(p for p in self.scored if p > self.prompt)


@dataclass(frozen=True, slots=True)
class Wishes:
    """How large the suites are, in tokens and documents."""

    documents: int = 10
    prompts: int = 40  # of a retrieval suite, or of each task of the others; 0: all of LongBench
    streams: int = 1  # requests at once when the speed is measured
    steps: int = 128
    scored_prompt: int = 1024


def text_cases(
    suite: str, texts: Sequence[Text], tokenize: Tokenize, context: int, wishes: Wishes
) -> list[Case]:
    """The end of a prompt of `context` tokens, then `steps` decode steps over what follows.

    The first token after the prompt is predicted by prefill, so that many steps score as many.
    """
    length = context + wishes.steps + 1
    documents = cut_documents(texts, tokenize, count=wishes.documents, length=length)
    first = max(1, context + 1 - wishes.scored_prompt) if wishes.scored_prompt else context + 1
    scored = tuple(range(first, length))
    return [Case(suite, each.name, each.tokens, context, scored) for each in documents]


def copy_cases(
    suite: str, texts: Sequence[Text], tokenize: Tokenize, context: int, wishes: Wishes
) -> list[Case]:
    """A passage from between 300 and 1,000 tokens before the end of the prompt comes again."""
    rng, passage = random.Random(context), _CUE + COPIED
    break_ = tokenize("\n\n")
    body = context - len(break_)
    if body < 320 + passage:
        raise ConfigError(f"suite: {suite} (a copy needs a context of {320 + passage} at least)")
    found = []
    for each in cut_documents(texts, tokenize, count=wishes.documents, length=body):
        start = rng.randrange(max(64, body - 1000), body - 300 - passage + 1)
        repeated = each.tokens[start : start + passage]
        tokens = (*each.tokens, *break_, *repeated)
        prompt = body + len(break_)
        scored = tuple(range(prompt + _CUE, len(tokens)))
        found.append(Case(suite, each.name, tokens, prompt, scored))
    return found


def passkey_cases(
    suite: str, texts: Sequence[Text], tokenize: Tokenize, context: int, wishes: Wishes
) -> list[Case]:
    """One five-digit number in a long text."""

    def build(rng: random.Random, filler: Document) -> Case:
        key = str(rng.randrange(10_000, 100_000))
        fact = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
        return _hidden(
            suite, filler.name, tokenize, rng, context, filler, (fact,),
            "\n\nWhat is the pass key? The pass key is", f" {key}",
        )  # fmt: skip

    return _retrieval(texts, tokenize, context, wishes, build)


def multi_needle_cases(
    suite: str, texts: Sequence[Text], tokenize: Tokenize, context: int, wishes: Wishes
) -> list[Case]:
    """Three numbers of three cities; one is asked for."""

    def build(rng: random.Random, filler: Document) -> Case:
        cities = rng.sample(_CITIES, 3)
        codes = rng.sample(range(10_000, 100_000), 3)
        facts = tuple(
            f"\n\nThe special code of {city} is {code}.\n\n"
            for city, code in zip(cities, codes, strict=True)
        )
        chosen = rng.randrange(3)
        question = f"\n\nWhat is the special code of {cities[chosen]}? "
        question += f"The special code of {cities[chosen]} is"
        return _hidden(
            suite, filler.name, tokenize, rng, context, filler, facts, question,
            f" {codes[chosen]}",
        )  # fmt: skip

    return _retrieval(texts, tokenize, context, wishes, build)


def key_value_cases(
    suite: str, texts: Sequence[Text], tokenize: Tokenize, context: int, wishes: Wishes
) -> list[Case]:
    """A list of pairs that fills the context; the asked one lies before the dense window."""
    found = []
    for index in range(wishes.prompts):
        rng = random.Random(f"{context} {index}")
        tokens = tokenize("Below is a list of keys and their values.\n\n")
        keys: list[str] = []
        values: list[str] = []
        ends: list[int] = []
        while len(tokens) < context:
            keys.append(f"{rng.randrange(16**6):06x}")
            values.append(str(rng.randrange(10_000, 100_000)))
            tokens += tokenize(f"{keys[-1]}: {values[-1]}\n")
            ends.append(len(tokens))
        reachable = [i for i, end in enumerate(ends) if end < context - 320]
        if not reachable:
            raise ConfigError(f"suite: {suite} (a list needs a context of 512 at least)")
        chosen = rng.choice(reachable)
        question = tokenize(f"\nThe value of the key {keys[chosen]}:\n{keys[chosen]}:")
        answer = tokenize(f" {values[chosen]}")
        found.append(_answered(suite, f"list {index}", tokens, question, answer))
    return found


def _retrieval(
    texts: Sequence[Text],
    tokenize: Tokenize,
    context: int,
    wishes: Wishes,
    build: Callable[[random.Random, Document], Case],
) -> list[Case]:
    """`prompts` cases, each with its own stretch of text as long as there are some."""
    if context < 512:
        raise ConfigError(f"suite: context {context} (a hidden fact needs 512 at least)")
    fillers: list[Document] = []
    for text in texts:
        tokens = tokenize(text.text)
        for start in range(0, len(tokens) - context, context):
            piece = tuple(tokens[start : start + context])
            fillers.append(Document(f"{text.name} +{start}", piece))
    if not fillers:
        raise ConfigError(f"suite: no text of {context} tokens (give longer ones with --text)")
    random.Random(0).shuffle(fillers)
    found = []
    for index in range(wishes.prompts):
        filler = fillers[index % len(fillers)]
        name = f"{index}: {filler.name}"
        found.append(build(random.Random(f"{context} {index}"), Document(name, filler.tokens)))
    return found


def _hidden(
    suite: str,
    name: str,
    tokenize: Tokenize,
    rng: random.Random,
    context: int,
    filler: Document,
    facts: Sequence[str],
    question: str,
    answer: str,
) -> Case:
    """Facts at random places of the filler, of which none is dense by being recent or first."""
    head = tokenize("There are important facts hidden in the text below. Remember them.\n\n")
    needles = [tokenize(fact) for fact in facts]
    room = context - len(head) - sum(map(len, needles))
    places = sorted(rng.randrange(max(0, 64 - len(head)), room - 320) for _ in needles)
    tokens, done = head, 0
    for place, needle in zip(places, needles, strict=True):
        tokens = [*tokens, *filler.tokens[done:place], *needle]
        done = place
    tokens = [*tokens, *filler.tokens[done:room]]
    return _answered(suite, name, tokens, tokenize(question), tokenize(answer))


def _answered(
    suite: str, name: str, prompt: list[int], question: list[int], answer: list[int]
) -> Case:
    asked = len(prompt) + len(question)
    scored = tuple(range(asked, asked + len(answer)))
    return Case(suite, name, (*prompt, *question, *answer), len(prompt), scored, exact=True)


Builder = Callable[[str, Sequence[Text], Tokenize, int, Wishes], list[Case]]
# Suite -> how its cases are made, and the context that it has unless the user says another.
SUITES: Final[dict[str, tuple[Builder, int]]] = {
    "kl": (text_cases, 6144),
    "copy": (copy_cases, 1400),
    "passkey": (passkey_cases, 1100),
    "multi": (multi_needle_cases, 1100),
    "keyvalue": (key_value_cases, 1100),
}
