"""Where computation and communication run side by side: two streams of a GPU, or a thread beside the library's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Start = Callable[[], Sequence[Any]]
"""Starts collectives and returns their handles (``torch.distributed.Work``)."""


class Lanes(ABC):
    """Two lanes: the caller's, which computes, and one beside it, which communicates."""

    @abstractmethod
    def fork(self) -> None:
        """Let the communication lane go on from where computation is now."""

    @abstractmethod
    def start(self, collectives: Start) -> Any:
        """Run collectives on the communication lane, behind what it holds; returns a ticket for `wait`."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Let computation wait for what one ticket stands for."""

    @abstractmethod
    def join(self) -> None:
        """Let computation wait for all communication so far."""

    def inline(self, collectives: Start) -> None:
        """Run collectives on the computing lane, which waits for them."""
        for work in collectives():
            work.wait()

    @contextmanager
    def communication(self) -> Iterator[None]:
        """What is launched inside runs on the communication lane."""
        yield

    def spread(self, streams: int) -> None:  # noqa: B027
        """Let further computing lanes go on from where computation is now."""

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """What is launched, forked from or waited for inside belongs to a computing lane; 0 is the caller's."""
        yield

    def collect(self, streams: int) -> None:  # noqa: B027
        """Let the caller's lane wait for the further ones."""


class HostLanes(Lanes):
    """CPU tensors: the computing thread starts collectives, threads of the library move them."""

    def __init__(self) -> None:
        self._pending: list[Any] = []

    def fork(self) -> None:
        """Nothing to do: what is computed is done before the next line runs."""

    def start(self, collectives: Start) -> Any:
        """Start and go on."""
        works = collectives()
        self._pending.extend(works)
        return works

    def wait(self, ticket: Any) -> None:
        """Wait for some handles; each only once, since gloo's sends end one wait each."""
        waited = {id(work) for work in ticket}
        self._pending = [work for work in self._pending if id(work) not in waited]
        for work in ticket:
            work.wait()

    def join(self) -> None:
        """Wait for every handle."""
        # Taken off first: a handle that fails must not be waited for again by the next run.
        pending, self._pending = self._pending, []
        self.wait(pending)


class CudaLanes(Lanes):
    """Two streams of one GPU, tied by events so that a CUDA graph captures both."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # The lowest number is the highest priority; CUDA clips what a device does not have.
        self._comm = torch.cuda.Stream(device=device, priority=-5)  # type: ignore[no-untyped-call]
        self._device = device
        self._further: list[torch.cuda.Stream] = []

    def fork(self) -> None:
        """Communication waits for what computation has been given."""
        import torch

        self._comm.wait_stream(torch.cuda.current_stream())

    def start(self, collectives: Start) -> Any:
        """Put collectives on the communication stream."""
        import torch

        with self.communication():
            for work in collectives():
                # Only the stream waits here, not the host.
                work.wait()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return done

    def wait(self, ticket: Any) -> None:
        """Computation waits for an event of the communication stream."""
        import torch

        torch.cuda.current_stream().wait_event(ticket)

    def join(self) -> None:
        """Computation waits for the communication stream."""
        import torch

        torch.cuda.current_stream().wait_stream(self._comm)

    @contextmanager
    def communication(self) -> Iterator[None]:
        """What is launched inside goes to the communication stream."""
        import torch

        with torch.cuda.stream(self._comm):
            yield

    def spread(self, streams: int) -> None:
        """Further streams wait for the current one."""
        import torch

        while len(self._further) < streams - 1:
            self._further.append(torch.cuda.Stream(device=self._device))  # type: ignore[no-untyped-call]
        for stream in self._further[: streams - 1]:
            stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """What is launched inside goes to a further stream; 0 is the current one."""
        import torch

        if number == 0:
            yield
            return
        with torch.cuda.stream(self._further[number - 1]):
            yield

    def collect(self, streams: int) -> None:
        """The current stream waits for the further ones."""
        import torch

        for stream in self._further[: streams - 1]:
            torch.cuda.current_stream().wait_stream(stream)


def lanes_of(device: torch.device) -> Lanes:
    """Lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else HostLanes()
