"""The tap forces what a job says, scores what it asks for, and leaves everybody else alone."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from hs_runtime import sglang_seam, spawn
from hs_runtime.evaluation.layers import EDGES, FILE, LayerStatistics, LayerTap, markdown
from hs_runtime.evaluation.tap import Job, ServingTap, TokenScores

VOCABULARY = 50
TOKENS = (7, 3, 9, 1, 4, 8, 2)
PROMPT = 4


def job(folder: Path, *, writes: bool, scored: tuple[int, ...] = (2, 3, 4, 5, 6)) -> Job:
    reference = (2, 3, 4, 5, 6)
    return Job(TOKENS, PROMPT, scored, str(folder / "reference"), reference, writes)


def logits(seed: int) -> torch.Tensor:
    """[len(TOKENS), V]: row i predicts position i + 1."""
    return torch.randn(len(TOKENS), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def run(tap: ServingTap, rid: str, rows: torch.Tensor, cuts: tuple[int, ...] = (PROMPT,)) -> None:
    """A prefill in chunks that end at `cuts`, then decode beside a request that is not tapped."""
    start = 0
    for end in cuts:
        tap.read_prompt([rid], [start], [end - start], lambda at, s=start: rows[s + at])
        tap.force([rid], [end], rows[end - 1 : end], torch.zeros(1, dtype=torch.int64))
        start = end
    for length in range(PROMPT, len(TOKENS) + 1):  # one step too many, as overlap does
        chosen = torch.tensor([11, 12])
        tap.force(["other", rid], [100, length], rows[[0, length - 1]], chosen)
        assert chosen[0] == 11
        assert chosen[1] == (TOKENS[length] if length < len(TOKENS) else 12)


def measured(folder: Path, seed: int, *, writes: bool, **more: tuple[int, ...]) -> TokenScores:
    job(folder, writes=writes, **more).save(folder, "mine")
    run(ServingTap(folder), "mine", logits(seed))
    return TokenScores.load(folder, "mine")


def test_the_dense_arm_differs_from_itself_by_nothing(tmp_path: Path) -> None:
    written = measured(tmp_path, 0, writes=True)
    again = measured(tmp_path, 0, writes=False)
    assert written.positions == again.positions == (2, 3, 4, 5, 6)
    assert max(map(abs, again.kl)) < 1e-9 and all(again.agrees)
    assert again.nll == written.nll == written.dense_nll


def test_another_arm_is_compared_over_the_whole_vocabulary(tmp_path: Path) -> None:
    measured(tmp_path, 0, writes=True)
    found = measured(tmp_path, 1, writes=False)
    dense, other = (logits(seed).double().log_softmax(-1) for seed in (0, 1))
    for at, position in enumerate(found.positions):
        p, q = dense[position - 1], other[position - 1]
        assert found.kl[at] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
        assert found.nll[at] == pytest.approx(-float(q[TOKENS[position]]), rel=1e-5)
        assert found.dense_nll[at] == pytest.approx(-float(p[TOKENS[position]]), rel=1e-5)
        assert found.agrees[at] == bool(p.argmax() == q.argmax())
        assert found.correct[at] == bool(q.argmax() == TOKENS[position])


def test_a_part_of_the_reference_can_be_compared(tmp_path: Path) -> None:
    whole = measured(tmp_path, 0, writes=True) and measured(tmp_path, 1, writes=False)
    part = measured(tmp_path, 1, writes=False, scored=(5, 6))
    assert part.positions == (5, 6) and part.kl == whole.kl[3:]


@pytest.mark.parametrize("cuts", [(1, PROMPT), (2, 3, PROMPT)])
def test_chunks_of_a_prompt_do_not_matter(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    measured(tmp_path, 0, writes=True)
    whole = measured(tmp_path, 1, writes=False)
    job(tmp_path, writes=False).save(tmp_path, "mine")
    run(ServingTap(tmp_path), "mine", logits(1), cuts)
    assert TokenScores.load(tmp_path, "mine").kl == pytest.approx(whole.kl)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    job(tmp_path, writes=True).save(tmp_path, "mine")
    run(ServingTap(tmp_path, lambda: False), "mine", logits(0))
    with pytest.raises(FileNotFoundError):
        TokenScores.load(tmp_path, "mine")


@pytest.mark.parametrize(
    "wrong", [{"prompt": 0}, {"prompt": len(TOKENS)}, {"scored": (7,)}, {"scored": (1,)}]
)
def test_an_impossible_job_is_refused(wrong: dict[str, object]) -> None:
    values = {"prompt": PROMPT, "scored": (2,), "reference_positions": (2, 7), **wrong}
    with pytest.raises(ValueError):
        Job(tokens=TOKENS, reference="", **values)  # type: ignore[arg-type]


def test_a_serving_process_has_no_tap() -> None:
    """Neither a hook of a server, nor an argument of its process target, leads to it."""
    assert sglang_seam.TAP_HOOKS
    source = inspect.getsource(sglang_seam._hooks)
    assert not [target for target in sglang_seam.TAP_HOOKS if target.rsplit(".", 1)[1] in source]
    assert "tap" not in inspect.getsource(sglang_seam.register)
    assert "tap" not in inspect.getsource(spawn.run_scheduler)


def test_layers_add_up_over_forwards(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(192, 2, 8, generator=generator)
    v = torch.randn(192, 2, 8, generator=generator) / 8
    tap = LayerTap(tmp_path / FILE)
    for rows in (slice(0, 64), slice(64, 192)):
        for layer in (0, 1):
            tap.observe(layer, k[rows], v[rows])
    tap.save()
    found = LayerStatistics.load(tmp_path / FILE)
    assert found.tokens == 192
    assert found.magnitude.shape == (2, 2, 2, 8) and found.loss.shape == (2, 2, 2)
    torch.testing.assert_close(torch.tensor(found.magnitude[1, 0]), k.double().abs().mean(0))
    groups = k.double().abs().reshape(192, 2, 2, 4).sort(-1).values
    loss = groups[..., :2].sum((0, 2, 3)) / groups.sum((0, 2, 3))
    torch.testing.assert_close(torch.tensor(found.loss[0, 0]), loss, rtol=1e-6, atol=0)
    assert found.histogram[0, 0].sum() == k.numel() and len(found.histogram[0, 0]) == len(EDGES) + 1
    table = markdown(found, "magnitude")
    assert table.count("\n|") == 4 and "| 1 |" in table
    assert found.as_json()["layers"][1]["K"]["loss"] == [round(float(x), 5) for x in loss]
