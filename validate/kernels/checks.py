"""What every launch checks, and how it is done: where kernels run, types, and refusals in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from overlapsim.validate.kernels.gemm import gemm_kernel
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction

from overlapsim.errors import StrategyError

INTERPRETED: Final = isinstance(gemm_kernel, InterpretedFunction)
"""Whether kernels run in Triton's interpreter: settled when this is first imported."""
INTERPRETER_PROGRAMS: Final = 4
"""Programs of a persistent kernel in the interpreter, where there are no SMs to count."""
INTERPRETER_POLLS: Final = 100
"""Polls of a wait in the interpreter, where nothing can change any more once it began."""
FLOAT_TYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
MOST_US: Final = 2**31 - 1


def check_place(*tensors: Tensor) -> None:
    """Refuse tensors of several devices, and CPU tensors without the interpreter.

    Raises
    ------
    StrategyError
        If a kernel cannot reach all of them.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise StrategyError(f"tensors on {', '.join(sorted(map(str, devices)))}; expected all on one device")
    if devices and next(iter(devices)).type != "cuda" and not INTERPRETED:
        raise StrategyError(
            "Triton kernels on CPU tensors: they run only in the interpreter; set TRITON_INTERPRET=1 before "
            "overlapsim.validate.kernels.launch is first imported, or use a GPU"
        )


def check_floats(what: str, *tensors: Tensor) -> None:
    """Refuse types that the kernels do not compute in, and bf16 where it would be silently wrong.

    Raises
    ------
    StrategyError
        If types differ, are not fp16, bf16 or fp32, or are bf16 in the interpreter.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1 or not kinds <= set(FLOAT_TYPES):
        raise StrategyError(
            f"{what} of types {', '.join(sorted(map(str, kinds)))}; expected one of fp16, bf16, fp32 for all"
        )
    if INTERPRETED and torch.bfloat16 in kinds:
        raise StrategyError(
            f"{what} in bf16: Triton's interpreter multiplies bf16 wrongly without a word; use fp16 or fp32, or a GPU"
        )


def check_int32(what: str, tensor: Tensor, least: int) -> None:
    """Refuse a table, counter or flag that a kernel would read past its end or at another width.

    Raises
    ------
    StrategyError
        If it is not contiguous int32 of at least `least` entries.
    """
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.numel() < least:
        raise StrategyError(
            f"{what}: {tensor.dtype} of shape {tuple(tensor.shape)}; expected contiguous int32 of at least {least} "
            "entries"
        )


def check_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape.

    Raises
    ------
    StrategyError
        If shapes differ.
    """
    if tuple(tensor.shape) != shape:
        raise StrategyError(f"{what} has shape {tuple(tensor.shape)}; expected {shape}")


def check_packed(packed: Tensor, elements: int) -> None:
    """Refuse a packed buffer that is too small or has holes.

    Raises
    ------
    StrategyError
        If it is not contiguous or has fewer than `elements` elements.
    """
    if not packed.is_contiguous() or packed.numel() < elements:
        raise StrategyError(
            f"a packed buffer of {packed.numel()} elements"
            f"{'' if packed.is_contiguous() else ', not contiguous'}; expected {elements} elements in one piece"
        )


def device_sms(tensor: Tensor) -> int:
    """SMs of the tensor's GPU; a few in the interpreter."""
    if INTERPRETED:
        return INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def timeout_us(timeout_s: float) -> int:
    """Microseconds of a timeout as kernels take it: 32 bits, hence at most half an hour.

    Raises
    ------
    StrategyError
        If it is not above zero or too long.
    """
    if not 0 < timeout_s <= MOST_US / 1e6:
        raise StrategyError(f"a timeout of {timeout_s} s; expected more than 0 and at most {MOST_US / 1e6:.0f} s")
    return max(1, round(timeout_s * 1e6))


def launch(
    kernel: Any, programs: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any], device: torch.device
) -> None:
    """Enqueue a kernel on the current stream of `device`.

    Multiply-adds are fused whatever the default of the Triton version.

    Raises
    ------
    StrategyError
        If the GPU lacks the resources; the message names kernel, GPU, what is needed and what there is.
    """
    given = dict(options)
    if INTERPRETED:
        given.pop("num_warps", None)
        given.pop("num_stages", None)
        kernel[programs](*arguments, **given)
        return
    try:
        # The launch goes to the current device, which need not be the tensors'.
        with torch.cuda.device(device):
            kernel[programs](*arguments, **given, enable_fp_fusion=True)
    except OutOfResources as error:
        name = torch.cuda.get_device_name(device)
        major, minor = torch.cuda.get_device_capability(device)
        raise StrategyError(
            f"{kernel.__name__} needs {error.required} of {error.name}; {name} (sm_{major}{minor}) has {error.limit}: "
            "take a smaller tile or fewer stages"
        ) from None
