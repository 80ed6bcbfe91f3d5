"""Times a part of what a GPU does: a kernel between its launch behind something else and the end of that."""

# torch's events have no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch
from overlapsim.validate.measure import Timing, summary
from overlapsim.validate.ranks import Ranks
from overlapsim.validate.runners.lanes import Lanes
from torch import Tensor

REPEATS: Final = 10
QUEUE_CYCLES: Final = 2_000_000
"""The GPU waits this long (about 1 ms) while the host fills its queues, so that no launch is in the time."""


class Inside:
    """Times calls that other work surrounds, with events on the stream that they run on.

    Parameters
    ----------
    device, lanes : streams of one GPU; on the CPU, in a rehearsal, one call is timed by the host
    """

    def __init__(self, device: torch.device, lanes: Lanes) -> None:
        self._device, self._lanes = device, lanes

    def time(
        self,
        run: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[], None],
        *,
        aside: bool = False,
        backgrounds: list[Any] | None = None,
    ) -> Timing:
        """Time of `run` alone.

        Parameters
        ----------
        run : what is timed
        before, after : enqueue what surrounds it
        aside : `run` goes to the communication stream
        backgrounds
            `before` appends the event that ends its background each time; a sample that lasts longer than the
            background was not beside it, and makes the time not valid

        Returns
        -------
        Timing
            The first sample, in which kernels may be compiled, is thrown away.
        """
        run()
        if self._device.type != "cuda":
            before()
            begin = time.perf_counter()
            run()
            seconds = [time.perf_counter() - begin]
            after()
            return summary(seconds)
        pairs = []
        for _ in range(REPEATS + 1):
            self._flush.zero_()
            torch.cuda._sleep(QUEUE_CYCLES)
            before()
            stream: AbstractContextManager[Any] = self._lanes.communication() if aside else nullcontext()
            with stream:
                first = recorded()
                run()
                last = recorded()
            after()
            torch.cuda.synchronize()
            pairs.append((first, last))
        timing = summary([first.elapsed_time(last) * 1e-3 for first, last in pairs[1:]])
        ends = [last for _, last in pairs[1:]]
        if backgrounds and not all(end.elapsed_time(over) > 0 for end, over in zip(ends, backgrounds[1:], strict=True)):
            return replace(timing, whole=False)
        return timing

    @cached_property
    def _flush(self) -> Tensor:
        size = 2 * int(torch.cuda.get_device_properties(self._device).L2_cache_size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class Rehearsal:
    """Takes the place of a sampler where times mean nothing: every call is made once.

    Parameters
    ----------
    ranks : of the run
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def time(self, run: Callable[[], Any], what: str, *, repeats: int | None = None) -> Timing:
        """Call once."""
        begin = time.perf_counter()
        run()
        return summary([time.perf_counter() - begin] * (repeats or 1))


def recorded() -> Any:
    """An event with a time, recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
