"""Whatever the scheduler, the prefix cache and memory pressure do, a request reads the same pages
in the same forms. The laws are equalities over random histories; RUNS=5000 runs more of them.

Symbolic histories have pages of 4 tokens, so that every boundary is crossed often; histories of
tensors have pages of 64 in a real arena, behind the compressor's and the pool's own operations.
"""

from __future__ import annotations
import __future__

import functools
import inspect
import os
import random
import textwrap
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hs_kernels.block_format import BlockFormat
from hs_runtime import batching
from hs_runtime.attention import plan
from hs_runtime.compression import Compressor, compressor
from hs_runtime.compression import request_storage as storage
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.policies.pruner import MagnitudePruner
from hs_runtime.pool import block_pool
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool
from hs_runtime.scheduler import admission, lifecycle
from hs_runtime.scheduler.admission import BlockSizes, decode_form, prefill_form, prefill_need
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle
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
from tests.support.tiny_engine import Engine, Request

RUNS = int(os.environ.get("RUNS", 120))
F16 = BlockFormat(64, "float16")
SIZES = BlockSizes(F16.dense_bytes, F16.sparse_bytes, F16.superblock_bytes)

# Pages of 4 tokens, and tiles of two pages as in production.
SMALL = Lifecycle(page=4, sink=4, window=8, segment=16)
SMALL_TILE = 8
CHUNKS = [4, 8, 12, 16, 20, 36, 64, 200]


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
def small_answer(
    prompt: tuple[int, ...], chosen: SparsityPolicy, max_new: int, rules: Lifecycle = SMALL
) -> list[int]:
    return rules_say(rules, Hashes(), prompt, chosen, max_new)


def check_answers(requests: list[Request], say: Any) -> None:
    for r in requests:
        want = say(r)
        assert r.outputs == want[: len(r.outputs)], f"request {r.rid} ({r.policy}) differs"
        assert r.status == "aborted" or len(r.outputs) == len(want)


def need_of(rules: Lifecycle, sizes: BlockSizes, r: Request) -> int:
    return admission.request_need(rules, sizes, r.policy, r.n, r.max_new)


def run_history(
    e: Engine, requests: list[Request], rng: random.Random, chunks: list[int], eagerness: float
) -> None:
    """Requests arrive, are aborted and are retracted at random; everything is checked each step.
    Prefill comes before decode with the probability `eagerness`."""
    pending = list(requests)
    for _ in range(5000):
        if not pending and not e.busy:
            e.check_empty()
            return
        if pending and rng.random() < 0.4:
            assert e.submit(pending.pop(0))
        if rng.random() < 0.03 and e.busy:
            e.finish(rng.choice([s.owner for s in e.running] + e.waiting), "aborted")
        decoding = [s.owner for s in e.running if s.decoding]
        if rng.random() < 0.03 and decoding:
            e.retract(rng.choice(decoding))
        e.step(rng.choice(chunks), rng.random() < eagerness)
        e.check()
    raise AssertionError("livelock")


def small_history(seed: int) -> Counter[str]:
    """Every fourth history is crowded: long prompts that are prefilled in small pieces while others
    decode, in few bytes. Every fifth follows the paper's rule."""
    rng = random.Random(seed)
    crowded, by_chunk = seed % 4 == 0, seed % 5 == 0
    rules = Lifecycle(
        4, rng.choice([4, 4, 0, 8, 16]), rng.choice([8, 8, 4, 12, 20]), rng.choice([16, 16, 8, 24])
    )
    chunks = CHUNKS[:1] if crowded else CHUNKS
    if by_chunk:
        rules = replace(rules, segment=rng.choice([24, 32, 48]), chunk_anchor=True)
        chunks = [rules.segment, rules.segment + 8, 2 * rules.segment]
    count = rng.choice([1, 2, 3])
    policies = [some_policy(rng, fractions=not by_chunk) for _ in range(count)]
    base, requests = some_tokens(rng, 120), []
    for rid in range(rng.randint(2, 7)):
        n = rng.randint(30 if crowded else 1, 90)
        shared = rng.randint(0, n) if rng.random() < 0.7 else n
        prompt = base[:shared] + some_tokens(rng, n - shared)
        requests.append(Request(rid, prompt, rng.choice(policies), rng.randint(1, 20)))
    spare = [0, 1, 2] if crowded else [0, 0, 1, 2, 4, 20]
    e = small_engine(
        max(need_of(rules, SIZES, r) for r in requests) + rng.choice(spare),
        rng.choice([60, 80, 200, 1000]),
        rules,
        overlap=rng.random() < 0.5,
        growth=0.0 if crowded else rng.choice([0.0, 0.5, 1.0]),
        cached=rng.random() < 0.9,
    )
    run_history(e, requests, rng, chunks, 0.3 if crowded else 0.7)
    check_answers(requests, lambda r: rules_say(rules, Hashes(), r.prompt, r.policy, r.max_new))
    return e.counts + Counter(moves=e.pool.ledger.moves)


