"""Page ids for SGLang: counted exactly, given back with their blocks. Imports SGLang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hs_runtime.pool.block_pool import DENSE
from tests.support.histories import F16

pytestmark = pytest.mark.integration

PAGES = 12


@pytest.fixture
def allocator() -> Any:
    from tests.support.radix_engine import build_tree

    return build_tree(F16, 4, PAGES).allocator


def lengths(starts: list[int], ends: list[int], last: list[int]) -> dict[str, Any]:
    a, b = torch.tensor(starts), torch.tensor(ends)
    return {
        "prefix_lens": a,
        "prefix_lens_cpu": a,
        "seq_lens": b,
        "seq_lens_cpu": b,
        "last_loc": torch.tensor(last),
        "extend_num_tokens": int((b - a).sum()),
    }


def free_ids(allocator: Any) -> list[int]:
    return sorted(allocator.free_pages.tolist())


def test_ids_start_at_one_and_are_taken_once(allocator: Any) -> None:
    assert free_ids(allocator) == list(range(1, PAGES + 1)), "page 0 is the dummy"
    assert allocator.available_size() == PAGES * 64
    taken = allocator.take_pages(5)
    assert len(set(taken)) == 5 and not set(taken) & set(free_ids(allocator))
    allocator.free_page_ids(taken[:2])
    allocator.free_page_ids([])
    assert allocator.available_size() == (PAGES - 3) * 64
    with pytest.raises(RuntimeError, match=f"{PAGES} page ids wanted, {PAGES - 3} free"):
        allocator.take_pages(PAGES)


def test_token_slots_are_those_of_whole_pages(allocator: Any) -> None:
    assert allocator.token_slots([3, 1]).tolist() == [*range(192, 256), *range(64, 128)]
    slots = allocator.alloc(128)
    assert slots.tolist() == [*range(64, 192)] and allocator.available_size() == (PAGES - 2) * 64
    assert allocator.alloc(PAGES * 64) is None
    assert allocator.available_size() == (PAGES - 2) * 64


def test_an_extend_fills_the_begun_page_before_it_opens_others(allocator: Any) -> None:
    """From 0 to 70; from 100, inside the page that ends at slot 7 * 64 + 35, to 128 and to 300."""
    allocator.take_pages(7)
    out = allocator.alloc_extend(
        **lengths([0, 100, 100], [70, 128, 300], [-1, 7 * 64 + 35, 6 * 64 + 35])
    )
    first, second, third = allocator.last_new_pages
    assert (len(first), len(second), len(third)) == (2, 0, 3)
    parts = out.split([70, 28, 200])
    assert parts[0].tolist() == allocator.token_slots(first)[:70].tolist()
    assert parts[1].tolist() == [*range(7 * 64 + 36, 8 * 64)]
    begun = [*range(6 * 64 + 36, 7 * 64)]
    assert parts[2].tolist() == begun + allocator.token_slots(third)[:172].tolist()
    assert allocator.available_size() == 0


def test_a_shortage_takes_nothing(allocator: Any) -> None:
    allocator.take_pages(PAGES - 2)
    assert allocator.alloc_extend(**lengths([0, 0], [64, 129], [-1, -1])) is None
    assert allocator.available_size() == 2 * 64
    lens = torch.tensor([65, 129, 193])
    assert allocator.alloc_decode(lens, lens, torch.tensor([63, 127, 191])) is None
    assert allocator.available_size() == 2 * 64


def test_a_decode_opens_a_page_for_the_first_token_of_one_alone(allocator: Any) -> None:
    lens = torch.tensor([64, 65, 1])
    out = allocator.alloc_decode(lens, lens, torch.tensor([5 * 64 + 62, 5 * 64 + 63, -1]))
    none, one, fresh = allocator.last_new_pages
    assert none == [] and len(one) == len(fresh) == 1
    assert out.tolist() == [5 * 64 + 63, one[0] * 64, fresh[0] * 64]


def test_freed_tokens_return_each_page_once_and_its_blocks(allocator: Any) -> None:
    pool = allocator.block_pool
    pages = allocator.take_pages(3)
    for page in pages:
        for side in (0, 1):
            pool.bind_dense(side, page, pool.allocate(DENSE))
    slots = allocator.token_slots(pages)
    allocator.free(slots[:100])
    assert not pool.spans.keys() & {(page, 0) for page in pages[:2]}
    assert (pages[2], 0) in pool.spans and allocator.available_size() == (PAGES - 1) * 64
    allocator.free(slots[:0])
    allocator.free_segment(slots[128:], start_pos=128)
    assert not pool.spans and pool.used_bytes == 0
    assert free_ids(allocator) == list(range(1, PAGES + 1))


def test_a_group_frees_at_its_end(allocator: Any) -> None:
    slots = allocator.alloc(4 * 64)
    allocator.free_group_begin()
    allocator.free(slots[:64])
    allocator.free_segment(slots[64:], start_pos=64)
    assert allocator.available_size() == (PAGES - 4) * 64
    allocator.free_group_end()
    assert free_ids(allocator) == list(range(1, PAGES + 1))


def test_clearing_forgets_ids_and_blocks(allocator: Any) -> None:
    (page,) = allocator.take_pages(1)
    allocator.block_pool.bind_dense(0, page, allocator.block_pool.allocate(DENSE))
    allocator.clear()
    assert free_ids(allocator) == list(range(1, PAGES + 1))
    assert allocator.block_pool.used_bytes == 0 and not allocator.block_pool.spans


def test_it_is_built_on_our_pool_alone() -> None:
    from tests.support.radix_engine import HieraAllocator

    with pytest.raises(TypeError, match="needs a HieraKVPool, got str"):
        HieraAllocator(64, kvcache="a pool")  # type: ignore[arg-type]
