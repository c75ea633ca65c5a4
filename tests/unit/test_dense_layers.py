"""Layers that stay dense: the setting and what does not change without it, their storage by page
id, and how bytes are divided between them and the others."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import load_pages
from hs_runtime.attention.plan import (
    ExtendRow,
    build_expanded_plans,
    build_extend_plan,
    build_plain_extend,
)
from hs_runtime.attention.unpacked import attend
from hs_runtime.capacity import KVShape, capacity
from hs_runtime.cli import app
from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.evaluation.arms import parse_arm
from hs_runtime.evaluation.presets import measured_presets, shipped_presets
from hs_runtime.policies.policy import PRESETS, ServerConstants, namespace, parse_layers
from hs_runtime.pool.block_pool import Bind, BlockPool, Drop, Share
from hs_runtime.pool.plain_layers import PlainLayers, slot_of
from hs_runtime.pool.pool_metrics import PoolMetrics
from hs_runtime.pool.sizing import PoolSize, dense_tokens_of, size_pool
from hs_runtime.scheduler.admission import (
    page_ids_need,
    private_pages,
    requests_at_once,
    requests_by_page_ids,
)
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.unit.test_capacity import H200, LLAMA_8B, RULES, SIZES
from tests.unit.test_pool_metrics import sample

GIB = 1 << 30
F16, F32 = BlockFormat(128, "float16"), BlockFormat(64, "float32")
CHOSEN = ServerConstants(dense_layers=(3, 7, 12))

# ---- the setting --------------------------------------------------------------------------------

# What the settings of servers were before this one existed. Files and caches are named by them.
CONSTANTS = (
    '{"anchor":"segment","calibration":"","chunk":32768,"page":64,"pruner":"magnitude",'
    '"segment":1024,"sink":64,"window":256}'
)
NAMESPACES = {
    "dense": "e11610bc1afc49aea77f066205987977dcf86e5f26a92f34a0f669c8c9b9a2d5",
    "light": "e11610bc1afc49aea77f066205987977dcf86e5f26a92f34a0f669c8c9b9a2d5",
    "balanced": "cdf81c505ff6a0fe5a98c4ae00fb2444d150f5516ba5e3bf648e3c44a80edef1",
    "max": "19b6bb7b4f32898daea008d8814b204e20b5b281c4da8db88bd58826cff6ed5e",
}


def test_without_dense_layers_json_and_digests_are_what_they_were() -> None:
    constants = ServerConstants()
    assert constants.to_json() == CONSTANTS
    assert json.loads(RuntimeConfig().to_json())["constants"] == json.loads(CONSTANTS)
    assert {name: namespace(PRESETS[name], constants) for name in NAMESPACES} == NAMESPACES
    assert json.loads(parse_arm("max", constants).to_json())["constants"] == json.loads(CONSTANTS)


def test_dense_layers_split_the_namespaces_of_sparse_prefill_alone() -> None:
    for name, before in NAMESPACES.items():
        same = PRESETS[name].prefill.is_dense
        assert (namespace(PRESETS[name], CHOSEN) == before) == same, name
    spaces = [
        namespace(PRESETS["max"], ServerConstants(dense_layers=layers))
        for layers in ((), (3,), (3, 7), (7,))
    ]
    assert len(set(spaces)) == 4


def test_dense_layers_travel_with_the_configuration() -> None:
    config = RuntimeConfig(constants=CHOSEN)
    assert json.loads(config.to_json())["constants"]["dense_layers"] == [3, 7, 12]
    assert RuntimeConfig.from_json(config.to_json()) == config
    assert CHOSEN.mixed_layers(14) == (0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 13)
    arm = parse_arm("max+dense_layers=7/3", ServerConstants())
    assert arm.constants == ServerConstants(dense_layers=(3, 7))
    assert arm.to_json() != parse_arm("max", ServerConstants()).to_json()


def test_what_was_measured_of_presets_was_measured_without_dense_layers() -> None:
    known = dict(shipped_presets()[0]["constants"])
    assert measured_presets(ServerConstants(**known)) is not None
    assert measured_presets(ServerConstants(**known, dense_layers=(3,))) is None


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("3,7", "a list of layer numbers"),
        (3, "a list of layer numbers"),
        ((3, -1), "from 0 on"),
        ((True,), "whole numbers"),
        ((0.5,), "whole numbers"),
        ((7, 3), "ascending"),
        ((3, 3), "once"),
    ],
)
def test_what_is_no_list_of_layers_is_refused(layers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConstants(dense_layers=layers)
    text = json.dumps({"constants": {"dense_layers": layers}})
    with pytest.raises(ConfigError, match=said):
        RuntimeConfig.from_json(text)


def test_layers_on_a_command_line() -> None:
    assert parse_layers("") == ()
    assert parse_layers("12, 3,7") == (3, 7, 12)
    for text in ("3;7", "3,,7", "-1", "a", "3,3"):
        with pytest.raises(ValueError, match="dense_layers="):
            parse_layers(text)
    with pytest.raises(ConfigError, match="dense_layers="):
        parse_arm("max+dense_layers=3-7", ServerConstants())


@pytest.mark.parametrize(
    ("layers", "said"),
    [((2, 4, 9), r"4, 9: the model has layers 0 to 3"), ((0, 1, 2, 3), "all layers of the model")],
)
def test_a_model_must_have_the_layers_and_others_besides(
    layers: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConstants(dense_layers=layers).mixed_layers(4)


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_commands_take_dense_layers_and_refuse_them_by_the_model(folder: Path) -> None:
    serve = ("serve", "--dry-run", "--device", "cpu", "--model", str(folder), "--dense-layers")
    code, printed = command(*serve, "7,3")
    shown = json.loads(printed[printed.index("{") :])
    assert code == 0 and shown["config"]["constants"]["dense_layers"] == [3, 7]
    doctor = ("doctor", "--capacity", "--device", "cpu", "--model", str(folder), "--dense-layers")
    measure = ("eval", "--output", str(folder / "out"), "--device", "cpu", "--model", str(folder))
    for words in (serve, doctor, (*measure, "--dense-layers")):
        for value, said in (("3,40", "0 to 31"), ("x", "choose layer numbers")):
            code, printed = command(*words, value)
            assert code == 2 and said in printed, printed
    code, printed = command(*measure, "--layers", "--dense-layers", "3")
    assert code == 2 and "one of the two" in printed


# ---- storage ------------------------------------------------------------------------------------


def plain(fmt: BlockFormat = F32, layers: int = 2, pages: int = 6) -> PlainLayers:
    return PlainLayers(fmt, layers=layers, heads=2, pages=pages)


def filled(storage: PlainLayers, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V [layers, pages * 64, heads, D] in all its pages, in order."""
    fmt, count = storage.format, storage.pages * 64
    rng = torch.Generator().manual_seed(seed)
    shape = (2, storage.layers, count, storage.heads, fmt.head_dim)
    k, v = torch.randn(shape, generator=rng).to(fmt.torch_dtype)
    for layer, arena in enumerate(storage.arena):
        own = (k[layer], v[layer])
        ops.store_tokens(*own, own[0], arena, storage.refs, torch.arange(64, 64 + count), fmt)
    return k, v


