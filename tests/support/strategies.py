"""Hypothesis strategies for rules and policies."""

from __future__ import annotations

from hypothesis import strategies as st

from hs_runtime.policies import SparsityPolicy
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.contents import policy

shares = st.one_of(st.sampled_from([0, 1, 250, 500, 750, 999, 1000]), st.integers(0, 1000))

# Pages of 4 tokens: every boundary is near.
small_rules = st.builds(
    Lifecycle,
    st.just(4),
    st.sampled_from([0, 4, 8, 16]),
    st.sampled_from([4, 8, 12, 20]),
    st.sampled_from([16, 24]),
)


@st.composite
def lifecycles(draw: st.DrawFn) -> Lifecycle:
    segment = 128 * draw(st.integers(1, 10))
    sink = 64 * draw(st.integers(0, segment // 64))
    return Lifecycle(64, sink, 64 * draw(st.integers(1, 8)), segment)


@st.composite
def policies(draw: st.DrawFn) -> SparsityPolicy:
    """Decode is never below prefill."""
    low = draw(shares), draw(shares)
    high = (draw(st.one_of(st.just(s), st.integers(s, 1000), st.just(1000))) for s in low)
    return policy(low, (next(high), next(high)))
