"""The tiny scheduler on the real tree, allocator and pool: importing this imports SGLang.

Calls come in SGLang's order: match, lock, admit; page ids, then the plan; and what SGLang keeps in
its row of token slots is compared with what our storage believes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from hs_runtime import spawn  # noqa: F401  (before SGLang: it prepares the process)

# isort: split
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from hs_kernels.block_format import BlockFormat
from hs_runtime.compression import RequestState
from hs_runtime.policies import CUSTOM_PARAM, PRESETS, ServerConstants
from hs_runtime.policies.policy import Sparsity
from hs_runtime.pool import radix_cache
from hs_runtime.pool.allocator import HieraAllocator
from hs_runtime.pool.kv_pool import HieraKVPool, PoolSize
from hs_runtime.pool.radix_cache import HieraRadixCache
from hs_runtime.scheduler.lifecycle import Lifecycle
from hs_runtime.scheduler.request_slots import attach_policy
from tests.support.contents import VOCAB
from tests.support.tiny_engine import Engine, Held, Request

CONSTANTS = ServerConstants(sink=64, window=64, segment=128)
ROWS, CONTEXT = 16, 4096


class SchedulerRequest(Request):
    """What the tree reads of an SGLang request."""

    priority = 0

    def __init__(self, *args: Any, extra_key: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params = {CUSTOM_PARAM: self.policy.to_json()}
        self.sampling_params = SimpleNamespace(
            custom_params=params, max_new_tokens=self.max_new, min_new_tokens=0
        )
        self.extra_key, self.customized_info = extra_key, None
        attach_policy(self, PRESETS["dense"], CONSTANTS)  # type: ignore[arg-type]
        assert self.hs_error is None  # type: ignore[attr-defined]
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.req_pool_idx: int | None = None
        self.last_node: Any = None
        self.cache_protected_len = 0
        self.extend_range = SimpleNamespace(start=0, end=0)

    @property
    def origin_input_ids(self) -> array[int]:
        return array("q", self.prompt)

    @property
    def output_ids(self) -> array[int]:
        return array("q", [x % VOCAB for x in self.outputs])

    @property
    def output_ids_through_stop(self) -> array[int]:
        return self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.status == "finished"


def build_tree(
    fmt: BlockFormat,
    superblocks: int,
    pages: int,
    *,
    page: int = 64,
    layers: int = 1,
    heads: int = 1,
    rules: Lifecycle | None = None,
    **options: Any,
) -> HieraRadixCache:
    """An empty tree over an empty pool on the CPU. `rules` replace those of CONSTANTS."""
    HieraKVPool.next_size = PoolSize(superblocks, pages)
    pool = HieraKVPool(
        pages * page,
        page_size=page,
        dtype=fmt.torch_dtype,
        head_num=heads,
        head_dim=fmt.head_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = HieraAllocator(
        pages * page,
        kvcache=pool,
        page_size=page,
        dtype=fmt.torch_dtype,
        device="cpu",
        need_sort=False,
    )
    params = CacheInitParams(
        disable=options.pop("disable", False),
        req_to_token_pool=ReqToTokenPool(ROWS, CONTEXT, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        **options,
    )
    chosen = rules or Lifecycle.of(CONSTANTS)
    with patch.object(radix_cache.Lifecycle, "of", return_value=chosen):
        return HieraRadixCache(params, CONSTANTS)


def nodes_of(tree: HieraRadixCache) -> list[tuple[TreeNode, int]]:
    """Every node but the root, with the page of the prompt that it starts at."""
    found, todo = [], [(child, 0) for child in tree.root_node.children.values()]
    while todo:
        node, first = todo.pop()
        found.append((node, first))
        after = first + len(node.key) // tree.page_size
        todo += [(child, after) for child in node.children.values()]
    return found


class RadixEngine(Engine):
    """`Engine` with everything of the prefix cache replaced by the real one. Forwards for which
    `fails()` is true fail as compression may; they cost their batch."""

    def __init__(
        self,
        tree: HieraRadixCache,
        device: Any,
        *,
        fails: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        self.fails = fails
        self.radix, self.allocator = tree, tree.allocator
        self.rows: torch.Tensor = tree.req_to_token_pool.req_to_token
        self.free_rows = list(range(1, ROWS + 1))
        # Namespaces are digests; the requests that made them say what they stand for.
        self.shares: dict[str, Sparsity] = {}
        super().__init__(tree.rules, tree.block_pool, device, cached=not tree.disable, **options)

    def _build_cache(self) -> None:
        assert self.radix.storage is not None
        self.storage, self.planner = self.radix.storage, self.radix.planner
        self.tree = SimpleNamespace(clock=0, counts=self.counts)  # type: ignore[assignment]

    def held(self) -> list[Held]:
        return [
            Held(self.shares[node.key.extra_key], first, self.radix.pages_of(node), node.lock_ref)
            for node, first in nodes_of(self.radix)
        ]

    def free_pages(self) -> list[int]:
        free: list[int] = self.allocator.free_pages.tolist()
        return free

    def _admit(self, r: Request) -> bool:
        assert isinstance(r, SchedulerRequest) and r.extra_key is not None
        self.shares[r.extra_key] = r.policy.prefill
        key = RadixKey(r.full_untruncated_fill_ids[:-1], r.extra_key)
        found = self.radix.match_prefix(MatchPrefixParams(key=key, req=r))
        hit = len(found.device_indices)
        self.radix.inc_lock_ref(found.last_device_node)
        counted = int((r.max_new - len(r.outputs)) * self.growth)
        if not self.storage.admits(
            r.policy, r.n, hit, max_new=r.max_new, counted=counted, ratio=self.growth
        ):
            self.radix.dec_lock_ref(found.last_device_node)
            assert self.storage.active, f"an idle engine refuses request {r.rid}, which fits"
            return False
        r.hit, r.status, r.last_node = hit, "running", found.last_device_node
        r.prefix_indices, r.cache_protected_len = found.device_indices, hit
        pages: list[int] = r.hs_hit_pages  # type: ignore[attr-defined]
        r.state = r.hs_state = RequestState(  # type: ignore[attr-defined]
            str(r.rid), r.policy, r.n, len(r.known), r.max_new, r,
            hit=hit, pages=list(pages), protected=len(pages),
        )  # fmt: skip
        r.req_pool_idx = self.free_rows.pop()
        self.rows[r.req_pool_idx] = -1
        self.rows[r.req_pool_idx, :hit] = found.device_indices.to(torch.int32)
        self.storage.open(r.state)
        self.counts["hit"] += hit > 0
        return True

    def _make_ids(self, count: int) -> None:
        short = count * self.rules.page - self.allocator.available_size()
        if short > 0:
            self.radix.evict(EvictParams(num_tokens=short))

    def _lengths(self, states: Sequence[RequestState], ends: Sequence[int]) -> dict[str, Any]:
        rows = [self.rows[state.owner.req_pool_idx] for state in states]
        starts = [state.position for state in states]
        before = [int(row[a - 1]) if a else -1 for row, a in zip(rows, starts, strict=True)]
        seq_lens = torch.tensor(ends)
        return {
            "seq_lens": seq_lens,
            "seq_lens_cpu": seq_lens,
            "last_loc": torch.tensor(before),
        }

    def _planned(self, tickets: list[Any], states: Sequence[RequestState]) -> None:
        kv_pool = self.allocator.get_kvcache()
        plan, kv_pool._next_plan = kv_pool.current_plan(), None
        self.forwards.append((plan, tickets))
        for state in states:
            self._check_row(state)

    def _check_row(self, state: RequestState) -> None:
        """SGLang's row of token slots says the same as our row of pages."""
        row, page = self.rows[state.owner.req_pool_idx, : state.position], self.rules.page
        assert bool((row[::page] // page == torch.tensor(state.pages)[: len(row[::page])]).all())
        offsets = torch.arange(len(row)) % page
        assert torch.equal(row.long(), row.long() // page * page + offsets)

    def _extend(self, chunks: Sequence[tuple[RequestState, int]]) -> None:
        states, ends = [state for state, _ in chunks], [end for _, end in chunks]
        count = sum(self.rules.pages(end) - len(state.pages) for state, end in chunks)
        self._make_ids(count)
        starts = torch.tensor([state.position for state in states])
        out = self.allocator.alloc_extend(
            prefix_lens=starts,
            prefix_lens_cpu=starts,
            extend_num_tokens=sum(ends) - int(starts.sum()),
            **self._lengths(states, ends),
        )
        assert out is not None, "out of page ids"
        tickets = []
        parts = out.split([end - state.position for state, end in chunks])
        taken = list(self.allocator.last_new_pages)
        for (state, end), part, new in zip(chunks, parts, taken, strict=True):
            r: SchedulerRequest = state.owner
            # SGLang writes the prefix that it believes in, then the new slots.
            assert len(r.prefix_indices) == state.position
            self.rows[r.req_pool_idx, : state.position] = r.prefix_indices.to(torch.int32)
            self.rows[r.req_pool_idx, state.position : end] = part.to(torch.int32)
            r.extend_range = SimpleNamespace(start=state.position, end=end)
            tickets.append(self._row(state, state.position, end, [*state.pages, *new]))
        self.radix.plan_extend(SimpleNamespace(reqs=[state.owner for state in states]))
        self._planned(tickets, states)
        for state in states:
            self.radix.cache_unfinished_req(state.owner)

    def _decode(self) -> bool:
        states = [state for state in self.running if state.decoding and not state.replaying]
        self._make_room(states)
        if not states:
            return False
        batch = SimpleNamespace(reqs=[state.owner for state in states])
        self.radix.convert_due(batch)
        ends = [state.position + 1 for state in states]
        out = self.allocator.alloc_decode(**self._lengths(states, ends))
        assert out is not None, "out of page ids"
        tickets = []
        taken = list(self.allocator.last_new_pages)
        for state, end, slot, new in zip(states, ends, out.tolist(), taken, strict=True):
            self.rows[state.owner.req_pool_idx, state.position] = slot
            tickets.append(self._row(state, state.position, end, [*state.pages, *new]))
        batch.seq_lens_cpu = torch.tensor(ends)
        self.radix.plan_decode(batch)
        self._planned(tickets, states)
        return True

    def _run(self, plan: Any, rows: list[Any]) -> None:
        if not self.fails():
            super()._run(plan, rows)
            return
        self.device.fail(plan)  # type: ignore[attr-defined]
        for ticket, _ in rows:
            r = ticket.request
            if r.state is not None and r.epoch == ticket.epoch:
                r.status = "aborted"
                self._release(r, insert=False)
                self.counts["failed"] += 1
        self.radix.withdraw_batch()

    def finish(self, r: Request, status: str) -> None:
        r.status = status
        self._release(r)
        self.counts[status] += 1

    def _release(self, r: Request, insert: bool = True) -> None:
        assert isinstance(r, SchedulerRequest)
        if r.state is None:
            self.waiting.remove(r)
            return
        assert r.req_pool_idx is not None
        insert = insert and r.status != "waiting"
        self.radix.cache_finished_req(r, is_insert=insert, kv_len_to_handle=r.state.position)
        self.free_rows.append(r.req_pool_idx)
        r.state, r.req_pool_idx, r.last_node, r.epoch = None, None, None, r.epoch + 1
        r.prefix_indices = torch.empty(0, dtype=torch.int64)

    def check(self) -> None:
        super().check()
        self.check_tree()

    def check_tree(self) -> None:
        """The tree's own books, and its shape."""
        tree, nodes = self.radix, [node for node, _ in nodes_of(self.radix)]
        tokens = {locked: sum(len(n.key) for n in nodes if (n.lock_ref > 0) == locked)
                  for locked in (False, True)}  # fmt: skip
        assert tree.evictable_size_ == tokens[False] and tree.protected_size_ == tokens[True]
        leaves = {node for node in nodes if not node.lock_ref and not node.children}
        assert tree.evictable_leaves == leaves
        for node in nodes:
            assert len(node.value) == len(node.key) > 0
            assert node.lock_ref >= sum(c.lock_ref for c in node.children.values())
            for key, child in node.children.items():
                assert child.parent is node and key == child.key.child_key(tree.unit_of(child.key))

    def check_empty(self) -> None:
        super().check_empty()
        self.radix.check_idle()
        assert not nodes_of(self.radix)
