"""Hardware queues of a step: how many a GPU's streams share (``CUDA_DEVICE_MAX_CONNECTIONS``)."""

from __future__ import annotations

from dataclasses import replace

from overlapsim.errors import UsageError
from overlapsim.step.inputs import StepInputs


def with_queues(inputs: StepInputs, number: int | None) -> StepInputs:
    """The step with `number` hardware queues; None leaves every stream its own.

    Raises
    ------
    UsageError
        If the number is below 1.
    """
    if number is None:
        return inputs
    if number < 1:
        raise UsageError(f"a GPU has {number} hardware queues; expected at least 1")
    setting = replace(inputs.composition.setting, num_queues=number)
    return replace(inputs, composition=replace(inputs.composition, setting=setting))