@pytest.mark.usefixtures("small_tiles")
def test_every_history_gives_the_outputs_of_the_rules() -> None:
    """Also: no leak, no slot in two uses, no forward without bytes, exact counts of sparse slots,
    kept promises, after every step. The counts say that the cases occurred."""
    total = sum((small_history(seed) for seed in range(RUNS)), Counter[str]())
    for case in ("hit", "retract", "replay", "evict", "convert", "group", "in_place", "private",
                 "twin", "moves", "aborted"):  # fmt: skip
        assert total[case] >= RUNS // 40, (case, total)


def tensor_engine(
    rules: Lifecycle, fmt: BlockFormat, blocks: int, pages: int = 200, **options: Any
) -> Engine:
    pool = BlockPool(fmt, layers=LAYERS, heads=HEADS, superblocks=blocks, pages=pages)
    device = TensorDevice(rules, plan.TILE, pool, Compressor(pool, MagnitudePruner()))
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
    blocks = max(need_of(rules, sizes, r) for r in requests) + rng.choice([0, 0, 1, 2])
    e = tensor_engine(
        rules,
        fmt,
        blocks,
        rng.choice([60, 80]),
        overlap=rng.random() < 0.5,
        growth=rng.choice([0.0, 0.5, 1.0]),
        cached=rng.random() < 0.8,
    )
    run_history(e, requests, rng, [64, 128, 192, 256, 320, 1000], 0.7)
    check_answers(requests, functools.partial(tensor_answer, rules))


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
        assert r.outputs == small_answer(tuple(prompt), chosen, 6), cut


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
        assert r.outputs == small_answer(tuple(r.prompt), chosen, 5)
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
        assert r.outputs == small_answer(tuple(prompt), chosen, 14)


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
        assert r.outputs == small_answer(tuple(prompt), r.policy, 12)


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
    assert second.outputs == small_answer(tuple(second.prompt), second.policy, 5)


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
    assert r.retractions == 0 and r.outputs == small_answer(tuple(r.prompt), chosen, new)


@pytest.mark.usefixtures("small_tiles")
def test_an_idle_engine_admits_what_fits_however_much_it_will_grow() -> None:
    """A transition that shrinks the prompt pays for growth that would not fit on top of it."""
    chosen = policy((0, 0), (1000, 1000))
    r = Request(0, some_tokens(random.Random(0), 160), chosen, 120)
    e = small_engine(need_of(SMALL, SIZES, r), growth=1.0)
    assert e.submit(r)
    e.drain(random.Random(0), CHUNKS)
    assert r.outputs == small_answer(tuple(r.prompt), chosen, 120)


def test_conversions_of_one_step_do_not_write_what_another_has_to_read() -> None:
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


def break_law(
    module: Any, target: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_name, _, attribute = target.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    code = textwrap.dedent(inspect.getsource(getattr(owner, attribute)))
    assert old in code, f"{target} reads differently now"
    code = code.replace(old, new)
    scope = dict(vars(module))
    flags = __future__.annotations.compiler_flag
    exec(compile(code, f"<{target}>", "exec", flags=flags, dont_inherit=True), scope)
    places = [owner] if owner_name else [lifecycle, admission, storage]
    for place in places:
        if hasattr(place, attribute):
            monkeypatch.setattr(place, attribute, scope[attribute])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", BROKEN)
def test_the_laws_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_law(*BROKEN[name], monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError, ValueError)):
        for seed in range(400):
            small_history(seed)


@pytest.mark.parametrize("name", BROKEN_ON_TENSORS)
def test_the_laws_of_tensors_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_law(*BROKEN_ON_TENSORS[name], monkeypatch)
    with pytest.raises(AssertionError):
        test_conversions_of_one_step_do_not_write_what_another_has_to_read()
        test_a_sparser_row_shares_the_slots_of_equal_rank_with_the_tree()
