"""The tap: inside the scheduler process it forces the next token and reduces logits to numbers.

`ServingTap` is made by the process target of the evaluation and by nothing else; the target of a
server takes no such argument, so no request, option or variable can bring it there.

A job is a file in the tap's folder, named after the request's id. Log-probs of the dense arm are
written to a file of float32 [positions, vocabulary], and the other arms are compared with it
position by position, over the whole vocabulary.

Positions are those of the token that is predicted: the logits at the last of n tokens predict
position n. Up to and including the prompt's length they come from prefill, after it from decode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

JOB_SUFFIX: Final = ".job.json"
ANSWER_SUFFIX: Final = ".answer.json"
_ROWS: Final = 128  # of logits at once: 25 MB of float32 for a vocabulary of 49,152


@dataclass(frozen=True, slots=True)
class Job:
    """One teacher-forced request: `tokens` are prompt and continuation, `scored` the positions to
    predict, ascending. `reference` holds the dense arm's log-probs of `reference_positions`; the
    job that `writes` it is the dense arm."""

    tokens: tuple[int, ...]
    prompt: int
    scored: tuple[int, ...]
    reference: str
    reference_positions: tuple[int, ...]
    writes: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.tokens):
            raise ValueError(f"prompt of {self.prompt} in {len(self.tokens)} tokens")
        if not set(self.scored) <= set(self.reference_positions):
            raise ValueError("scored positions that the reference does not have")
        if self.scored and not 0 < self.scored[0] <= self.scored[-1] < len(self.tokens):
            raise ValueError(f"scored positions {self.scored[0]} to {self.scored[-1]}")

    def save(self, folder: Path, rid: str) -> None:
        (folder / (rid + JOB_SUFFIX)).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = ("tokens", "scored", "reference_positions")
        return cls(**{**values, **{name: tuple(values[name]) for name in lists}})


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For each scored position, in order: KL(dense || arm) and the negative log-likelihood of the
    text in nats, that of the dense arm, whether the likeliest token is the dense arm's, and whether
    it is the text's."""

    positions: tuple[int, ...]
    kl: tuple[float, ...]
    nll: tuple[float, ...]
    dense_nll: tuple[float, ...]
    agrees: tuple[bool, ...]
    correct: tuple[bool, ...]

    @classmethod
    def load(cls, folder: Path, rid: str) -> TokenScores:
        """Of a finished request; removes the files of its job. FileNotFoundError if it has none."""
        path = folder / (rid + ANSWER_SUFFIX)
        values = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        (folder / (rid + JOB_SUFFIX)).unlink(missing_ok=True)
        return cls(**{name: tuple(value) for name, value in values.items()})


@dataclass(slots=True)
class _Running:
    """A job in progress. `found` maps a position to its row of TokenScores."""

    job: Job
    wanted: frozenset[int]
    row_of: dict[int, int]  # in the reference
    reference: Tensor | None = None  # float32 [positions, vocabulary], mapped into memory
    found: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class ServingTap:
    """Called by the hooks of a scheduler process. Every rank computes, rank 0 writes."""

    def __init__(self, folder: str | Path, writes: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._writes = Path(folder), writes
        self._running: dict[str, _Running | None] = {}

    def force(
        self, rids: Sequence[str], lengths: Sequence[int], logits: Tensor, chosen: Tensor
    ) -> None:
        """After sampling: overwrite the `chosen` tokens [R] of tapped requests, in place.

        `lengths` are the tokens whose KV is complete, so `logits` [R, V] predict those positions.
        """
        rows, forced = [], []
        for row, (rid, length) in enumerate(zip(rids, lengths, strict=True)):
            running = self._of(rid)
            if running is None or length >= len(running.job.tokens):
                continue  # not ours, or the step that overlap runs after the last token
            rows.append(row)
            forced.append(running.job.tokens[length])
            if length in running.wanted and length not in running.found:
                self._score(rid, running, [length], logits[row : row + 1])
        if rows:
            chosen[rows] = torch.tensor(forced, dtype=chosen.dtype, device=chosen.device)

    def read_prompt(
        self,
        rids: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        logits_of: Callable[[Tensor], Tensor],
    ) -> None:
        """In a prefill of rows `lengths` long that begin at positions `starts`: score what is
        wanted of it. `logits_of(indices)` gives the logits [n, V] of rows of the flat batch."""
        base = 0
        for rid, start, length in zip(rids, starts, lengths, strict=True):
            running = self._of(rid)
            if running is not None:
                wanted = [
                    position
                    for position in running.job.scored
                    if start < position <= start + length and position not in running.found
                ]
                for first in range(0, len(wanted), _ROWS):
                    part = wanted[first : first + _ROWS]
                    rows = torch.tensor([base + position - 1 - start for position in part])
                    self._score(rid, running, part, logits_of(rows))
            base += length

    def _of(self, rid: str) -> _Running | None:
        if rid not in self._running:
            path = self._folder / (rid + JOB_SUFFIX)
            self._running[rid] = self._open(Job.load(path)) if path.is_file() else None
        return self._running[rid]

    def _open(self, job: Job) -> _Running:
        rows = {position: row for row, position in enumerate(job.reference_positions)}
        return _Running(job, frozenset(job.scored), rows)

    def _score(self, rid: str, running: _Running, positions: list[int], logits: Tensor) -> None:
        job = running.job
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        if running.reference is None:
            running.reference = self._map(job, log_probs.shape[-1])
        rows = torch.tensor([running.row_of[position] for position in positions])
        if job.writes:
            if self._writes():
                running.reference[rows] = log_probs.cpu()
            dense = log_probs
        else:
            dense = running.reference[rows].to(log_probs.device)
        text = torch.tensor([job.tokens[position] for position in positions])
        text = text.to(log_probs.device)
        likeliest = log_probs.argmax(-1)
        columns = (
            (dense.exp() * (dense - log_probs)).sum(-1, dtype=torch.float64).tolist(),
            (-log_probs.gather(-1, text[:, None])[:, 0]).tolist(),
            (-dense.gather(-1, text[:, None])[:, 0]).tolist(),
            (likeliest == dense.argmax(-1)).tolist(),
            (likeliest == text).tolist(),
        )
        for position, *values in zip(positions, *columns, strict=True):
            running.found[position] = tuple(values)
        if len(running.found) == len(job.scored):
            self._finish(rid, running)

    def _map(self, job: Job, vocabulary: int) -> Tensor:
        shape = (len(job.reference_positions), vocabulary)
        flat = torch.from_file(
            job.reference,
            shared=job.writes,  # shared creates the file in the size that is needed
            size=shape[0] * shape[1],
            dtype=torch.float32,
        )
        return flat.view(shape)

    def _finish(self, rid: str, running: _Running) -> None:
        job = running.job
        running.reference = None
        if not self._writes():
            return
        columns = zip(*(running.found[position] for position in job.scored), strict=True)
        scores = TokenScores(job.scored, *columns)
        path = self._folder / (rid + ANSWER_SUFFIX)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(scores)), encoding="utf-8")
        partial.replace(path)
