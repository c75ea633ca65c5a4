"""Which requests enter the next prefill batch, and where their chunks end."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import Req, release_req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from sglang.srt.runtime_context import get_server_args

from hs_runtime.compression import RequestState
from hs_runtime.scheduler.request_slots import policy_of, state_of


class HieraPrefillAdder(PrefillAdder):
    """Admission in bytes. Chunks end at multiples of a page, at the prompt's end and, for tokens
    that a retracted request replays, where the decode rule's window moves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.storage = self.tree_cache.storage
        self.new_chunked_req: Req | None = None
        self.retracted: list[Req] = self.tree_cache.retracted_replays
        self.replays = False

    def budget_state(self) -> AddReqResult:
        if self.rem_input_tokens <= 0 or self.rem_chunk_tokens <= 0:
            return AddReqResult.OTHER
        return AddReqResult.CONTINUE

    def _add(self, req: Req, start: int, end: int, counted: int) -> None:
        req.set_extend_range(start, end)
        self.can_run_list.append(req)
        tokens = self.ceil_paged_tokens(end - start)
        self._update_prefill_budget(start, tokens, counted, req.retracted_stain)

    def add_one_req(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        limit = self.prefill_max_requests
        if self.replays or (limit is not None and len(self.can_run_list) >= limit):
            return AddReqResult.OTHER
        n, known = len(req.origin_input_ids), len(req.full_untruncated_fill_ids)
        hit, policy = len(req.prefix_indices), policy_of(req)
        max_new = req.sampling_params.max_new_tokens
        counted = min(max(max_new - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
        end = self.storage.rules.chunk_end(hit, n, self.rem_chunk_tokens)
        if end <= hit:
            return AddReqResult.OTHER
        if end < known and (has_chunked_req or self.new_chunked_req is not None):
            return AddReqResult.OTHER  # one request at a time may have further chunks
        with self._lock_node(req.last_node):
            if not self.storage.admits(
                policy, n, hit, max_new=max_new, counted=counted, ratio=self.new_token_ratio
            ):
                return AddReqResult.NO_TOKEN
            self._req_inc_lock_ref(req)
        state = RequestState(
            req.rid,
            policy,
            n,
            known,
            max_new,
            req,
            hit=hit,
            pages=list(req.hs_hit_pages),
            protected=hit // self.page_size,
        )
        self.storage.open(state)
        req.hs_state = state
        # SGLang counts one log-probability as sent if it retracts a request before its first token.
        sent = min(req.send_output_token_logprobs_offset, len(req.output_ids))
        req.send_output_token_logprobs_offset = sent
        self._add(req, hit, end, counted if end == known else 0)
        if end < known:
            self.new_chunked_req = req
        return self.budget_state()

    def add_chunked_req(self, req: Req) -> Req | None:
        state = state_of(req)
        start, known = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        if start != state.position:
            raise RuntimeError(f"request {req.rid}: chunk at {start}, storage at {state.position}")
        if state.replaying:
            self.replays, state.replay_tokens = True, self.rem_chunk_tokens
            if not self.storage.make_room([state]):
                self._retract(req)
                return None
            end = self.storage.step_end(state)
        else:
            end = self.storage.rules.chunk_end(start, state.n, self.rem_chunk_tokens)
        self._add(req, start, end, 0)
        return req if end < known else None

    def _retract(self, req: Req) -> None:
        """No bytes for the replay's next page: the request goes back to the queue."""
        tree = self.tree_cache
        release_req(
            req=req,
            remaing_req_count=0,
            server_args=get_server_args(),
            req_to_token_pool=tree.req_to_token_pool,
            token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
            tree_cache=tree,
            hisparse_coordinator=None,
        )
        tree.note_retraction(req)
        self.retracted.append(req)
