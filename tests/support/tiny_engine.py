"""A scheduler and a prefix cache around `RequestStorage`: what SGLang is in production."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hs_runtime.attention.plan import AttnPlan
from hs_runtime.batching import BatchPlanner
from hs_runtime.compression import RequestState, RequestStorage
from hs_runtime.compression.request_storage import in_order
from hs_runtime.policies import SparsityPolicy
from hs_runtime.policies.policy import Sparsity
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool, Slot
from hs_runtime.scheduler.admission import Slots, decode_form
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle, sparse_count
from tests.support.contents import STOP, VOCAB
from tests.support.devices import Device, Row


@dataclass(eq=False)
class Node:
    """One unit: a segment of its namespace, or a page of the dense one."""

    parent: Node | None = None
    key: tuple[int, ...] = ()
    pages: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    locks: int = 0
    stamp: int = 0


@dataclass(frozen=True)
class Held:
    """What a node of a prefix cache holds: pages from `first` (of the prompt) on."""

    shares: Sparsity
    first: int
    pages: list[int]
    locks: int


class PrefixTree:
    """A `PrefixCache` of dictionaries, and the free page ids."""

    def __init__(self, rules: Lifecycle, pool: BlockPool) -> None:
        self.rules, self.pool = rules, pool
        self.free = list(range(pool.pages, 0, -1))
        self.roots: dict[Sparsity, Node] = {}
        self.clock = 0
        self.counts: Counter[str] = Counter()

    def root(self, policy: SparsityPolicy) -> Node:
        return self.roots.setdefault(policy.prefill, Node())

    def nodes(self) -> list[Node]:
        found, stack = [], list(self.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                found.append(node)
        return found

    def held(self) -> list[Held]:
        found = []
        for shares, root in self.roots.items():
            todo = [(child, 0) for child in root.children.values()]
            while todo:
                node, first = todo.pop()
                found.append(Held(shares, first, node.pages, node.locks))
                todo += [(child, first + len(node.pages)) for child in node.children.values()]
        return found

    def match(self, policy: SparsityPolicy, tokens: Sequence[int], limit: int) -> list[Node]:
        unit, node, path = self.rules.granularity(policy), self.root(policy), []
        for start in range(0, limit // unit * unit, unit):
            child = node.children.get(tuple(tokens[start : start + unit]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _hold(self, node: Node, by: int) -> None:
        if node.locks == 0:
            self.pool.set_idle(node.pages, False)
        node.locks, node.stamp = node.locks + by, self.clock
        assert node.locks >= 0
        if node.locks == 0:
            self.pool.set_idle(node.pages, True)

    def lock(self, node: Node | None, by: int) -> None:
        while node is not None and node.parent is not None:
            self._hold(node, by)
            node = node.parent

    def insert(self, state: RequestState, limit: int) -> None:
        """Hands the pages before `limit` to the tree; its own replace twins in the row."""
        request: Request = state.owner
        unit, page = self.rules.granularity(state.policy), self.rules.page
        node = request.node or self.root(state.policy)
        assert limit % unit == 0 and not state.private
        for start in range(state.protected * page, limit, unit):
            pages = slice(start // page, (start + unit) // page)
            key = tuple(request.known[start : start + unit])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, state.pages[pages])
            else:
                self.give_back(state.pages[pages])
                state.pages[pages] = child.pages
                self.counts["twin"] += 1
            self._hold(child, 1)
            request.node, state.protected, node = child, pages.stop, child

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        self.pool.release_pages(pages)
        self.free.extend(pages)

    # PrefixCache

    def evict_one(self) -> bool:
        leaves = [n for n in self.nodes() if not n.locks and not n.children]
        if not leaves:
            return False

        def worth(node: Node) -> tuple[bool, int]:
            slots = [
                s for p in node.pages for side in SIDES for s in self.pool.spans[p, side].slots
            ]
            return all(slot.references > 1 for slot in slots), node.stamp

        node = min(leaves, key=worth)
        assert node.parent is not None
        del node.parent.children[node.key]
        self.pool.set_idle(node.pages, False)
        self.give_back(node.pages)
        self.counts["evict"] += 1
        return True

    def evictable_pages(self) -> int:
        return sum(len(node.pages) for node in self.nodes() if not node.locks)

    def free_page_count(self) -> int:
        return len(self.free)

    def make_private(self, state: RequestState) -> list[int]:
        pages = self.take(state.protected)
        self.lock(state.owner.node, -1)
        state.owner.node = None
        self.counts["private"] += 1
        return pages


# ---- the scheduler ------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    rid: int
    prompt: list[int]
    policy: SparsityPolicy
    max_new: int
    outputs: list[int] = field(default_factory=list)  # states; a token is a state % VOCAB
    status: str = "new"
    state: RequestState | None = None
    node: Node | None = None  # deepest locked node
    epoch: int = 0
    retractions: int = 0
    hit: int = 0

    @property
    def n(self) -> int:
        return len(self.prompt)

    @property
    def known(self) -> list[int]:
        return self.prompt + [x % VOCAB for x in self.outputs]


@dataclass(frozen=True)
class _Ticket:
    """Who waits for the last state of a row, if anyone does; a retraction is a new epoch."""

    request: Request
    epoch: int
    sample: bool


class Engine:
    """A scheduler. With `overlap` the device runs one step behind it; `growth` is the share of the
    decode growth that admission counts on; `cached=False` keeps nothing for other requests."""

    def __init__(
        self,
        rules: Lifecycle,
        pool: BlockPool,
        device: Device,
        *,
        overlap: bool = False,
        growth: float = 0.0,
        cached: bool = True,
        stop: int = STOP,
    ) -> None:
        self.rules, self.pool, self.device = rules, pool, device
        self.counts: Counter[str] = Counter()
        self._build_cache()
        self.waiting: list[Request] = []
        self.overlap, self.growth, self.cached, self.stop = overlap, growth, cached, stop
        self.forwards: deque[tuple[AttnPlan, list[tuple[_Ticket, Row]]]] = deque()
        self.pool.queue = self._watch(self.pool.queue)  # type: ignore[method-assign]

    def _build_cache(self) -> None:
        self.tree = PrefixTree(self.rules, self.pool)
        self.tree.counts = self.counts
        self.storage = RequestStorage(self.rules, self.pool, self.tree)
        self.planner = BatchPlanner(self.storage, self._insert)

    def held(self) -> list[Held]:
        """What the prefix cache holds, node by node."""
        return self.tree.held()

    def free_pages(self) -> list[int]:
        return self.tree.free

    def _insert(self, state: RequestState, limit: int) -> None:
        if self.cached:
            self.tree.insert(state, limit)

    def _watch(self, queue: Callable[[Any], None]) -> Callable[[Any], None]:
        def counting(operation: Any) -> None:
            self.counts["convert"] += 1
            self.counts["group"] += len(operation.pages) > 1
            self.counts["in_place"] += any(ref in operation.old for ref in operation.new)
            queue(operation)

        return counting

    @property
    def running(self) -> list[RequestState]:
        return in_order(self.storage.active.values())

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.storage.active)

    def submit(self, r: Request) -> bool:
        if self.storage.never_fits(r.policy, r.n, r.max_new):
            return False
        r.status = "waiting"
        self.waiting.append(r)
        return True

    def _admit(self, r: Request) -> bool:
        limit = min(self.rules.reuse_limit(r.policy, r.n), r.n - 1)
        path = self.tree.match(r.policy, r.known, limit)
        node = path[-1] if path else None
        self.tree.lock(node, 1)
        pages = [page for each in path for page in each.pages]
        hit = len(pages) * self.rules.page
        counted = int((r.max_new - len(r.outputs)) * self.growth)
        if not self.storage.admits(
            r.policy, r.n, hit, max_new=r.max_new, counted=counted, ratio=self.growth
        ):
            self.tree.lock(node, -1)
            assert self.storage.active, f"an idle engine refuses request {r.rid}, which fits"
            return False
        r.node, r.hit, r.status = node, hit, "running"
        r.state = RequestState(
            str(r.rid), r.policy, r.n, len(r.known), r.max_new, r,
            hit=hit, pages=pages, protected=len(pages),
        )  # fmt: skip
        self.storage.open(r.state)
        self.counts["hit"] += hit > 0
        return True

    def _new_pages(self, state: RequestState, end: int) -> list[int]:
        count = self.rules.pages(end) - len(state.pages)
        while len(self.tree.free) < count:
            assert self.tree.evict_one(), "out of page ids"
        return self.tree.take(count)

    def _row(
        self, state: RequestState, start: int, end: int, pages: Sequence[int]
    ) -> tuple[_Ticket, Row]:
        r: Request = state.owner
        row = Row(r.rid, start, tuple(r.known[start:end]), tuple(pages))
        return _Ticket(r, r.epoch, end >= state.known), row

    def _extend(self, chunks: Sequence[tuple[RequestState, int]]) -> None:
        taken = [(state, end, self._new_pages(state, end)) for state, end in chunks]
        rows = []
        for state, end, new in taken:
            rows.append(self._row(state, state.position, end, [*state.pages, *new]))
        self.forwards.append((self.planner.plan_extend(taken), rows))

    def _make_room(self, states: list[RequestState]) -> None:
        """Retracts the youngest of `states` until the next step of the others fits."""
        while states and not self.storage.make_room(states):
            assert len(self.storage.active) > 1, "a request alone does not fit: its need is wrong"
            self.retract(states.pop().owner)

    def _replay(self, tokens: int) -> bool:
        states = [state for state in self.running if state.replaying]
        for state in states:
            state.replay_tokens = tokens
        self._make_room(states)
        if states:
            self.counts["replay"] += 1
            self._extend([(state, self.storage.step_end(state)) for state in states])
        return bool(states)

    def _prefill(self, tokens: int) -> bool:
        chunks = []
        todo = [state.owner for state in self.running if not state.decoding] + self.waiting
        for r in todo:
            if tokens < self.rules.page:
                break
            if r.state is None:
                if not self._admit(r):
                    break
                self.waiting.remove(r)
            start = r.state.position
            end = self.rules.chunk_end(start, r.n, tokens)
            if end > start:
                tokens -= end - start
                chunks.append((r.state, end))
        if chunks:
            self._extend(chunks)
        return bool(chunks)

    def _decode(self) -> bool:
        states = [state for state in self.running if state.decoding and not state.replaying]
        self._make_room(states)
        if not states:
            return False
        self.planner.convert_due(states)
        steps = [(state, self._new_pages(state, state.position + 1)) for state in states]
        rows = [
            self._row(state, state.position, state.position + 1, [*state.pages, *new])
            for state, new in steps
        ]
        self.forwards.append((self.planner.plan_decode(steps), rows))
        return True

    # the end of a request

    def _release(self, r: Request) -> None:
        if r.state is None:
            self.waiting.remove(r)
            return
        self.storage.close(r.state)
        self.tree.give_back(r.state.pages[r.state.protected :])
        self.tree.lock(r.node, -1)
        r.state, r.node, r.epoch = None, None, r.epoch + 1

    def retract(self, r: Request) -> None:
        r.status, r.retractions = "waiting", r.retractions + 1
        self._release(r)
        self.storage.note_retraction()
        self.waiting = sorted([*self.waiting, r], key=lambda each: each.rid)
        self.counts["retract"] += 1

    def finish(self, r: Request, status: str) -> None:
        r.status = status
        if status == "finished" and r.policy.is_dense:
            assert r.state is not None
            page = self.rules.page
            self._insert(r.state, (r.n + len(r.outputs) - 1) // page * page)
        self._release(r)
        self.counts[status] += 1

    # one step

    def step(self, tokens: int, prefill_first: bool = True) -> None:
        """One scheduler step; the device carries it out now, or with `overlap` during the next."""
        self.tree.clock += 1
        behind = len(self.forwards)
        if prefill_first:
            _ = self._replay(tokens) or self._prefill(tokens) or self._decode()
        else:
            _ = self._decode() or self._replay(tokens) or self._prefill(tokens)
        planned = len(self.forwards) > behind
        for _ in range(behind if self.overlap and planned else len(self.forwards)):
            self._run(*self.forwards.popleft())

    def _run(self, plan: AttnPlan, rows: list[tuple[_Ticket, Row]]) -> None:
        ends = self.device.forward(plan, [row for _, row in rows])
        for (ticket, _), x in zip(rows, ends, strict=True):
            self._receive(ticket, x)

    def _receive(self, ticket: _Ticket, x: int) -> None:
        r = ticket.request
        if ticket.sample and r.epoch == ticket.epoch and r.state is not None:
            r.outputs.append(x)
            if len(r.outputs) == r.max_new or x % self.stop == 0:
                self.finish(r, "finished")

    def check(self) -> None:
        """Conservation of slots, bytes and ids; exact counts of sparse slots; kept promises."""
        pool, storage, rules, free = self.pool, self.storage, self.rules, self.free_pages()
        held = self.held()
        pool.check_integrity(storage.tails(), free)
        owned = [page for node in held for page in node.pages]
        owned += [page for state in self.running for page in state.pages[state.protected :]]
        assert sorted(owned + free) == list(range(1, pool.pages + 1)), "page ids leak"
        for node in held:
            if not node.shares.is_dense:
                self._check_segments(node)
        for state in self.running:
            if not state.decoding or (state.replaying and state.position > state.n):
                continue
            kinds = [slot.kind for side in SIDES for slot in self._slots(side, state.pages)]
            form = Slots(kinds.count(DENSE), kinds.count(SPARSE))
            if state.position == state.n:
                assert form == self._prompt_form(state), (form, state)
            else:
                assert form == decode_form(rules, state.policy, state.position - 1), (form, state)
        idle = {
            id(slot): slot
            for node in held
            if not node.locks
            for side in SIDES
            for slot in self._slots(side, node.pages)
        }
        counted = Counter(slot.kind for slot in idle.values() if slot.references == 1)
        assert all(counted[kind] == pool.evictable[kind] for kind in (DENSE, SPARSE))
        promised, ids = storage.reserved()
        need = Slots(pool.ledger.used[DENSE], pool.ledger.used[SPARSE]).plus(promised)
        assert pool.ledger.fits(need.dense - counted[DENSE], need.sparse - counted[SPARSE]), (
            "bytes that were promised to prefills are gone"
        )
        evictable = sum(len(node.pages) for node in held if not node.locks)
        assert storage.prefix_cache.evictable_pages() == evictable
        assert storage.prefix_cache.free_page_count() == len(free)
        assert len(free) + evictable >= ids, "promised page ids are gone"

    def _check_segments(self, node: Held) -> None:
        """Whole segments, each with its exact count of sparse slots."""
        per = self.rules.segment_pages
        assert node.first % per == 0 and len(node.pages) % per == 0
        for start in range(0, len(node.pages), per):
            candidates = len(self.rules.candidates((node.first + start) // per))
            for side in SIDES:
                slots = self._slots(side, node.pages[start : start + per])
                assert len(slots) == per
                want = sparse_count(node.shares.of(side), candidates)
                assert sum(slot.kind == SPARSE for slot in slots) == want, (node, side)

    def _prompt_form(self, state: RequestState) -> Slots:
        """At the end of its prompt: pages of complete segments that the window has left, in the
        form that prefill gave them; whole segments where the share is a fraction."""
        rules, sparse = self.rules, 0
        left = (state.n - rules.window) // rules.page  # pages before it are not in the window
        for side in SIDES:
            share = state.policy.prefill.of(side)
            if share and rules.chunk_anchor:  # also of the chunk that the prompt ends in
                sparse += max(0, left - rules.sink_pages)
                continue
            for segment in range(state.n // rules.segment if share else 0):
                pages = rules.candidates(segment)
                if share == 1000:
                    sparse += sum(p < left for p in pages)
                elif (segment + 1) * rules.segment_pages <= left:
                    sparse += sparse_count(share, len(pages))
        return Slots(2 * rules.pages(state.n) - sparse, sparse)

    def _slots(self, side: int, pages: Sequence[int]) -> list[Slot]:
        spans = {id(x): x for x in (self.pool.spans[page, side] for page in pages)}
        return [slot for span in spans.values() for slot in span.slots]

    def drain(self, rng: random.Random, chunks: Sequence[int]) -> None:
        for _ in range(5000):
            if not self.busy:
                return
            self.step(rng.choice(chunks), rng.random() < 0.7)
            self.check()
        raise AssertionError("livelock")

    def check_empty(self) -> None:
        """After the last request: eviction returns everything."""
        self.step(0)
        self.step(0)
        assert not self.forwards and not self.storage.active
        while self.storage.prefix_cache.evict_one():
            pass
        self.check()
        assert not any(self.pool.ledger.used.values())
        assert len(self.free_pages()) == self.pool.pages
