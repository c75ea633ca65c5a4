"""Held-out texts: the bundled novels, or files of the user's."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from hs_runtime.config import ConfigError

BUNDLED: Final = "novels.jsonl.xz"
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of a text in tokens."""

    name: str
    tokens: tuple[int, ...]


def bundled_texts() -> list[Text]:
    """Twelve excerpts of novels, about 33,000 characters each, never used for calibration."""
    packed = resources.files(__package__).joinpath("data", BUNDLED).read_bytes()
    lines = lzma.decompress(packed).decode("utf-8").splitlines()
    return [Text(**json.loads(line)) for line in lines]


def read_texts(paths: Sequence[Path]) -> list[Text]:
    """Each file one text; of a folder, all its .txt files by name. Raises ConfigError."""
    files = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"text: {str(path)!r} does not exist")
        files += sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"text: no .txt file in {', '.join(map(str, paths))}")
    try:
        return [Text(file.stem, file.read_text(encoding="utf-8")) for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: {error}") from error


def cut_documents(
    texts: Sequence[Text], tokenize: Tokenize, *, count: int, length: int
) -> list[Document]:
    """`count` stretches of `length` tokens that do not overlap, taken from all texts in turn.

    Raises ConfigError when the texts are too short, with what they would give.
    """
    cut = []
    for text in texts:
        tokens = tokenize(text.text)
        pieces = range(0, len(tokens) - length + 1, length)
        cut.append(
            [
                Document(text.name if not at else f"{text.name} +{at}", tuple(tokens[at:][:length]))
                for at in pieces
            ]
        )
    rounds = max(map(len, cut), default=0)
    found = [pieces[turn] for turn in range(rounds) for pieces in cut if turn < len(pieces)]
    if len(found) < count:
        raise ConfigError(
            f"documents: {count} of {length} tokens wanted, the {len(texts)} texts give "
            f"{len(found)} (give longer ones with --text, a shorter context or fewer documents)"
        )
    return found[:count]
