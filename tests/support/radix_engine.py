"""The tiny scheduler on the real tree, adder, allocator and pool: importing this imports SGLang.

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
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult
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
from hs_runtime.scheduler.prefill_adder import HieraPrefillAdder
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
        self.retracted_stain, self.send_output_token_logprobs_offset = False, 0
        self.hs_state: RequestState | None

    def set_extend_range(self, start: int, end: int) -> None:
        self.extend_range = SimpleNamespace(start=start, end=end, length=end - start)

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
    dense_layers: tuple[int, ...] = (),
    **options: Any,
) -> HieraRadixCache:
    """An empty tree over an empty pool on the CPU. `rules` replace those of CONSTANTS; `layers` are
    those besides `dense_layers`."""
    HieraKVPool.next_size = PoolSize(superblocks, pages, dense_layers=dense_layers)
    pool = HieraKVPool(
        pages * page,
        page_size=page,
        dtype=fmt.torch_dtype,
        head_num=heads,
        head_dim=fmt.head_dim,
        layer_num=layers + len(dense_layers),
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


# SGLang's defaults, as far as a decode batch's retraction reads them.
_ARGUMENTS = SimpleNamespace(retraction_policy="fcfs")


_PARALLEL_PREFILL = ("is_dsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled")


class _Adder(HieraPrefillAdder):
    """One prefill pass of an engine."""

    def __init__(self, engine: RadixEngine, tokens: int) -> None:
        decoding = [state.owner for state in engine.running if state.decoding]
        # SGLang asks its global configuration, which no process has published here.
        off = {name: lambda: False for name in _PARALLEL_PREFILL}
        with patch.multiple(schedule_policy, **off):
            super().__init__(
                engine.rules.page,
                engine.radix,
                engine.allocator,
                SimpleNamespace(reqs=decoding),
                engine.growth,
                rem_input_tokens=10**6,
                rem_chunk_tokens=tokens,
            )
        self.engine = engine

    def _retract(self, req: Any) -> None:
        self.engine.retract(req)


class _DecodeBatch:
    """What retraction asks of a batch."""

    def __init__(self, engine: RadixEngine, reqs: list[Any]) -> None:
        self.engine, self.reqs = engine, reqs

    _get_decode_retraction_order = staticmethod(ScheduleBatch._get_decode_retraction_order)

    def release_req(self, index: int, left: int, arguments: Any) -> None:
        self.engine.requeue(self.reqs[index])

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in keep_indices]


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
        self.chunked: SchedulerRequest | None = None
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

    def _replay(self, tokens: int) -> bool:
        return False  # a replay is a chunk of the chunked request

    def _prefill(self, tokens: int) -> bool:
        """A prefill pass in SGLang's order: the chunked request first, then the queue."""
        if tokens < self.rules.page:
            return False
        waiting, busy = list(self.waiting), bool(self.storage.active)
        adder = _Adder(self, tokens)
        if self.chunked is not None:
            self.chunked = adder.add_chunked_req(self.chunked)
        for r in waiting:
            self._match(r)
            result = adder.add_one_req(r, self.chunked is not None, None)
            if r in adder.can_run_list:
                self._admitted(r)
            if result != AddReqResult.CONTINUE:
                idle = not busy and not adder.can_run_list
                assert not idle, f"an idle engine refuses request {r.rid}, which fits"
                break
        if adder.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = adder.new_chunked_req
        chunks = [(r.hs_state, r.extend_range.end) for r in adder.can_run_list]
        self.counts["replay"] += any(state.replaying for state, _ in chunks)
        if chunks:
            self._extend(chunks)
        return bool(chunks)

    def _match(self, r: SchedulerRequest) -> None:
        assert r.extra_key is not None
        self.shares[r.extra_key] = r.policy.prefill
        key = RadixKey(r.full_untruncated_fill_ids[:-1], r.extra_key)
        found = self.radix.match_prefix(MatchPrefixParams(key=key, req=r))
        r.last_node, r.prefix_indices = found.last_device_node, found.device_indices
        r.cache_protected_len = len(r.prefix_indices)

    def _admitted(self, r: SchedulerRequest) -> None:
        self.waiting.remove(r)
        r.state, r.hit, r.status = r.hs_state, len(r.prefix_indices), "running"
        r.req_pool_idx = self.free_rows.pop()
        self.rows[r.req_pool_idx] = -1
        self.counts["hit"] += r.hit > 0

    def _make_room(self, states: list[RequestState]) -> None:
        """As a decode batch that asks for its next step."""
        reqs = [state.owner for state in states]
        if states and not self.radix.step_fits(reqs):
            batch = _DecodeBatch(self, reqs)
            retracted, ratio, aborted = self.radix.retract_decode(batch, _ARGUMENTS)
            assert retracted and not aborted and 0 < ratio <= 1
            states[:] = [r.hs_state for r in batch.reqs]

    def retract(self, r: Request) -> None:
        self.requeue(r)
        self.radix.note_retraction(r)

    def requeue(self, r: Request) -> None:
        r.status, r.retractions = "waiting", r.retractions + 1
        self._release(r)
        self.waiting = sorted([*self.waiting, r], key=lambda each: each.rid)
        self.counts["retract"] += 1

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
            assert (r.extend_range.start, r.extend_range.end) == (state.position, end)
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
        self.chunked = None if self.chunked is r else self.chunked
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
