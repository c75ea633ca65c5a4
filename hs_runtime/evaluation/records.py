"""Finished measurements: one line of JSON for each (suite, arm, case), kept as they come.

A run that is started again skips what is finished. Every line carries a digest of all that shaped
it; a folder that holds a line of the same name with another digest is refused, not mixed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hs_runtime.config import ConfigError

if TYPE_CHECKING:
    from hs_runtime.evaluation.tap import TokenScores  # torch, which a server's routes do not need

FILE: Final = "results.jsonl"
PREFILL: Final = "prefill"
DECODE: Final = "decode"


@dataclass(frozen=True, slots=True)
class Sums:
    """Over the scored tokens of one part: of KL and its square, of NLL and of the dense arm's, of
    agreeing and of correct likeliest tokens."""

    tokens: int
    kl: float
    kl_square: float
    nll: float
    dense_nll: float
    agrees: int
    correct: int

    @classmethod
    def of(cls, scores: TokenScores, positions: Iterable[int]) -> Sums | None:
        """None if none of them was scored."""
        wanted = set(positions)
        rows = [row for row, position in enumerate(scores.positions) if position in wanted]
        if not rows:
            return None
        kl = [scores.kl[row] for row in rows]
        return cls(
            tokens=len(rows),
            kl=math.fsum(kl),
            kl_square=math.fsum(each * each for each in kl),
            nll=math.fsum(scores.nll[row] for row in rows),
            dense_nll=math.fsum(scores.dense_nll[row] for row in rows),
            agrees=sum(scores.agrees[row] for row in rows),
            correct=sum(scores.correct[row] for row in rows),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """`parts` maps prefill and decode to their sums, `score` is 0 to 1 where there is an answer.
    Bytes are of the KV of all layers on one rank, at the end of the sequence."""

    suite: str
    arm: str
    case: str
    inputs: str
    parts: Mapping[str, Sums] = field(default_factory=dict)
    score: float | None = None
    category: str = ""
    kv_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.arm, self.case

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Record:
        values = json.loads(text)
        values["parts"] = {name: Sums(**sums) for name, sums in values["parts"].items()}
        return cls(**values)


def inputs_digest(*parts: Any) -> str:
    """SHA-256 (hex) of JSON values, in order."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class Records:
    """The lines of an output folder."""

    def __init__(self, folder: Path) -> None:
        """Reads what is there; a last line that was cut off by a kill is dropped. ConfigError."""
        self.folder = folder
        self._path = folder / FILE
        self._found: dict[tuple[str, str, str], Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise ConfigError(f"output: {folder}: {error.strerror}") from error
        whole = [line for line in lines if line.endswith("\n")]
        for number, line in enumerate(whole, start=1):
            try:
                record = Record.from_json(line)
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"output: line {number} of {self._path}: {error}") from error
            self._found[record.key] = record
        if len(whole) != len(lines):
            self._path.write_text("".join(whole), encoding="utf-8")

    def has(self, suite: str, arm: str, case: str, inputs: str) -> bool:
        """Whether it is finished. Raises ConfigError if it was measured on other inputs."""
        record = self._found.get((suite, arm, case))
        if record is not None and record.inputs != inputs:
            raise ConfigError(
                f"output: {self._path} holds {arm!r} of {case!r} in {suite!r}, measured with "
                "another model, text, calibration or setting (choose another --output)"
            )
        return record is not None

    def add(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
        self._found[record.key] = record

    def all(self) -> Sequence[Record]:
        return list(self._found.values())
