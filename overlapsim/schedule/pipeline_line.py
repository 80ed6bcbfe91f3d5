"""One device's order in the making: micro-batches of each of its stages are counted up, put-off halves wait in line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from overlapsim.schedule.pipeline import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Slot


class Line:
    """Slots of one device; its stages are numbered 0, 1, ... here and called chunks.

    Parameters
    ----------
    stages : stage of the model of each chunk
    first_micro_batch : number of the first micro-batch of each chunk, 0 unless copies share a device
    """

    def __init__(self, stages: Sequence[int], first_micro_batch: Sequence[int] | None = None) -> None:
        first = [0] * len(stages) if first_micro_batch is None else first_micro_batch
        self.slots: list[Slot] = []
        self._stages = stages
        self._next_forward = list(first)
        self._next_backward = list(first)
        self._put_off: deque[tuple[int, int]] = deque()

    @property
    def num_put_off(self) -> int:
        """Weight gradients whose input gradient has been run, and that wait."""
        return len(self._put_off)

    def forward(self, chunk: int = 0, times: int = 1) -> None:
        """Run the forward of the next `times` micro-batches of `chunk`."""
        for _ in range(times):
            self.slots.append((self._forward(chunk),))

    def backward(self, chunk: int = 0, times: int = 1) -> None:
        """Run the whole backward of the next `times` micro-batches of `chunk`."""
        for _ in range(times):
            self.slots.append((self._backward(chunk, BACKWARD),))

    def pair(self, forward_chunk: int, backward_chunk: int) -> None:
        """Run a forward together with a whole backward."""
        self.slots.append((self._forward(forward_chunk), self._backward(backward_chunk, BACKWARD)))

    def input_grad(self, chunk: int = 0) -> None:
        """Run the half of the backward that others wait for, and put off the other half."""
        action = self._backward(chunk, INPUT_GRAD)
        self.slots.append((action,))
        self._put_off.append((chunk, action.micro_batch))

    def weight_grad(self, chunk: int | None = None) -> None:
        """Run the weight gradient that waits longest, of `chunk` if given; nothing if none waits."""
        for waiting in self._put_off:
            if chunk is None or waiting[0] == chunk:
                self._put_off.remove(waiting)
                self.slots.append((Action(WEIGHT_GRAD, self._stages[waiting[0]], waiting[1]),))
                return

    def all_weight_grads(self, chunk: int | None = None) -> None:
        """Run the weight gradients that wait, of `chunk` if given."""
        for _ in range(sum(chunk in (None, waiting) for waiting, _ in self._put_off)):
            self.weight_grad(chunk)

    def _forward(self, chunk: int) -> Action:
        micro_batch = self._next_forward[chunk]
        self._next_forward[chunk] = micro_batch + 1
        return Action(FORWARD, self._stages[chunk], micro_batch)

    def _backward(self, chunk: int, kind: int) -> Action:
        micro_batch = self._next_backward[chunk]
        self._next_backward[chunk] = micro_batch + 1
        return Action(kind, self._stages[chunk], micro_batch)
