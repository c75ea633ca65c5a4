"""The prefix cache on SGLang's tree: segments, pages, twins, locks, eviction, namespaces; and
histories through the real adder, allocator and retraction.

Imports SGLang (some ten seconds) and starts nothing of it. RUNS=1000 runs more histories.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from hs_runtime import batching
from hs_runtime.attention import plan
from hs_runtime.policies import PRESETS
from hs_runtime.pool.block_pool import DENSE, SPARSE
from hs_runtime.scheduler.admission import page_ids_need
from tests.support.breaking import break_law
from tests.support.contents import policy, some_tokens
from tests.support.devices import SymbolicDevice
from tests.support.histories import (
    F16,
    SMALL_TILE,
    check_answers,
    run_history,
    small_answer,
    small_history,
)

pytestmark = pytest.mark.integration

RUNS = int(os.environ.get("RUNS", 30))
SPARSE_V = PRESETS["balanced"]


@pytest.fixture(scope="module")
def radix() -> ModuleType:
    from tests.support import radix_engine

    return radix_engine


NEVER = 1 << 61  # no state is divisible by it


class Served:
    """A tree of segments of 128 tokens and a window of 64, and requests by prompt and policy, which
    generate all their tokens."""

    def __init__(self, radix: ModuleType, superblocks: int = 40, **options: Any) -> None:
        self.radix = radix
        self.tree = radix.build_tree(F16, superblocks, 200, **options)
        device = SymbolicDevice(self.tree.rules, plan.TILE, self.tree.block_pool)
        self.failing = False
        self.engine = radix.RadixEngine(self.tree, device, stop=NEVER, fails=lambda: self.failing)
        self.count = 0

    def start(self, prompt: list[int], chosen: Any, max_new: int = 1, **options: Any) -> Any:
        """Submits and prefills all of it."""
        request = self.radix.SchedulerRequest(self.count, prompt, chosen, max_new, **options)
        self.count += 1
        assert self.engine.submit(request)
        while request.status == "waiting" or (request.state and not request.state.decoding):
            self.engine.step(4096)
            self.engine.check()
        return request

    def serve(self, prompt: list[int], chosen: Any, max_new: int = 1, **options: Any) -> Any:
        """Until it has finished."""
        request = self.start(prompt, chosen, max_new, **options)
        self.finish(request)
        return request

    def finish(self, *requests: Any) -> None:
        """Steps until these have finished, and compares their answers with the rules'."""
        while any(request.state for request in requests):
            self.engine.step(4096)
            self.engine.check()
        check_answers(list(requests), small_answer(self.tree.rules, NEVER))

    def nodes(self) -> list[tuple[int, int, int]]:
        """(first page, pages, locks) of every node."""
        found = self.radix.nodes_of(self.tree)
        return sorted((first, len(n.key) // 64, n.lock_ref) for n, first in found)


def tokens(n: int, seed: int = 0) -> list[int]:
    return some_tokens(random.Random(seed), n)


def other(prompt: list[int], shared: int) -> list[int]:
    """Differs from `prompt` right after the first `shared` tokens."""
    return prompt[:shared] + [(t + 1) % 3 for t in prompt[shared:]]


# ---- granularity --------------------------------------------------------------------------------


def test_sparse_namespaces_match_split_and_insert_in_whole_segments(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    assert served.serve(prompt, SPARSE_V).hit == 0
    assert served.nodes() == [(0, 8, 0)], "window pages stay out: (600 - 64) // 128 segments"
    assert served.serve(other(prompt, 330), SPARSE_V).hit == 256
    assert served.nodes() == [(0, 4, 0), (4, 4, 0), (4, 4, 0)]
    assert served.serve(prompt, SPARSE_V).hit == 512
    served.engine.check_empty()


def test_the_dense_namespace_matches_splits_and_inserts_pages(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    served.serve(prompt, PRESETS["dense"])
    assert served.nodes() == [(0, 9, 0)]
    assert served.serve(other(prompt, 330), PRESETS["dense"]).hit == 320
    assert served.nodes() == [(0, 5, 0), (5, 4, 0), (5, 4, 0)]
    assert served.serve(prompt[:576], PRESETS["dense"]).hit == 512, "one token is left to compute"
    served.engine.check_empty()


def test_a_prompt_within_its_window_inserts_and_hits_nothing(radix: ModuleType) -> None:
    served = Served(radix)
    for n in (63, 128, 191):
        assert served.serve(tokens(n), SPARSE_V).hit == 0
        assert served.serve(tokens(n), SPARSE_V).hit == 0
    assert served.nodes() == []
    served.serve(tokens(192), SPARSE_V)
    assert served.nodes() == [(0, 2, 0)]


def test_generated_tokens_are_kept_by_the_dense_policy_alone(radix: ModuleType) -> None:
    """180 tokens and 60 more, of which the last has no KV yet."""
    for chosen, pages in ((PRESETS["dense"], 3), (PRESETS["light"], 2)):
        served = Served(radix)
        request = served.serve(tokens(180), chosen, max_new=60)
        assert len(request.outputs) == 60
        assert sum(count for _, count, _ in served.nodes()) == pages
        follow_up = served.serve(request.known, PRESETS["light"])
        assert follow_up.hit == 64 * pages


# ---- namespaces ---------------------------------------------------------------------------------


def test_a_prefix_is_shared_by_policies_of_equal_prefill_alone(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    served.serve(prompt, PRESETS["dense"])
    assert served.serve(prompt, PRESETS["light"]).hit == 576
    assert served.serve(prompt, SPARSE_V).hit == 0
    assert served.serve(prompt, PRESETS["fast"]).hit == 512, "balanced prefills as fast does"
    assert served.serve(prompt, policy((500, 1000), (500, 1000))).hit == 0
    served.engine.check_empty()


def test_a_client_s_key_separates_and_never_imitates_a_namespace(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    first = served.serve(prompt, SPARSE_V, extra_key="salt")
    assert served.serve(prompt, SPARSE_V).hit == 0
    assert served.serve(prompt, SPARSE_V, extra_key="salt").hit == 512
    dense = served.start(prompt, PRESETS["dense"]).extra_key
    forged = served.serve(prompt, SPARSE_V, extra_key=dense)
    assert forged.hit == 0 and forged.extra_key.endswith(first.extra_key[-64:])
    key = radix.RadixKey(forged.full_untruncated_fill_ids, forged.extra_key)
    assert served.tree.unit_of(key) == 128


# ---- locks and twins ----------------------------------------------------------------------------


def test_a_running_request_locks_its_path_and_nothing_else(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    served.serve(prompt, SPARSE_V)
    running = served.start(other(prompt, 330), SPARSE_V, max_new=20)
    assert served.nodes() == [(0, 4, 1), (4, 4, 0), (4, 4, 1)]
    assert served.tree.evict_one() and not served.tree.evict_one()
    assert served.nodes() == [(0, 4, 1), (4, 4, 1)]
    third = served.start(prompt, SPARSE_V, max_new=20)
    assert third.hit == 256 and served.nodes() == [(0, 4, 2), (4, 4, 1), (4, 4, 1)]
    served.engine.finish(running, "aborted")
    assert served.nodes() == [(0, 4, 1), (4, 4, 0), (4, 4, 1)]
    served.finish(third)
    served.engine.check_empty()


def test_a_locked_node_that_is_split_stays_locked_on_both_sides(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    first = served.start(prompt, SPARSE_V, max_new=50)
    assert served.nodes() == [(0, 8, 1)]
    second = served.start(other(prompt, 300), SPARSE_V, max_new=50)
    assert served.nodes() == [(0, 4, 2), (4, 4, 1), (4, 4, 1)]
    assert not served.tree.evict_one()
    served.engine.finish(first, "aborted")
    assert served.nodes() == [(0, 4, 1), (4, 4, 0), (4, 4, 1)]
    served.finish(second)
    assert served.nodes() == [(0, 4, 0), (4, 4, 0), (4, 4, 0)]
    served.engine.check_empty()


def test_twins_of_one_batch_end_up_on_the_same_pages(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    twins = [radix.SchedulerRequest(rid, prompt, SPARSE_V, 20) for rid in range(2)]
    for request in twins:
        assert served.engine.submit(request)
    served.engine.step(4096)
    served.engine.check()
    first, second = (request.state for request in twins)
    assert first.protected == second.protected == 8
    assert first.pages[:8] == second.pages[:8] and not set(first.pages[8:]) & set(second.pages[8:])
    assert served.nodes() == [(0, 8, 2)]
    rows = [served.engine.rows[request.req_pool_idx, :512] for request in twins]
    assert bool((rows[0] == rows[1]).all()), "SGLang's rows follow"
    served.finish(*twins)
    served.engine.check_empty()


def test_private_pages_leave_the_tree_unlocked_and_as_it_was(radix: ModuleType) -> None:
    served = Served(radix)
    prompt = tokens(600)
    request = served.start(prompt, PRESETS["light"], max_new=30)
    before = list(request.state.pages)
    assert request.cache_protected_len == 576 and served.nodes() == [(0, 9, 1)]
    served.engine.step(4096)
    served.engine.check()
    state = request.state
    assert state.private and state.protected == request.cache_protected_len == 0
    assert request.last_node is served.tree.root_node and served.nodes() == [(0, 9, 0)]
    assert not set(before[:9]) & set(state.pages[:9])
    pool = served.tree.block_pool
    for p in range(9):
        k_cached, k_private = (pool.spans[row[p], 0].slots for row in (before, state.pages))
        v_cached, v_private = (pool.spans[row[p], 1].slots for row in (before, state.pages))
        assert k_cached[0] is k_private[0] and k_cached[0].references == 2
        converted = 1 <= p < 9 - 1  # after the sink, before the window of one page
        assert (v_cached[0] is not v_private[0]) == converted
        assert v_cached[0].kind == DENSE and (v_private[0].kind == SPARSE) == converted
    served.finish(request)
    assert served.serve(prompt, PRESETS["dense"]).hit == 576
    served.engine.check_empty()


# ---- eviction -----------------------------------------------------------------------------------


def test_leaves_are_evicted_least_recently_used_first_and_parents_after_them(
    radix: ModuleType,
) -> None:
    served = Served(radix)
    prompt = tokens(600)
    for each in (prompt, other(prompt, 300), tokens(300, seed=5)):
        served.serve(each, SPARSE_V)
    served.serve(prompt, SPARSE_V)  # touches the first path again
    held = [(first, node) for node, first in radix.nodes_of(served.tree)]
    assert sorted(first for first, _ in held) == [0, 0, 4, 4]
    order = []
    while served.tree.evict_one():
        left = {node for node, _ in radix.nodes_of(served.tree)}
        gone = [(first, node) for first, node in held if node not in left]
        order.append(gone[0])
        held = [(first, node) for first, node in held if node in left]
        served.engine.check()
    assert [first for first, _ in order] == [4, 0, 4, 0]
    assert list(order[2][1].key.token_ids) == prompt[256:512]
    assert order[3][1] is order[2][1].parent


def test_a_leaf_that_returns_bytes_goes_first(radix: ModuleType) -> None:
    """A page that a private row shares on both sides would return its id alone."""
    served = Served(radix)
    prompt, unrelated = tokens(300), tokens(300, seed=5)
    row = served.start(prompt, PRESETS["light"], max_new=60)
    served.engine.step(4096)
    assert row.state.private
    served.start(prompt[:200], PRESETS["dense"])  # splits before the page that the window covers
    served.start(unrelated, PRESETS["dense"])
    assert served.nodes() == [(0, 3, 0), (0, 4, 0), (3, 1, 0)]
    pool = served.tree.block_pool

    def evict() -> int:
        before = pool.used_bytes
        assert served.tree.evict_one()
        served.engine.check()
        return before - pool.used_bytes

    assert evict() == 8 * F16.dense_bytes, "the younger one, which returns all that it holds"
    assert served.nodes() == [(0, 3, 0), (3, 1, 0)]
    assert evict() == 0 and served.nodes() == [(0, 3, 0)], "it stands before parents that return"
    assert evict() == 2 * F16.dense_bytes, "V of two pages, whose sparse form the row holds"
    assert not served.tree.evict_one()
    served.finish(row)
    served.engine.check_empty()


def test_eviction_by_tokens_goes_on_until_they_are_there(radix: ModuleType) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    served = Served(radix)
    for seed in range(3):
        served.serve(tokens(330, seed), SPARSE_V)
    free = served.tree.free_page_count()
    result = served.tree.evict(EvictParams(num_tokens=257))
    assert result.num_tokens_evicted == 512, "whole leaves of 256 tokens"
    assert served.tree.free_page_count() == free + 8
    assert served.tree.evict(EvictParams(num_tokens=10**6)).num_tokens_evicted == 256
    assert not served.tree.evict_one()


def check_that_a_failed_batch_leaves_no_trace(radix: ModuleType) -> None:
    """Two prompts of one batch part inside what the first inserts, so that it is split; a third has
    been served before, and one is being served."""
    served = Served(radix)
    prompt = tokens(600)
    served.serve(prompt[:450], SPARSE_V)
    running = served.start(tokens(400, seed=5), SPARSE_V, max_new=30)
    before = served.nodes()
    lost = [
        radix.SchedulerRequest(served.count + i, each, SPARSE_V, 5)
        for i, each in enumerate((other(prompt, 130), other(prompt, 130)[:400] + tokens(200)))
    ]
    served.count += 2
    for request in lost:
        assert served.engine.submit(request)
    served.failing = True
    served.engine.step(4096)
    served.engine.check()
    served.failing = False
    assert [request.status for request in lost] == ["aborted", "aborted"]
    pages = sum(count for _, count, _ in before)
    assert sum(count for _, count, _ in served.nodes()) == pages, "only what was there"
    assert sum(locks > 0 for _, _, locks in served.nodes()) == 1
    for request in lost:
        assert served.serve(request.prompt, SPARSE_V).hit >= 128
    served.finish(running)
    served.engine.check_empty()


def test_a_failed_batch_leaves_no_trace(radix: ModuleType) -> None:
    check_that_a_failed_batch_leaves_no_trace(radix)


# ---- without a cache, and reports ---------------------------------------------------------------


def test_a_disabled_cache_matches_inserts_and_evicts_nothing(radix: ModuleType) -> None:
    served = Served(radix, disable=True)
    prompt = tokens(600)
    for chosen in (SPARSE_V, SPARSE_V, PRESETS["fast"], PRESETS["dense"], PRESETS["dense"]):
        assert served.serve(prompt, chosen, max_new=3).hit == 0
        assert served.nodes() == [] and not served.tree.evict_one()
        assert served.tree.free_page_count() == 200 and not served.tree.block_pool.spans


def test_a_finished_request_reports_its_blocks_and_bytes(radix: ModuleType) -> None:
    served = Served(radix, layers=3, heads=2)
    request = served.serve(tokens(600), PRESETS["fast"], max_new=3)
    *earlier, text = request.customized_info["hierasparse"]
    assert earlier == [None, None]
    got = json.loads(text)
    # 10 pages: at the end of the prompt V of the 7 between sink and window are sparse, and K of the
    # same after the transition.
    blocks = 3 * 2
    assert got["policy"] == PRESETS["fast"].to_json()
    assert (got["sparse_blocks"], got["dense_blocks"]) == (14 * blocks, 6 * blocks)
    assert got["prompt_sparse_blocks"] == 7 * blocks
    sizes = (F16.dense_bytes, F16.sparse_bytes)
    assert got["kv_bytes"] == blocks * (6 * sizes[0] + 14 * sizes[1])
    assert got["prompt_kv_bytes"] == blocks * (13 * sizes[0] + 7 * sizes[1])
    assert got["dense_equivalent_bytes"] == blocks * 20 * F16.dense_bytes


def test_new_tokens_are_capped_at_what_fits_and_a_prompt_that_never_fits_is_refused(
    radix: ModuleType,
) -> None:
    served = Served(radix, superblocks=4)
    storage, tree = served.tree.storage, served.tree
    request = radix.SchedulerRequest(0, tokens(600), SPARSE_V, 4000)
    tree.limit_new_tokens(request)
    capped = request.sampling_params.max_new_tokens
    assert request.hs_error is None and 1 <= capped < 4000
    assert not storage.never_fits(SPARSE_V, 600, capped)
    assert storage.never_fits(SPARSE_V, 600, capped + 1)

    longest = storage.longest_prompt(SPARSE_V)
    request = radix.SchedulerRequest(1, tokens(longest + 1), SPARSE_V, 10)
    tree.limit_new_tokens(request)
    assert request.hs_error is not None
    need, capacity = storage.need_bytes(SPARSE_V, longest + 1, 1), tree.block_pool.total_bytes
    for number in (longest + 1, need, capacity, longest):
        assert str(number) in request.hs_error

    small = radix.SchedulerRequest(2, tokens(100), SPARSE_V, 10)
    tree.limit_new_tokens(small)
    assert small.sampling_params.max_new_tokens == 10 and small.hs_error is None


def test_the_tree_wants_our_allocator(radix: ModuleType) -> None:
    tree = radix.build_tree(F16, 2, 8)
    params = radix.CacheInitParams(
        disable=False,
        req_to_token_pool=tree.req_to_token_pool,
        token_to_kv_pool_allocator=object(),
        page_size=64,
    )
    with pytest.raises(TypeError, match="HieraAllocator"):
        radix.HieraRadixCache(params, radix.CONSTANTS)


# ---- histories ----------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batching, plan):
        monkeypatch.setattr(module, "TILE", SMALL_TILE)


def run_radix_history(radix: ModuleType, seed: int, *, few_pages: bool = False) -> Counter[str]:
    """Without overlap some forwards fail: as in production, before anything else is planned. With
    `few_pages` a layer stays dense, and there are page ids for hardly more than one request."""
    rng = random.Random(seed)
    history = small_history(seed, rng, radix.SchedulerRequest)
    dense_layers: tuple[int, ...] = ()
    if few_pages:
        rules, dense_layers = history.rules, (1,)
        needs = (page_ids_need(rules, r.policy, r.n, r.max_new) for r in history.requests)
        history = replace(history, pages=max(needs) + rng.choice([0, 0, 1, 3, 8]))
    tree = radix.build_tree(
        F16,
        history.superblocks,
        history.pages,
        page=history.rules.page,
        rules=history.rules,
        disable=not history.cached,
        dense_layers=dense_layers,
    )
    device = SymbolicDevice(history.rules, SMALL_TILE, tree.block_pool)
    failing = not history.options["overlap"] and rng.random() < 0.5
    e = radix.RadixEngine(
        tree, device, fails=lambda: failing and rng.random() < 0.05, **history.options
    )
    run_history(e, history, rng)
    check_answers(history.requests, small_answer(history.rules))
    return e.counts


@pytest.mark.usefixtures("small_tiles")
def test_every_history_gives_the_outputs_of_the_rules(radix: ModuleType) -> None:
    total = sum((run_radix_history(radix, seed) for seed in range(RUNS)), Counter[str]())
    for case in ("hit", "retract", "replay", "convert", "group", "aborted", "failed"):
        assert total[case] >= RUNS // 10, (case, total)


@pytest.mark.usefixtures("small_tiles")
def test_few_page_ids_beside_dense_layers_slow_a_history_and_change_nothing(
    radix: ModuleType,
) -> None:
    histories = (run_radix_history(radix, seed, few_pages=True) for seed in range(RUNS))
    total = sum(histories, Counter[str]())
    for case in ("hit", "retract", "replay", "convert", "group", "aborted"):
        assert total[case] >= RUNS // 10, (case, total)


BROKEN = {
    "segments are cut at page granularity":
        ("HieraRadixCache.unit_of", "else self.rules.segment", "else self.rules.page"),
    "a split drops the locks of its upper part":
        ("HieraRadixCache._split_node", "child.lock_ref,", "0,"),
    "a node that is unlocked is not evictable":
        ("HieraRadixCache.dec_lock_ref", "self.block_pool.set_idle(self.pages_of(node), True)",
         "pass"),
    "a node that is locked stays evictable":
        ("HieraRadixCache.inc_lock_ref", "self.block_pool.set_idle(self.pages_of(node), False)",
         "pass"),
    "the pages of twins are lost":
        ("HieraRadixCache.insert_pages", "self.allocator.free_page_ids(duplicates)", "pass"),
    "the row keeps its twins":
        ("HieraRadixCache.insert_pages", "self.req_to_token_pool.write(", "tuple("),
    "private pages are not written into the row":
        ("HieraRadixCache.make_private", "self.req_to_token_pool.write(", "tuple("),
    "private pages leave the path locked":
        ("HieraRadixCache.make_private", "self.dec_lock_ref(req.last_node)", "pass"),
    "a retracted request hits what it generated":
        ("HieraRadixCache.match_prefix", "n = len(req.origin_input_ids)",
         "n = len(key) + self.rules.window"),
}  # fmt: skip


BROKEN_ADDER = {
    "an admitted request does not lock its hit":
        ("HieraPrefillAdder.add_one_req", "self._req_inc_lock_ref(req)", "pass"),
    "a replay does not ask for its bytes":
        ("HieraPrefillAdder.add_chunked_req", "if not self.storage.make_room([state]):",
         "if False:"),
}  # fmt: skip

BROKEN_BATCH = {
    "what a failed batch inserted stays in the tree":
        ("HieraRadixCache.withdraw_batch", "self._remove_leaf(leaf)", "pass"),
    "a split hides half of what a failed batch inserted":
        ("HieraRadixCache._split_node", "self._fresh.append(upper)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_BATCH)
def test_a_trace_of_a_failed_batch_is_noticed(
    name: str, radix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hs_runtime.pool import radix_cache

    break_law(monkeypatch, radix_cache, *BROKEN_BATCH[name])
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        check_that_a_failed_batch_leaves_no_trace(radix)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_ADDER])
def test_the_laws_notice(name: str, radix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from hs_runtime.pool import radix_cache
    from hs_runtime.scheduler import prefill_adder

    if name in BROKEN:
        break_law(monkeypatch, radix_cache, *BROKEN[name])
    else:
        break_law(monkeypatch, prefill_adder, *BROKEN_ADDER[name])
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError, TypeError)):
        for seed in range(400):
            run_radix_history(radix, seed)
