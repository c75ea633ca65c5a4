"""SGLang's radix tree with the granularity, hits and insertions of the segment rule.

In namespaces with sparse prefill keys are matched, split, inserted and evicted in whole segments,
so that a segment's pages always come from one computation. Values stay on the CPU: they are page
ids, and the scheduler is their only reader.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
    NewTokenRatioTracker,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from hs_runtime.batching import BatchPlanner, seq_lens_agree
from hs_runtime.compression import RequestState, RequestStorage
from hs_runtime.policies.policy import DENSE, ServerConstants, namespace
from hs_runtime.pool.allocator import HieraAllocator
from hs_runtime.pool.pool_metrics import PoolMetrics
from hs_runtime.scheduler.lifecycle import Lifecycle
from hs_runtime.scheduler.rank_check import RankCheck, gather_over
from hs_runtime.scheduler.request_slots import namespace_digest, policy_of, report, state_of


class HieraRadixCache(RadixCache):
    """Prefix cache, and owner of the `RequestStorage` that it shares page ids with."""

    def __init__(
        self,
        params: CacheInitParams,
        constants: ServerConstants,
        *,
        check: bool = True,
        check_always: bool = False,
        check_ranks: bool = False,
        ranks: int = 1,
    ) -> None:
        allocator = params.token_to_kv_pool_allocator
        if not isinstance(allocator, HieraAllocator):
            raise TypeError(
                f"HieraRadixCache needs a HieraAllocator, got {type(allocator).__name__}"
            )
        self.allocator, self.block_pool = allocator, allocator.block_pool
        self.plain = allocator.get_kvcache().plain
        self.ranks = ranks
        self.rules = Lifecycle.of(constants)
        self.dense_namespace = namespace(DENSE, constants)
        self.storage: RequestStorage | None = None
        super().__init__(params)
        self.storage = RequestStorage(
            self.rules,
            self.block_pool,
            self,
            page_bytes=self.plain.page_bytes if self.plain else 0,
        )
        self.planner = BatchPlanner(
            self.storage,
            lambda state, limit: self.insert_pages(
                state.owner, state.owner.full_untruncated_fill_ids, limit
            ),
        )
        self.retracted_replays: list[Any] = []
        self._fresh: list[TreeNode] = []  # made when the last batch was planned
        self._check, self._check_always, self._checked = check, check_always, False
        self._metrics = PoolMetrics(self.block_pool, self) if params.enable_metrics else None
        self._rank_check = None
        if check_ranks and ranks > 1:
            if params.tp_cache_group is None:
                raise ValueError(f"check_ranks: {ranks} ranks and no group to compare them over")
            self._rank_check = RankCheck(gather_over(params.tp_cache_group))

    def reset(self) -> None:
        super().reset()
        self._empty_value = torch.empty(0, dtype=torch.int64)
        if self.storage is not None:
            self.storage.clear()

    # granularity

    def unit_of(self, key: RadixKey) -> int:
        """Tokens that stay together in the key's namespace."""
        dense = namespace_digest(key.extra_key) in ("", self.dense_namespace)
        return self.rules.page if dense else self.rules.segment

    def pages_of(self, node: TreeNode) -> list[int]:
        pages: list[int] = (node.value[:: self.page_size] // self.page_size).tolist()
        return pages

    # match

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, req = params.key, params.req
        if self.disable or not len(key):
            if req is not None:
                req.hs_hit_pages = []
            return self._empty_match_result
        limit = len(key)
        if req is not None:
            n = len(req.origin_input_ids)  # also of a retracted request: the rules count from n
            limit = min(limit, n - 1, self.rules.reuse_limit(policy_of(req), n))
        unit = self.unit_of(key)
        key = key[: max(0, limit) // unit * unit]
        values, node = self._match_prefix_helper(self.root_node, key)
        value = torch.cat(values) if values else self._empty_value
        if req is not None:
            req.hs_hit_pages = (value[:: self.page_size] // self.page_size).tolist()
        return MatchResult(
            device_indices=value.to(self.device, non_blocking=True),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def _match_prefix_helper(self, node: TreeNode, key: RadixKey) -> tuple[list[Any], TreeNode]:
        node.last_access_time = now = time.monotonic()
        unit, values = self.unit_of(key), []
        while len(key):
            child = node.children.get(key.child_key(unit))
            if child is None:
                break
            child.last_access_time = now
            shared = child.key.match(key, page_size=unit)
            if shared < len(child.key):
                node = self._split_node(child.key, child, shared)
                values.append(node.value)
                break
            values.append(child.value)
            node, key = child, key[shared:]
        return values, node

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """The upper part [0, split_len) of a node becomes its own node, with the same locks."""
        unit = self.unit_of(key)
        upper = TreeNode(priority=child.priority)
        upper.hit_count, upper.lock_ref, upper.parent = (
            child.hit_count,
            child.lock_ref,
            child.parent,
        )
        upper.last_access_time = child.last_access_time
        upper.key, upper.value = child.key[:split_len], child.value[:split_len].clone()
        child.key, child.value = child.key[split_len:], child.value[split_len:].clone()
        child.parent = upper
        upper.children = {child.key.child_key(unit): child}
        upper.parent.children[upper.key.child_key(unit)] = upper
        if child in self._fresh:
            self._fresh.append(upper)
        return upper

    # insert

    def _insert_helper(
        self,
        node: TreeNode,
        key: RadixKey,
        value: torch.Tensor,
        priority: int = 0,
        chunked: bool = False,
    ) -> tuple[int, TreeNode]:
        priority, now, unit, known = priority or 0, time.monotonic(), self.unit_of(key), 0
        node.last_access_time = now
        while len(key):
            child = node.children.get(key.child_key(unit))
            if child is None:
                break
            shared = child.key.match(key, page_size=unit)
            if shared < len(child.key):
                child = self._split_node(child.key, child, shared)
            child.last_access_time, child.priority = now, max(child.priority, priority)
            self._inc_hit_count(child, chunked)
            node, key, value, known = child, key[shared:], value[shared:], known + shared
        if len(key):
            leaf = TreeNode(priority=priority)
            leaf.parent, leaf.key, leaf.value = node, key, value.clone()
            node.children[key.child_key(unit)] = leaf
            self._inc_hit_count(leaf, chunked)
            self.evictable_size_ += len(key)
            self.block_pool.set_idle(self.pages_of(leaf), True)
            self._update_leaf_status(node)
            self._update_leaf_status(leaf)
            self._fresh.append(leaf)
            node = leaf
        return known, node

    def insert_pages(self, req: Any, tokens: array, limit: int) -> None:
        """Hands the row's pages before `limit` tokens to the tree; where the tree has them already,
        its pages replace the request's."""
        state = state_of(req)
        if self.disable or state.private or limit // self.page_size <= state.protected:
            return
        key = RadixKey(tokens[:limit], req.extra_key)
        value = self.allocator.token_slots(state.pages[: limit // self.page_size])
        priority = getattr(req, "priority", 0) or 0
        known, _ = self._insert_helper(self.root_node, key, value, priority)
        values, node = self._match_prefix_helper(self.root_node, key)
        twins = slice(state.protected, max(state.protected, known // self.page_size))
        if twins.start < twins.stop:
            duplicates = state.pages[twins]
            merged = torch.cat(values)
            state.pages[twins] = (merged[:: self.page_size] // self.page_size)[twins].tolist()
            tokens_of = slice(twins.start * self.page_size, twins.stop * self.page_size)
            self.req_to_token_pool.write(
                (req.req_pool_idx, tokens_of),
                merged[tokens_of].to(self.device, torch.int32, non_blocking=True),
            )
            self.allocator.free_page_ids(duplicates)
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        req.last_node, req.cache_protected_len = node, limit
        state.protected = limit // self.page_size

    # locks and eviction

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        if self.disable:
            return IncLockRefResult(delta=0)
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 0:
                self.evictable_size_ -= len(node.key)
                self.protected_size_ += len(node.key)
                delta -= len(node.key)
                self.block_pool.set_idle(self.pages_of(node), False)
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> DecLockRefResult:
        if self.disable:
            return DecLockRefResult(delta=0)
        delta = 0
        while node is not self.root_node:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size_ += len(node.key)
                self.protected_size_ -= len(node.key)
                delta += len(node.key)
                self.block_pool.set_idle(self.pages_of(node), True)
            self._update_leaf_status(node)
            node = node.parent
        return DecLockRefResult(delta=delta)

    def _returns_bytes(self, node: TreeNode) -> bool:
        spans = (
            self.block_pool.spans[page, side] for page in self.pages_of(node) for side in (0, 1)
        )
        return any(slot.references == 1 for span in spans for slot in span.slots)

    def evict_one(self) -> bool:
        """Evicts the unlocked leaf of least priority, one that returns bytes if any does."""
        if self.disable or not self.evictable_leaves:
            return False
        ranked = sorted(self.evictable_leaves, key=self.eviction_strategy.get_priority)
        leaf = next((node for node in ranked if self._returns_bytes(node)), ranked[0])
        before = self.block_pool.used_bytes + self.plain_bytes()[0]
        self._remove_leaf(leaf)
        if self._metrics is not None:
            after = self.block_pool.used_bytes + self.plain_bytes()[0]
            self._metrics.evicted(before - after)
        return True

    def _remove_leaf(self, leaf: TreeNode) -> None:
        pages = self.pages_of(leaf)
        self.block_pool.set_idle(pages, False)
        self.allocator.free_page_ids(pages)
        self._delete_leaf(leaf)
        self._record_remove_event(leaf)

    def withdraw_batch(self) -> None:
        """Removes what planning the last batch put into the tree, because it was not computed. Its
        requests must have been released."""
        while leaves := [node for node in self._fresh if not node.children]:
            for leaf in leaves:
                self._fresh.remove(leaf)
                if leaf.parent.children.get(leaf.key.child_key(self.unit_of(leaf.key))) is leaf:
                    self._remove_leaf(leaf)
        if self._fresh or self.storage is None:
            raise RuntimeError(f"{len(self._fresh)} nodes that were not computed stay in the tree")
        if self._metrics is not None:
            self._metrics.compression_failed()
        if self._check:
            self.check_integrity()

    def evict(self, params: EvictParams) -> EvictResult:
        start, before = time.perf_counter(), self.allocator.available_size()
        while self.allocator.available_size() - before < params.num_tokens and self.evict_one():
            pass
        evicted = self.allocator.available_size() - before
        self.update_eviction_metrics(evicted, start)
        return EvictResult(num_tokens_evicted=evicted)

    def _delete_leaf(self, node: TreeNode) -> None:
        child = node.parent.children.pop(node.key.child_key(self.unit_of(node.key)), None)
        if child is not node:
            raise RuntimeError(f"the parent of a leaf of {len(node.key)} tokens does not know it")
        self.evictable_size_ -= len(node.key)
        self.evictable_leaves.discard(node)
        self._update_leaf_status(node.parent)

    # bytes of the layers that stay dense: a page id holds them from when it is taken

    def plain_bytes(self) -> tuple[int, int, int]:
        """In use, of these in unlocked nodes, and of all page ids; zeros without such layers."""
        if self.plain is None:
            return 0, 0, 0
        pages = self.plain.pages
        counts = (pages - self.free_page_count(), self.evictable_pages(), pages)
        used, evictable, total = (count * self.plain.page_bytes for count in counts)
        return used, evictable, total

    # what storage needs (`PrefixCache`)

    def evictable_pages(self) -> int:
        return self.evictable_size_ // self.page_size

    def free_page_count(self) -> int:
        return self.allocator.available_size() // self.page_size

    def make_private(self, state: RequestState) -> list[int]:
        req, pages = state.owner, self.allocator.take_pages(state.protected)
        if pages:
            tokens = self.allocator.token_slots(pages).to(torch.int32)
            tokens = tokens.to(self.device, non_blocking=True)
            self.req_to_token_pool.write((req.req_pool_idx, slice(0, len(tokens))), tokens)
            # SGLang writes these into the row again when it prepares a replay's extend.
            later = req.prefix_indices[len(tokens) :]
            req.prefix_indices = torch.cat([tokens.to(later.device, torch.int64), later])
        self.dec_lock_ref(req.last_node)
        req.last_node, req.cache_protected_len = self.root_node, 0
        return pages

    # batches: SGLang's hooks call these around its own preparation of a batch

    def _offer(self, phase: str, plan: Any, started: float) -> None:
        assert self.storage is not None
        self._checked = False
        if self._check_always:
            self.check_integrity()
        if self._rank_check is not None:
            self._rank_check.compare(self.counters(), plan.operations)
        if self._metrics is not None:
            self._metrics.planned(phase, time.perf_counter() - started)
            self._metrics.publish(self.storage.formed)
        self.allocator.get_kvcache().offer_plan(plan)

    def counters(self) -> dict[str, Any]:
        """What every rank must count alike: pages, slots, superblocks and requests."""
        assert self.storage is not None
        pool, storage = self.block_pool, self.storage
        return {
            "used": sorted(pool.ledger.used.items()),
            "moves": pool.ledger.moves,
            "evictable": sorted(pool.evictable.items()),
            "free_pages": self.free_page_count(),
            "cached_pages": self.evictable_pages(),
            "compressed": storage.compressed_blocks,
            "retractions": storage.retractions,
            "requests": [(each.rid, each.position, each.pages) for each in storage.active.values()],
        }

    def plan_extend(self, batch: Any) -> None:
        started = time.perf_counter()
        self._fresh.clear()
        taken = self.allocator.last_new_pages
        rows = zip(batch.reqs, taken, strict=True)
        chunks = [(state_of(req), req.extend_range.end, pages) for req, pages in rows]
        self._offer("prefill", self.planner.plan_extend(chunks), started)

    def convert_due(self, batch: Any) -> None:
        self.planner.convert_due([state_of(req) for req in batch.reqs])

    def plan_decode(self, batch: Any) -> None:
        started = time.perf_counter()
        self._fresh.clear()
        states = [state_of(req) for req in batch.reqs]
        steps = list(zip(states, self.allocator.last_new_pages, strict=True))
        self._offer("decode", self.planner.plan_decode(steps), started)
        if not seq_lens_agree(states, batch.seq_lens_cpu.tolist()):
            raise RuntimeError(
                f"lengths differ: SGLang {batch.seq_lens_cpu.tolist()}, "
                f"storage {[state.position for state in states]}"
            )

    def step_fits(self, reqs: Sequence[Any]) -> bool:
        """Makes room for the next decode step of these requests; False if there is none."""
        assert self.storage is not None
        return self.storage.make_room([state_of(req) for req in reqs])

    def retract_decode(self, batch: Any, server_args: Any) -> tuple[list[Any], float, list[Any]]:
        """Retracts until the next step fits: least preferred first, even the last of the batch when
        other requests hold the bytes."""
        assert self.storage is not None
        order = batch._get_decode_retraction_order(batch.reqs, server_args)
        retracted: list[Any] = []

        def fits() -> bool:
            return self.step_fits([batch.reqs[i] for i in order])

        while order and (not retracted or not fits()):
            if len(order) == 1 and (len(self.storage.active) == 1 or fits()):
                break
            index = order.pop()
            retracted.append(batch.reqs[index])
            batch.release_req(index, len(order), server_args)
            self.note_retraction(batch.reqs[index])
        aborted: list[Any] = []
        if order and not fits():
            raise RuntimeError(
                f"request {batch.reqs[order[0]].rid} does not fit alone: its need was miscounted"
            )
        batch.filter_batch(keep_indices=order)
        ratio = 1.0
        if batch.reqs:
            ratio = NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs)
        return retracted, ratio, aborted

    def note_retraction(self, req: Any) -> None:
        assert self.storage is not None
        self.storage.note_retraction()
        if self._metrics is not None:
            self._metrics.retracted(policy_of(req).preset)

    def limit_new_tokens(self, req: Any) -> None:
        """Caps max_new_tokens at what the arena can hold; refuses a prompt that can never fit."""
        assert self.storage is not None
        policy, n, params = policy_of(req), len(req.origin_input_ids), req.sampling_params
        if not self.storage.never_fits(policy, n, params.max_new_tokens):
            return
        if self.storage.never_fits(policy, n, 1):
            need, capacity = self.storage.need_bytes(policy, n, 1), self.storage.total_bytes
            req.hs_error = (
                f"a prompt of {n} tokens under this policy needs {need} bytes of KV cache and "
                f"{capacity} bytes exist, which hold {self.storage.longest_prompt(policy)} tokens"
            )
            return
        low, high = 1, params.max_new_tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = not self.storage.never_fits(policy, n, middle)
            low, high = (middle, high) if fits else (low, middle)
        params.max_new_tokens = low
        params.min_new_tokens = min(params.min_new_tokens, low)

    def check_idle(self) -> None:
        """At idle: nothing is active, and every law of the pool holds."""
        assert self.storage is not None
        if self._checked:
            return
        self._checked = True  # idle comes round and round; the next batch makes it due again
        if self._metrics is not None:
            self._metrics.publish(self.storage.formed)
        if not self._check:
            return
        assert not self.storage.active, f"idle, but active: {list(self.storage.active)}"
        self.check_integrity()

    # SGLang's checkpoints: the tree was updated when the batch was planned

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """The next chunk starts after the pages that the row holds by now."""
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.extend_range.end]
        req.prefix_indices = row.to(torch.int64, copy=True)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        assert self.storage is not None
        state = state_of(req)
        if is_insert and req.finished():  # not in the middle of its prompt
            report(req, self.describe(state, state.n + max(0, len(req.output_ids) - 1)))
        if is_insert and state.policy.is_dense and req.output_ids:
            tokens = req.origin_input_ids + req.output_ids
            # the last token's own KV may never have been computed
            limit = (len(tokens) - 1) // self.page_size * self.page_size
            limit = min(limit, kv_len_to_handle // self.page_size * self.page_size)
            self.insert_pages(req, tokens, limit)
        self.storage.close(state)
        self.allocator.free_page_ids(state.pages[state.protected :])
        if req.last_node is not None and not self.disable:
            self.dec_lock_ref(req.last_node)
        req.hs_state = None

    def describe(self, state: RequestState, tokens: int) -> dict[str, Any]:
        """Blocks and bytes, of all ranks, that hold the first `tokens` tokens of the request."""
        pool, plain = self.block_pool, self.plain
        blocks = pool.layers * pool.heads * self.ranks

        def bytes_of(dense: int, sparse: int, pages: int) -> int:
            of_plain = pages * plain.page_bytes if plain else 0
            return (pool.bytes_of(dense, sparse) + of_plain) * self.ranks

        form = self.storage.form(state, tokens) if self.storage else (0, 0)
        prompt = state.prompt_form or form
        pages, of_prompt = (len(state.pages[: self.rules.pages(n)]) for n in (tokens, state.n))
        plain_blocks = 2 * pages * plain.layers * plain.heads * self.ranks if plain else 0
        return {
            "policy": state.policy.to_json(),
            "dense_blocks": form[0] * blocks + plain_blocks,
            "sparse_blocks": form[1] * blocks,
            "kv_bytes": bytes_of(*form, pages),
            "dense_equivalent_bytes": bytes_of(sum(form), 0, pages),
            "prompt_sparse_blocks": prompt[1] * blocks,
            "prompt_kv_bytes": bytes_of(*prompt, of_prompt),
        }

    def check_integrity(self) -> None:
        """The pool's conservation laws over everything that holds slots. Raises AssertionError."""
        assert self.storage is not None
        self.block_pool.check_integrity(self.storage.tails(), self.allocator.free_pages.tolist())
