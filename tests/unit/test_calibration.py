"""The calibration file and how it is made: on random moments, and on a tiny model's own text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hs_kernels import ops
from hs_runtime.calibration import (
    Calibration,
    default_file,
    digest,
    fingerprint,
    load_calibration,
    save_calibration,
)
from hs_runtime.calibration.calibrate import (
    Moments,
    _windows,
    build_calibration,
    compensation_factor,
    read_text,
    spread_order,
)
from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.policies import ServerConstants
from hs_runtime.sglang_seam import StartupRefused, _calibration_of_rank
from tests.support.calibrations import random_calibration, write_calibration
from tests.support.checkpoints import tiny_llama

TENSORS = ("permutation", "query_rms", "mean_score", "key_rms", "factor")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


# --- the file -----------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    made = random_calibration(3, 2, 128)
    save_calibration(made, tmp_path / "a")
    got = load_calibration(tmp_path / "a")
    for name in TENSORS:
        torch.testing.assert_close(getattr(got, name), getattr(made, name), rtol=1e-3, atol=1e-4)
    assert torch.equal(got.permutation, made.permutation)
    assert torch.equal(got.factor, got.factor.triu())
    assert (got.fingerprint, got.text, got.tokens) == (made.fingerprint, made.text, made.tokens)


def test_equal_calibrations_are_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save_calibration(random_calibration(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "nothing is left behind"


def test_the_constants_of_a_layer_are_those_that_pruners_name() -> None:
    made = random_calibration(2, 2, 64)
    for index, layer in enumerate(made.layers):
        assert set(layer) == {"query_rms", "mean_score", "key_rms", "factor"}
        for name, tensor in layer.items():
            assert torch.equal(tensor, getattr(made, name)[index])


@pytest.mark.parametrize(
    ("heads", "ranks", "parts"),
    [(8, 2, [range(4), range(4, 8)]), (2, 4, [range(1), range(1), range(1, 2), range(1, 2)])],
)
def test_ranks_take_their_own_heads(heads: int, ranks: int, parts: list[range]) -> None:
    made = random_calibration(2, heads)
    for rank, part in enumerate(parts):
        mine = made.of_rank(rank, ranks)
        for name in TENSORS:
            assert torch.equal(getattr(mine, name), getattr(made, name)[:, list(part)])


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write_calibration(tmp_path / "a")
    tensors = load_file(path)
    about = {"hierasparse": json.dumps({"version": 1, "fingerprint": "", "text": "", "tokens": 0})}
    order = tensors["permutation"].clone()
    order[0, 0, 0] = order[0, 0, 1]
    changes = {
        "leaves channels out": {"permutation": order},
        "no positive diagonal": {"factor": -tensors["factor"]},
        "the factor is not finite": {"factor": tensors["factor"] * torch.inf},
        r"key_rms is \[2, 2, 32\], not \[2, 2, 64\]": {
            "key_rms": tensors["key_rms"][:, :, :32].contiguous()
        },
        "query_rms is not finite": {"query_rms": tensors["query_rms"] * torch.nan},
        "mean_score is float16, not float32": {"mean_score": tensors["mean_score"].half()},
        "damaged": {"factor": tensors["factor"][..., :7].contiguous()},
    }
    for message, change in changes.items():
        save_file(tensors | change, path, about)
        with pytest.raises(ConfigError, match=message):
            load_calibration(path)
    newer = {name: text.replace('"version": 1', '"version": 9') for name, text in about.items()}
    save_file(tensors, path, newer)
    with pytest.raises(ConfigError, match="format 9"):
        load_calibration(path)
    for data in (b"", b"no safetensors at all"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="no calibration file"):
            load_calibration(path)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="no calibration file"):
        load_calibration(path)
    with pytest.raises(ConfigError, match="no calibration file"):
        load_calibration(tmp_path / "gone")


def test_a_file_is_tied_to_its_model(tmp_path: Path, tiny: Path) -> None:
    path = write_calibration(tmp_path / "a", tiny)
    load_calibration(path, str(tiny))
    other = tiny_llama(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="another model"):
        load_calibration(path, str(other))


def test_a_process_refuses_a_file_that_has_changed_since_the_start(tmp_path: Path) -> None:
    path = write_calibration(tmp_path / "a")
    constants = ServerConstants(pruner="calibrated", calibration=digest(path))
    config = RuntimeConfig(constants=constants, calibration_path=str(path))
    write_calibration(path, seed=1)
    with pytest.raises(StartupRefused, match="has changed"):
        _calibration_of_rank(config, "a-model", None)
    path.unlink()
    with pytest.raises(StartupRefused, match="gone"):
        _calibration_of_rank(config, "a-model", None)


def test_a_fingerprint_follows_what_makes_queries_and_keys(tmp_path: Path, tiny: Path) -> None:
    known = {fingerprint(str(tiny))}
    same = tiny_llama(tmp_path / "same")
    assert fingerprint(str(same)) in known
    for name in ("1.self_attn.k_proj", "0.self_attn.q_proj"):
        weights = load_file(same / "model.safetensors")
        weights[f"model.layers.{name}.weight"][0, 0] += 1
        save_file(weights, same / "model.safetensors")
        known.add(fingerprint(str(same)))
    assert len(known) == 3
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))
    known.add(fingerprint(str(same)))
    assert len(known) == 4
    for file in same.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        fingerprint(str(same))


def test_the_file_beside_a_model_goes_before_the_shipped_one(tmp_path: Path, tiny: Path) -> None:
    assert default_file(str(tmp_path), is_demo=False) is None
    shipped = default_file(str(tmp_path), is_demo=True)
    assert shipped is not None and load_calibration(shipped).tokens == 9216
    beside = write_calibration(tmp_path / "hierasparse.calibration")
    assert default_file(str(tmp_path), is_demo=True) == beside


# --- what is measured ---------------------------------------------------------------------------


def test_every_group_gets_one_channel_of_each_quartile() -> None:
    strength = torch.rand(3, 128)
    order = spread_order(strength)
    rank = strength.argsort(1, descending=True).argsort(1).gather(1, order)
    quartiles = (rank // 32).view(3, 32, 4)
    assert (quartiles == torch.arange(4)).all()


def moments_of(q: torch.Tensor, k: torch.Tensor, *, cut: int) -> Moments:
    moments = Moments(scale=0.125)
    for part in (slice(0, cut), slice(cut, None)):
        moments.add(q[:, part], k[:, part])
    return moments


def calibration_of(q: torch.Tensor, k: torch.Tensor) -> Calibration:
    moments = moments_of(q, k, cut=100)
    return build_calibration([moments], fingerprint="", text="", tokens=k.shape[1])


def test_moments_are_those_of_all_queries_of_a_kv_head() -> None:
    q, k = torch.randn(6, 300, 64) + 0.5, torch.randn(2, 300, 64)
    made = calibration_of(q, k)
    order = made.permutation[0].long()
    for head in range(2):
        mine = q[3 * head : 3 * head + 3].reshape(-1, 64).double()[:, order[head]]
        keys = k[head][:, order[head]]
        torch.testing.assert_close(made.query_rms[0, head], mine.square().mean(0).sqrt().float())
        torch.testing.assert_close(made.mean_score[0, head], 0.125 * mine.mean(0).float())
        torch.testing.assert_close(made.key_rms[0, head], keys.square().mean(0).sqrt())
        second = mine.T @ mine / len(mine)
        ridge = second + 0.02 * second.diagonal().mean() * torch.eye(64)
        product = made.factor[0, head].double() @ ridge @ made.factor[0, head].double().T
        torch.testing.assert_close(product, product.diagonal().mean() * torch.eye(64).double(),
                                   atol=1e-5, rtol=0)  # fmt: skip


def test_scores_are_unchanged_by_the_order_of_channels() -> None:
    q, k = torch.randn(6, 300, 64), torch.randn(2, 300, 64)
    order = calibration_of(q, k).permutation[0]
    by_token = [x.transpose(0, 1).contiguous() for x in (q, k)]
    new_q, new_k = (ops.permute_channels(x, order) for x in by_token)
    assert not torch.equal(new_k, by_token[1])
    old, new = (
        torch.einsum("ahgd,bhd->hgab", a.unflatten(1, (2, 3)), b)
        for a, b in (by_token, (new_q, new_k))
    )
    torch.testing.assert_close(new, old)


def test_a_head_whose_queries_are_zero_gets_a_factor() -> None:
    factor = compensation_factor(torch.zeros(2, 64, 64, dtype=torch.float64))
    assert torch.equal(factor, torch.eye(64).repeat(2, 1, 1))


@pytest.mark.parametrize("context", [0, 512, 8192, 131072])
@pytest.mark.parametrize("count", [512, 1024, 1500, 9216])
def test_windows_lie_all_over_the_context(context: int, count: int) -> None:
    windows = list(_windows(list(range(count)), context))
    assert [t for tokens, _ in windows for t in tokens] == list(range(count))
    firsts = [positions[0] for _, positions in windows]
    assert all(len(tokens) == len(positions) for tokens, positions in windows)
    assert firsts[0] == 0
    if len(windows) > 1:
        assert firsts[-1] == max(0, context - 1024)
        gaps = {b - a for a, b in pairwise(firsts)}
        assert max(gaps) - min(gaps) <= 1


def test_the_bundled_text_is_long_enough_and_others_are_read(tmp_path: Path) -> None:
    assert len(read_text(None)) > 40_000
    path = tmp_path / "text"
    path.write_text("naïve")
    assert read_text(path) == "naïve"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read"):
        read_text(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_text(tmp_path / "gone")


def test_moments_do_not_depend_on_the_cuts() -> None:
    q, k = torch.randn(4, 200, 64), torch.randn(2, 200, 64)
    one, two = (moments_of(q, k, cut=cut) for cut in (7, 128))
    torch.testing.assert_close(one.query_square, two.query_square, rtol=1e-5, atol=1e-4)
    assert (one.queries, one.keys) == (two.queries, two.keys) == (400, 200)
