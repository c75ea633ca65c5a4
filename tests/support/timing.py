"""The only timers: warm-up, CUDA graph replay or single launches, median and spread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over repeats, and (max - min) / median."""

    micros: float
    spread: float


def time_calls(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int = 4,
    repeats: int = 7,
    graph: bool = True,
) -> Timing:
    """The time of one of `calls`, which do the same work on different data.

    Calling them in turn keeps one call's data from lying in L2 for the next. With `graph`, `rounds`
    turns are captured and replayed, as a decode step is; else they are launched one by one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()

    def turns() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    run = turns
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            turns()
        run = captured.replay
    run()
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    middle = median(samples)
    return Timing(middle, (max(samples) - min(samples)) / middle)


def time_one_by_one(call: Callable[[], object]) -> Timing:
    """The time of a single launch between two events, with nothing in L2: what triton's timer
    gives, which is more than a call in a captured sequence takes. The spread is that of the middle
    three fifths."""
    from triton.testing import do_bench

    low, middle, high = do_bench(call, warmup=10, rep=60, quantiles=[0.2, 0.5, 0.8])
    return Timing(1e3 * middle, (high - low) / middle)