def content(storage: PlainLayers, layer: int, side: int, page: int) -> torch.Tensor:
    """[64, heads, D]"""
    refs = storage.refs[side, page : page + 1]
    loaded = load_pages(storage.arena[layer], refs, Side(side), storage.format)
    return loaded.transpose(0, 1).to(storage.format.torch_dtype)


@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
def test_every_page_has_a_place_of_its_own_and_the_dummy_is_zeros(fmt: BlockFormat) -> None:
    storage = plain(fmt)
    kv = filled(storage)
    for layer in range(storage.layers):
        for side in Side:
            for page in range(1, storage.pages + 1):
                rows = slice(64 * page - 64, 64 * page)
                assert torch.equal(content(storage, layer, side, page), kv[side][layer, rows])
            assert not content(storage, layer, side, 0).any()
    assert storage.page_bytes == 2 * 2 * 2 * fmt.dense_bytes
    assert sum(a.numel() for a in storage.arena) == (storage.pages + 1) * storage.page_bytes


def test_padding_writes_nothing_and_rows_of_no_length_read_nothing() -> None:
    storage = plain()
    filled(storage)
    before = [arena.clone() for arena in storage.arena]
    k = torch.full((3, 2, 64), 7.0)
    for arena in storage.arena:
        ops.store_tokens(k, k, k, arena, storage.refs, torch.zeros(3, dtype=torch.int64), F32)
    assert all(map(torch.equal, before, storage.arena))
    table, lengths = torch.zeros((3, 2), dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out, _ = ops.decode_attention(k, storage.arena[0], storage.refs, table, lengths, 1.0, F32)
    assert not out.any()


def test_new_page_ids_take_over_the_blocks_of_old_ones() -> None:
    """In order: page 5 takes over what page 4 has taken over from page 1, and page 1, freed, is
    given page 3's. Operations on slots are none of these layers' business."""
    storage = plain()
    kv = filled(storage)
    operations = [
        Share(1, 4),
        Bind(0, 2, 5),
        Share(4, 5),
        Drop(1),
        Share(3, 1),
        Share(2, 6),
    ]
    storage.apply(operations)
    stands_for = {1: 3, 2: 2, 3: 3, 4: 1, 5: 1, 6: 2}
    for layer in range(storage.layers):
        for side in Side:
            for page, old in stands_for.items():
                rows = slice(64 * old - 64, 64 * old)
                got = content(storage, layer, side, page)
                assert torch.equal(got, kv[side][layer, rows]), (layer, side, page)


def test_a_chunk_goes_to_the_pages_of_its_rows_and_its_tails_are_theirs() -> None:
    """Two rows: the first from the middle of a page on, whose tiles read two pages by refs."""
    rows = [
        ExtendRow(200, 300, (9, 4, 7, 2, 5), (2, 2), 2, ((50, 51), (60, 61)), ()),
        ExtendRow(0, 70, (3, 8), (0,), 0, ((), ()), ()),
    ]
    plan = build_extend_plan(rows, [], [], (True, True), 64, torch.device("cpu"), 2).prefill
    assert plan is not None
    found = build_plain_extend(plan, 64, torch.device("cpu"))
    pages = [2] * 56 + [5] * 44 + [3] * 64 + [8] * 6
    offsets = [*range(8, 64), *range(44), *range(64), *range(6)]
    assert found.locations.tolist() == [64 * p + o for p, o in zip(pages, offsets, strict=True)]
    assert found.attention.tail_slots.tolist() == [[[14, 4], [15, 5]], [[0, 0], [0, 0]]]
    assert found.attention.page_table is plan.attention.page_table
    assert [row.tail for row in found.rows] == [((14, 4), (15, 5)), ((), ())]
    assert slot_of(7, Side.K) == 14 and slot_of(2, Side.V) == 5


@pytest.mark.parametrize("frontiers", [(0, 0), (2, 2), (2, 4), (3, 5), (5, 5)], ids=str)
def test_queries_read_what_was_computed_wherever_frontiers_lie(frontiers: tuple[int, int]) -> None:
    """Also past the diagonal, as in chunks by the paper's rule; on the blocks as they lie, and
    unpacked. Against plain causal attention over all 300 tokens."""
    storage, pages, start, end = plain(layers=1, pages=9), (9, 4, 7, 2, 5), 200, 300
    k, v, q = torch.randn((3, end, 2, 64), generator=torch.Generator().manual_seed(1))
    (arena,), refs, scale = storage.arena, storage.refs, 0.125
    arena[storage.page_bytes :] = 0xFF  # what nobody wrote is NaN
    begun = range(frontiers[0], 4)
    nowhere = tuple(0 for _ in begun)
    row = ExtendRow(start, end, pages, frontiers, frontiers[0], (nowhere, nowhere), ())
    device = torch.device("cpu")
    plan = build_extend_plan([row], [], [], (True, True), 64, device, 2).prefill
    assert plan is not None
    found = build_plain_extend(plan, 64, device)
    position = torch.arange(start)
    before = torch.tensor(pages)[position // 64] * 64 + position % 64
    ops.store_tokens(k[:start], v[:start], q[:start], arena, refs, before, F32)
    own = [x[start:] for x in (q, k, v)]
    ops.store_tokens(own[1], own[2], own[0], arena, refs, found.locations, F32)
    lying, _ = ops.prefill_attention(
        *(*own, arena, refs, found.attention, scale, F32), sparse_k=False, sparse_v=False
    )
    (expanded,) = build_expanded_plans(found.rows, 2, 100, device)
    scratch = ops.expand_blocks(arena, expanded.sources(refs), F32)
    unpacked = attend(*own, scratch, expanded, scale, F32)
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=scale
    ).transpose(0, 1)
    for got in (lying, unpacked):
        assert torch.allclose(got, whole[start:], atol=1e-5)


def test_metrics_count_the_page_ids_of_dense_layers() -> None:
    class Held:
        def plain_bytes(self) -> tuple[int, int, int]:
            return 700, 200, 1000

    pool = BlockPool(F32, layers=1, heads=1, superblocks=2, pages=4)
    PoolMetrics(pool, Held())
    assert sample("kv_bytes", state="used") == 500
    assert sample("kv_bytes", state="evictable") == 200
    assert sample("kv_bytes", state="free") == pool.total_bytes + 300
    assert sample("kv_dense_equivalent_bytes") == 700


# ---- sizes --------------------------------------------------------------------------------------


def bytes_of(fmt: BlockFormat, superblocks: int, spare: int, layers: int, dense: int) -> int:
    """Two heads, block by block: what so many superblocks and their page ids take."""
    mixed = superblocks * fmt.superblock_bytes * (layers - dense)
    pages = superblocks * fmt.sparse_per_superblock // 2
    pages += min(spare, pages // 16)
    return 2 * (mixed + pages * 2 * fmt.dense_bytes * dense)


@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
@pytest.mark.parametrize("spare", [0, 5, 40, 10**6])
@pytest.mark.parametrize("dense", [1, 4, 7])
def test_as_many_superblocks_and_page_ids_as_the_bytes_hold(
    fmt: BlockFormat, spare: int, dense: int
) -> None:
    for kv_bytes in (7 * 10**7, 123_456_789, 10**9 + 7):
        sizes = {"layers": 8, "heads": 2, "dense_layers": dense, "spare_pages": spare}
        tokens = dense_tokens_of(fmt, kv_bytes, **sizes)
        chosen = tuple(range(dense))
        size = size_pool(fmt, tokens, spare_pages=spare, dense_layers=chosen)
        assert size.dense_layers == chosen
        sparse_pages = size.superblocks * fmt.sparse_per_superblock // 2
        assert size.pages == sparse_pages + min(spare, sparse_pages // 16)
        assert size.superblocks > 2
        assert bytes_of(fmt, size.superblocks, spare, 8, dense) <= kv_bytes
        # Whole dense pages are counted, so that half a page may cost a superblock.
        assert bytes_of(fmt, size.superblocks + 2, spare, 8, dense) > kv_bytes


def test_without_dense_layers_sizes_are_what_they_were() -> None:
    for kv_bytes in (10**7, 123_456_789):
        tokens = kv_bytes // (12 * F16.dense_bytes) * 64
        assert dense_tokens_of(F16, kv_bytes, layers=3, heads=2, spare_pages=99) == tokens
        assert size_pool(F16, tokens, spare_pages=9) == PoolSize(
            max(2, 2 * (tokens // 64) // 9), 16 * max(2, 2 * (tokens // 64) // 9) + 9
        )


def test_capacity_with_dense_layers_is_what_the_ledger_admits() -> None:
    """Of 32 layers 8: `max` gains less by it, and `dense` has less room than without."""
    shape, n = KVShape.of(LLAMA_8B, H200), 8 << 10
    constants = ServerConstants(dense_layers=(0, 7, 8, 14, 17, 18, 20, 23))
    without, found = (capacity(shape, 40 * GIB, each) for each in (ServerConstants(), constants))
    superblocks = 40 * GIB // (8 * (24 * F16.superblock_bytes + 8 * 17 * F16.dense_bytes))
    pages = superblocks * 8 * 17 // 16
    for name, policy in PRESETS.items():
        by_bytes = requests_at_once(RULES, SIZES, superblocks, policy, n, 256)
        by_pages = requests_by_page_ids(RULES, pages, policy, n, 256)
        assert found.requests[n][name] == min(by_bytes, by_pages) > 0, name
    assert found.kv_bytes <= 40 * GIB < found.kv_bytes * 1.001
    share = found.dense_tokens / without.dense_tokens
    assert share == pytest.approx(9 * 32 / (9 * 24 + 17 * 8), rel=1e-3)  # 0.818
    assert found.requests[n]["dense"] < found.requests[n]["max"] < without.requests[n]["max"]
    with pytest.raises(ConfigError, match="0 to 31"):
        capacity(shape, GIB, ServerConstants(dense_layers=(32,)))


def test_requests_take_page_ids_twice_only_if_their_rows_change_at_decode() -> None:
    rules = Lifecycle()
    for name, copied in (("dense", 0), ("light", 62), ("balanced", 0), ("fast", 48), ("max", 0)):
        assert private_pages(rules, PRESETS[name], 4000) == copied, name
        assert page_ids_need(rules, PRESETS[name], 4000, 100) == 65 + 1 + copied
    needs = [page_ids_need(rules, PRESETS["fast"], n, 1) for n in range(1, 6000, 7)]
    assert all(a <= b for a, b in pairwise(needs))
    changed = replace(rules, segment=512)
    assert private_pages(changed, PRESETS["fast"], 4000) == 56
