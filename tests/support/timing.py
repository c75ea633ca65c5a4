"""The only timer: warm-up, CUDA graph replay, median and spread."""

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
