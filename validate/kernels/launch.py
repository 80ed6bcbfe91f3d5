"""What a host calls: every kernel as a function of torch tensors, on a GPU or in Triton's interpreter.

Importing this module needs torch and Triton; `config` and the orders need neither. All functions only enqueue work on
the current stream and never wait for the device, so that they can be captured into a CUDA graph; `check_status` alone
reads back. With ``TRITON_INTERPRET=1`` set before the first import the same functions run on CPU tensors, one program
after another: a producer and a waiting consumer must then be called one after the other.

A wave-group run is::

    order, restore = TileOrder.from_settings(settings), RestoreOrder.from_settings(settings)
    counters, status = new_counters(order.num_groups), new_status(order.num_groups)      # zeroed once
    signalled_gemm(a, b, packed, order, counters)                                        # compute stream
    wait_group(counters, g, order.group_tiles[g], status)                                # communication stream, each g
    ... the library's collective on packed[order.group_start[g] : order.group_start[g + 1]] ...
    restored_rmsnorm(packed, restore, weight, out)                                       # compute stream, after all
    check_status(status)                                                                 # names a group that hung
"""

from overlapsim.validate.kernels.arrival_order import ArrivalOrder
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.launch_gemm import arrival_gemm, grouped_gemm, signalled_gemm
from overlapsim.validate.kernels.launch_restore import restored_add, restored_rmsnorm
from overlapsim.validate.kernels.launch_signal import (
    check_status,
    hold_sms,
    new_counters,
    new_status,
    raise_flag,
    wait_group,
)
from overlapsim.validate.kernels.restore_order import RestoreOrder
from overlapsim.validate.kernels.tile_order import TileOrder

__all__ = [
    "ArrivalOrder",
    "GemmConfig",
    "RestoreOrder",
    "TileOrder",
    "arrival_gemm",
    "check_status",
    "grouped_gemm",
    "hold_sms",
    "new_counters",
    "new_status",
    "raise_flag",
    "restored_add",
    "restored_rmsnorm",
    "signalled_gemm",
    "wait_group",
]
