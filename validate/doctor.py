"""What this machine can run: found out by asking, never by trying work that could hang."""

from __future__ import annotations

import importlib
import os
import platform
import time
from typing import Any, Final

from overlapsim.validate.idle import BUSY_SHARE, CpuTime, others_share
from overlapsim.validate.output import cpu_name

from overlapsim import __version__
from overlapsim.units import format_bytes

INSTALL: Final = "install it with `pip install 'overlapsim[validate]'`"
LEAST_CAPABILITY: Final = (8, 0)
"""Older GPUs have no bf16 tensor cores and no asynchronous copies, which the kernels use."""


def examine() -> dict[str, Any]:
    """Everything `validate doctor` prints.

    Returns
    -------
    dict
        ``versions`` by name, lines of ``machine`` and ``gpus``, ``can_run``, and ``missing`` with what to do.
    """
    torch, triton = _module("torch"), _module("triton")
    missing, gpus = list[str](), list[str]()
    versions = {"overlapsim": __version__, "python": platform.python_version()}
    versions |= {name: str(m.__version__) for name, m in (("torch", torch), ("triton", triton)) if m is not None}
    for name, module in (("torch", torch), ("triton", triton)):
        if module is None:
            missing.append(f"{name}: {INSTALL}")
    can_run = ["plan PLAN --check, loop's calibration and prediction: no torch needed"]
    if torch is not None:
        found = _gpus(torch, versions, missing)
        gpus += found
        _say_what_runs(torch, triton, bool(found), can_run, missing)
    return {
        "versions": versions,
        "machine": _machine(missing),
        "gpus": gpus,
        "can_run": can_run,
        "missing": missing,
    }


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _gpus(torch: Any, versions: dict[str, str], missing: list[str]) -> list[str]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees none (driver, container, CUDA_VISIBLE_DEVICES)" if built else "torch is built for CPUs"
        missing.append(f"GPUs: {why}; plans run on CPU tensors over gloo, which says nothing about GPUs")
        return []
    versions["cuda"] = str(torch.version.cuda or torch.version.hip)
    if torch.distributed.is_nccl_available():
        import torch.cuda.nccl

        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    lines, count = list[str](), torch.cuda.device_count()
    for index in range(count):
        of = torch.cuda.get_device_properties(index)
        lines.append(
            f"gpu {index}: {of.name}, sm_{of.major}{of.minor}, {of.multi_processor_count} SMs, "
            f"{format_bytes(of.total_memory)}, L2 {format_bytes(of.L2_cache_size)}"
        )
        if (of.major, of.minor) < LEAST_CAPABILITY:
            missing.append(f"gpu {index}: the Triton kernels need sm_80 or newer; vendor kernels run")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    if pairs:
        direct = sum(bool(torch.cuda.can_device_access_peer(i, j)) for i, j in pairs)
        lines.append(f"peer access: {direct} of {len(pairs)} ordered pairs of GPUs read each other directly")
    return lines


def _say_what_runs(torch: Any, triton: Any, has_gpu: bool, can_run: list[str], missing: list[str]) -> None:
    distributed = torch.distributed.is_available()
    if not distributed:
        missing.append("torch.distributed: this build of torch has none; nothing runs on several ranks")
        return
    if torch.distributed.is_gloo_available():
        can_run.append("gemm, collective, contention, overlap, plan, loop over gloo on CPU tensors")
    else:
        missing.append("gloo: this build of torch has none, and host-side meetings of ranks need it")
    if has_gpu and torch.distributed.is_nccl_available():
        can_run.append("the same over NCCL, one rank a GPU (torchrun --nproc-per-node GPUS)")
    elif has_gpu:
        missing.append("NCCL: this build of torch has none; ranks cannot talk over GPUs")
    if triton is None:
        return
    can_run.append("compile-matrix: kernels for sm_80 to sm_100, without a GPU")
    if has_gpu:
        can_run.append("wave groups with the signalled Triton kernels")
    else:
        can_run.append("wave groups with the Triton kernels in their interpreter, small shapes (TRITON_INTERPRET=1)")


def _machine(missing: list[str]) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = CpuTime.now()
    own = time.process_time()
    time.sleep(0.5)
    share = others_share(before, CpuTime.now(), time.process_time() - own)
    if share > BUSY_SHARE:
        missing.append(f"quiet: others take {share:.0%} of the CPU time; CPU times would be those of a shared machine")
    return [f"cpu: {cpu_name()}, {cores} cores usable, {share:.0%} taken by others"]
