"""Whatever the scheduler, the prefix cache and memory pressure do, a request reads the same pages
in the same forms. The laws are equalities over random histories; RUNS=5000 runs more of them.

Symbolic histories have pages of 4 tokens, so that every boundary is crossed often; histories of
tensors have pages of 64 in a real arena, behind the compressor's and the pool's own operations.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from typing import Any

import pytest

from hs_kernels.block_format import BlockFormat
from hs_runtime import batching
from hs_runtime.attention import plan
from hs_runtime.compression import compressor
from hs_runtime.compression import request_storage as storage
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.pool import block_pool
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool
from hs_runtime.scheduler import admission, lifecycle
from hs_runtime.scheduler.admission import BlockSizes, decode_form, prefill_form, prefill_need
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle
from tests.support.breaking import break_law
from tests.support.contents import (
    HEADS,
    LAYERS,
    SHARES,
    VOCAB,
    Hashes,
    Vectors,
    mix,
    policy,
    rules_say,
    some_policy,
    some_tokens,
)
from tests.support.devices import SymbolicDevice, TensorDevice
from tests.support.histories import (
    CHUNKS,
    F16,
    SIZES,
    SMALL,
    SMALL_TILE,
    History,
    check_answers,
    need_of,
    run_history,
    small_answer,
    small_history,
)
from tests.support.key_checking import KeyChecking
from tests.support.tiny_engine import Engine, Request

RUNS = int(os.environ.get("RUNS", 120))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batching, plan):
        monkeypatch.setattr(module, "TILE", SMALL_TILE)


def small_engine(
    blocks: int = 200, pages: int = 2000, rules: Lifecycle = SMALL, **options: Any
) -> Engine:
    pool = BlockPool(F16, layers=1, heads=1, superblocks=blocks, pages=pages)
    return Engine(rules, pool, SymbolicDevice(rules, SMALL_TILE, pool), **options)


@functools.cache
def answer(
    prompt: tuple[int, ...], chosen: SparsityPolicy, max_new: int, rules: Lifecycle = SMALL
) -> list[int]:
    return rules_say(rules, Hashes(), prompt, chosen, max_new)


def run_small_history(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    history = small_history(seed, rng)
    e = small_engine(
        history.superblocks, history.pages, history.rules, cached=history.cached, **history.options
    )
    run_history(e, history, rng)
    check_answers(history.requests, small_answer(history.rules))
    return e.counts + Counter(moves=e.pool.ledger.moves)


@pytest.mark.usefixtures("small_tiles")
def test_every_history_gives_the_outputs_of_the_rules() -> None:
    """Also: no leak, no slot in two uses, no forward without bytes, exact counts of sparse slots,
    kept promises, after every step. The counts say that the cases occurred."""
    total = sum((run_small_history(seed) for seed in range(RUNS)), Counter[str]())
    for case in ("hit", "retract", "replay", "evict", "convert", "group", "in_place", "private",
                 "twin", "moves", "aborted"):  # fmt: skip
        assert total[case] >= RUNS // 40, (case, total)


def tensor_engine(
    rules: Lifecycle, fmt: BlockFormat, blocks: int, pages: int = 200, **options: Any
) -> Engine:
    pool = BlockPool(fmt, layers=LAYERS, heads=HEADS, superblocks=blocks, pages=pages)
    device = TensorDevice(rules, plan.TILE, pool, KeyChecking(pool))
    return Engine(rules, pool, device, stop=150, **options)


def tensor_answer(rules: Lifecycle, r: Request) -> list[int]:
    return rules_say(rules, Vectors(64, 64), r.prompt, r.policy, r.max_new, stop=150)


@pytest.mark.parametrize("seed", range(-(-RUNS // 20)))
def test_tensors_in_the_arena_follow_every_history(seed: int) -> None:
    rng = random.Random(seed)
    fmt = BlockFormat(64, rng.choice(["float16", "bfloat16", "float32"]))
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    rules = Lifecycle(64, 64, rng.choice([64, 128]), rng.choice([128, 256]))
    policies = [some_policy(rng) for _ in range(2)]
    base, requests = some_tokens(rng, 900), []
    for rid in range(rng.randint(2, 4)):
        n = rng.randint(1, 800)
        shared = rng.randint(0, n) if rng.random() < 0.7 else n
        prompt = base[:shared] + some_tokens(rng, n - shared)
        requests.append(Request(rid, prompt, rng.choice(policies), rng.randint(1, 150)))
    history = History(
        rules,
        requests,
        chunks=[64, 128, 192, 256, 320, 1000],
        eagerness=0.7,
        superblocks=max(need_of(rules, sizes, r) for r in requests) + rng.choice([0, 0, 1, 2]),
        pages=rng.choice([60, 80]),
        cached=rng.random() < 0.8,
        options={"overlap": rng.random() < 0.5, "growth": rng.choice([0.0, 0.5, 1.0])},
    )
    e = tensor_engine(
        rules, fmt, history.superblocks, history.pages, cached=history.cached, **history.options
    )
    run_history(e, history, rng)
    check_answers(requests, functools.partial(tensor_answer, rules))
    compressor = e.device.compressor
    assert compressor.checked or not compressor.chosen, "no key was looked at"
    assert not compressor.wrong, "V was pruned with the keys of other tokens"


# ---- single laws --------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(10))
def test_chunk_cuts_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    prompt, chosen = some_tokens(rng, rng.randint(1, 100)), some_policy(rng)
    for cut in CHUNKS:
        e = small_engine(overlap=cut % 8 == 0)
        r = Request(0, prompt, chosen, 6)
        assert e.submit(r)
        e.drain(rng, [cut])
        assert r.outputs == answer(tuple(prompt), chosen, 6), cut


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(10))
def test_a_warm_run_equals_a_cold_run(seed: int) -> None:
    """Also where the cached prompt differs inside a segment that both share in part."""
    rng = random.Random(seed)
    chosen, base = some_policy(rng), some_tokens(rng, 80)
    e = small_engine()
    for rid, shared in enumerate((80, 80, 41, 39, 60, 25)):
        r = Request(rid, base[:shared] + some_tokens(rng, 80 - shared), chosen, 5)
        assert e.submit(r)
        e.drain(rng, CHUNKS)
        assert r.outputs == answer(tuple(r.prompt), chosen, 5)
        assert e.counts["hit"] == rid, "every prompt but the first finds what came before"
    e.check_empty()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(10))
def test_a_retracted_request_continues_as_if_it_had_not_been(seed: int) -> None:
    rng = random.Random(seed)
    prompt, chosen = some_tokens(rng, rng.randint(20, 70)), some_policy(rng)
    for stop in range(1, 14, 3):
        e = small_engine(overlap=seed % 2 == 0)
        r = Request(0, prompt, chosen, 14)
        assert e.submit(r)
        while e.busy:
            if r.state and r.state.decoding and len(r.outputs) >= stop and not r.retractions:
                e.retract(r)
                while rng.random() < 0.5 and e.tree.evict_one():
                    pass
            e.step(rng.choice(CHUNKS))
            e.check()
        assert r.outputs == answer(tuple(prompt), chosen, 14)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(10))
def test_decode_settings_on_one_prefix_do_not_disturb_each_other(seed: int) -> None:
    rng = random.Random(seed)
    prefill, prompt = some_policy(rng).prefill, some_tokens(rng, 75)
    e = small_engine(overlap=seed % 2 == 0)
    shares = (prefill.key, prefill.value)
    requests = []
    for rid in range(4):
        decode = [rng.choice([s for s in SHARES if s >= low]) for low in shares]
        requests.append(Request(rid, prompt, policy(shares, (decode[0], decode[1])), 12))
        assert e.submit(requests[-1])
        for _ in range(rng.randint(0, 12)):
            e.step(16)
            e.check()
    e.drain(rng, CHUNKS)
    late = Request(9, prompt, policy(shares, shares), 12)
    assert e.submit(late)
    e.drain(rng, CHUNKS)
    assert late.hit == min(SMALL.reuse_limit(late.policy, 75), 72), "the tree is as it was"
    for r in [*requests, late]:
        assert r.outputs == answer(tuple(prompt), r.policy, 12)


def plain_attention(prompt: list[int], max_new: int) -> list[int]:
    """Everything is read dense."""
    tokens, outputs, content = list(prompt), [], Hashes()
    kv: dict[Any, list[int]] = {}
    page = SMALL.page
    for t in range(len(prompt) + max_new - 1):
        x = mix(3, tokens[t], t)
        for layer in range(LAYERS):
            reads = []
            for head in range(HEADS):
                for side in SIDES:
                    held = kv.setdefault((layer, side, head), [])
                    held.append(content.token(layer, side, head, x))
                    pages = [content.dense(held[i : i + page]) for i in range(0, len(held), page)]
                    reads += [mix(6, *pages[: t // page]), pages[t // page]]
            x = mix(5, x, *reads)
        if t >= len(prompt) - 1:
            outputs.append(x)
            if x % 29 == 0:
                break
            tokens.append(x % VOCAB)
    return outputs


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(10))
def test_the_dense_policy_is_plain_attention_and_reuses_generated_tokens(seed: int) -> None:
    rng = random.Random(seed)
    prompt, e = some_tokens(rng, rng.randint(1, 70)), small_engine()
    first = Request(0, prompt, PRESETS["dense"], 15)
    assert e.submit(first)
    e.drain(rng, CHUNKS)
    assert first.outputs == plain_attention(prompt, 15)
    second = Request(1, first.known, PRESETS["light"], 5)
    assert e.submit(second)
    e.drain(rng, CHUNKS)
    assert second.hit == (len(first.known) - 1) // SMALL.page * SMALL.page
    assert second.outputs == answer(tuple(second.prompt), second.policy, 5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(60))
def test_a_request_alone_fits_its_larger_form_and_one_superblock(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than `request_need`, by the segment being converted."""
    rng = random.Random(seed)
    chosen, n, new = some_policy(rng), rng.randint(1, 110), rng.randint(1, 40)
    forms = [decode_form(SMALL, chosen, t) for t in range(n, n + new + 1)]
    larger = max(SIZES.bytes_of(form) for form in [*forms, prefill_form(SMALL, chosen, n)])
    alone = -(-larger // SIZES.superblock_bytes) + 1
    bound = max(SIZES.superblocks(prefill_need(SMALL, chosen, n, 0)), alone)
    assert bound <= admission.request_need(SMALL, SIZES, chosen, n, new)
    monkeypatch.setattr(storage, "request_need", lambda *_: bound)
    e = small_engine(bound, 200, overlap=seed % 2 == 0, growth=1.0)
    r = Request(0, some_tokens(rng, n), chosen, new)
    assert e.submit(r)
    e.drain(rng, CHUNKS)
    assert r.retractions == 0 and r.outputs == answer(tuple(r.prompt), chosen, new)


def check_idle_admission() -> None:
    """A transition that shrinks the prompt pays for growth that would not fit on top of it."""
    chosen = policy((0, 0), (1000, 1000))
    r = Request(0, some_tokens(random.Random(0), 160), chosen, 120)
    e = small_engine(need_of(SMALL, SIZES, r), growth=1.0)
    assert e.submit(r)
    e.drain(random.Random(0), CHUNKS)
    assert r.outputs == answer(tuple(r.prompt), chosen, 120)


@pytest.mark.usefixtures("small_tiles")
def test_an_idle_engine_admits_what_fits_however_much_it_will_grow() -> None:
    check_idle_admission()


def check_conversions_of_one_step() -> None:
    """The first request's V gives whole superblocks to the second one's K, in the same step."""
    rules = Lifecycle(64, 64, 64, 128)
    e = tensor_engine(rules, F16, blocks=12, cached=False)
    rng = random.Random(1)
    requests = [
        Request(rid, some_tokens(rng, 1400), policy((0, 0), decode), 2)
        for rid, decode in enumerate([(500, 1000), (1000, 1000)])
    ]
    for r in requests:
        assert e.submit(r)
    e.drain(rng, [4000])
    check_answers(requests, functools.partial(tensor_answer, rules))


@pytest.mark.parametrize("pages_at_once", [1, 7, 512])
def test_conversions_of_one_step_do_not_write_what_another_has_to_read(
    pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressor, "PAGES_AT_ONCE", pages_at_once)
    check_conversions_of_one_step()


def test_a_sparser_row_shares_the_slots_of_equal_rank_with_the_tree() -> None:
    """Prefill makes two of four pages sparse, decode three: of four slots one is new."""
    rules = Lifecycle(64, 0, 64, 256)
    e = tensor_engine(rules, F16, blocks=20)
    rng = random.Random(3)
    prompt = some_tokens(rng, 700)
    first = Request(0, prompt, policy((500, 500), (750, 1000)), 3)
    assert e.submit(first)
    while first.state is None or first.state.position <= first.n:
        e.step(1000)
        e.check()
    assert first.state.private and e.tree.evictable_pages() == 8
    unlocked = [node for node in e.tree.nodes() if not node.locks]
    for node in unlocked:
        segment = 0 if node.parent in e.tree.roots.values() else 1
        row = first.state.pages[4 * segment : 4 * segment + 4]
        assert not set(row) & set(node.pages)
        for side, changed in ((0, [2]), (1, [2, 3])):
            cached = e.pool.spans[node.pages[0], side].slots
            private = e.pool.spans[row[0], side].slots
            assert [s.kind for s in cached] == [SPARSE, SPARSE, DENSE, DENSE]
            for rank in range(4):
                same = rank not in changed
                assert (cached[rank] is private[rank]) == same
                assert cached[rank].references == 1 + same
                assert same or private[rank].kind == SPARSE
    e.drain(rng, [1000])
    late = Request(1, prompt, policy((500, 500), (500, 500)), 3)
    assert e.submit(late)
    e.drain(rng, [1000])
    assert late.hit == 512
    check_answers([first, late], functools.partial(tensor_answer, rules))


# ---- the laws notice: each line breaks one decision and must fail --------------------------------

BROKEN = {
    "segments are cut at page granularity":
        (lifecycle, "Lifecycle.granularity", "else self.segment", "else self.page"),
    "window pages are inserted into the tree":
        (lifecycle, "Lifecycle.reuse_limit", "(n - self.window)", "n"),
    "the sparse count is rounded down":
        (lifecycle, "sparse_count", "-(-share * candidates // 1000)", "share * candidates // 1000"),
    "decode compresses a page that its window still covers":
        (lifecycle, "Lifecycle.window_page", "self.window //", "(self.window - 1) //"),
    "dense copies of window pages only":
        (lifecycle, "Lifecycle.kept_copies", "if whole else", "if False else"),
    "superblocks are not compacted":
        (block_pool, "Arena._compact", "if index is None:", "if True:"),
    "moved slots are not moved on the device":
        (block_pool, "Arena._compact", "self.on_move(kind, old, slot.index)", "pass"),
    "shared slots count as evictable":
        (block_pool, "BlockPool._count", "slot.idle and slot.references == 1", "slot.idle"),
    "sharing takes no reference":
        (block_pool, "BlockPool.share", "self.acquire(slot)", "pass"),
    "a completed segment's tail is not charged beside the next":
        (admission, "prefill_need", "form + unfinished + returned", "form + unfinished"),
    "pages are rewritten in the tree":
        (storage, "RequestStorage.needs_private_pages", "not state.private", "False"),
    "decode ignores what prefills were promised":
        (storage, "RequestStorage.step_fits", "self._used.plus(reserved)", "self._used"),
    "conversions are not asked for":
        (storage, "RequestStorage.step_fits", "in self._units(state):", "in ():"),
    "prefills take more than they were charged":
        (storage, "RequestStorage.allocate_chunk", "or p in kept", "or p in kept or p % 2"),
    "a segment's slots keep their old kind":
        (storage, "RequestStorage._change", "slot if slot.kind == kind else None", "slot"),
    "growth is reserved on an idle engine":
        (storage, "RequestStorage.admits", "if self.active:", "if True:"),
    "admission forgets the running prefills":
        (storage, "RequestStorage.admits", "self._used.plus(reserved)", "self._used"),
    "the window's copies do not become the pages' storage":
        (storage, "RequestStorage.end_of_prompt", "self.pool.unbind(page, side)", "continue"),
    "replays follow the prefill rule":
        (batching, "BatchPlanner._extend_row", "if not work.replay:", "if True:"),
    "slots are planned where they were before the step moved them":
        (storage, "RequestStorage.allocate_chunk", "writes.append((p, side, slot))",
         "writes.append((p, side, __import__('copy').copy(slot)))"),
}  # fmt: skip


BROKEN_ON_TENSORS = {
    "conversions are written as they are read":
        (compressor, "Compressor.convert", "next(step)\n", "list(step)\n"),
    "sparse pages change ranks when others join them":
        (compressor, "Compressor._convert_segment", "sparse, old_rank", "sparse, -old_rank"),
}  # fmt: skip


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", BROKEN)
def test_the_laws_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_law(monkeypatch, *BROKEN[name], importers=(admission, storage))
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError, ValueError)):
        check_idle_admission()
        for seed in range(400):
            run_small_history(seed)


@pytest.mark.parametrize("name", BROKEN_ON_TENSORS)
def test_the_laws_of_tensors_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_law(monkeypatch, *BROKEN_ON_TENSORS[name])
    with pytest.raises(AssertionError):
        check_conversions_of_one_step()
        test_a_sparser_row_shares_the_slots_of_equal_rank_with_the_tree()
