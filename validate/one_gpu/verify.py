"""Numbers before times: every kernel against a float64 reference on this very device, and the signals under stress."""

# torch's clock has no types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from overlapsim.validate.kernels import launch
from overlapsim.validate.kernels.arrival_order import ArrivalOrder
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.restore_order import RestoreOrder
from overlapsim.validate.kernels.tile_order import TileOrder
from overlapsim.validate.numerics import ROUNDOFF, SLACK, NumericsError
from overlapsim.validate.one_gpu.cases import RANKS
from overlapsim.validate.plans import TORCH_TYPES
from overlapsim.validate.runners.lanes import lanes_of
from torch import Tensor

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import DeadlockError
from overlapsim.schedule.reorder import ReorderMap, SubtileMap, SubtokenMap, TileMap, collective_map

STRESS_RUNS: Final = 30
SHORT_S: Final = 0.05
DELAY_CYCLES: Final = 3_000_000
"""A shard comes so much later (about 2 ms) than the GEMM that waits for it."""


class Verifier:
    """Checks on one device.

    Parameters
    ----------
    device : a GPU, or the CPU in Triton's interpreter
    num_sms : of the GPU
    """

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self.device, self.num_sms = device, num_sms
        self.on_gpu = device.type == "cuda"
        self.lanes = lanes_of(device)
        # Ragged in every dimension; small in the interpreter.
        self.sizes = (1000, 520, 328) if self.on_gpu else (50, 40, 24)
        self.config = GemmConfig(128, 128, 64) if self.on_gpu else GemmConfig(16, 16, 16)
        self._seed = 0

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Every check by name, cheapest first."""
        types = ("fp16", "fp32", *(("bf16", "tf32") if self.on_gpu else ()))
        for kind in ("all_reduce", "reduce_scatter", "all_to_all"):
            for dtype in types:
                yield f"{kind} order, {dtype}", lambda kind=kind, dtype=dtype: self.order(kind, dtype)  # type: ignore[misc]
        yield "operands of any stride", self.strides
        yield "experts", self.experts
        yield "products summed in fp16", self.half_sums
        yield "wave groups under stress", self.groups
        yield "arrival of shards", self.arrival
        yield "a count that never comes", self.missing_count
        yield "a count that is passed", self.passed_count
        yield "kernels that hold SMs", self.holders

    def order(self, kind: str, dtype: str) -> None:
        """Store in the order of a map, count, wait, and undo the order in both consumers."""
        m, n, k = self.sizes
        config = self.config
        grid = TileGrid(m, n, config.bm, config.bn)
        third = max(1, grid.num_tiles // 3)
        reorder = collective_map(kind, grid, (third, grid.num_tiles - third), ranks=RANKS, swizzle=2)
        order = TileOrder.from_map(reorder, config, rank=1, device=self.device)
        a, b = self._random(dtype, m, k), self._random(dtype, k, n)
        for persistent in (False, True):
            packed = self._poisoned(a, order.packed_elements)
            counters, status = launch.new_counters(2, self.device), launch.new_status(2, self.device)
            launch.signalled_gemm(a, b, packed, order, counters, persistent=persistent, tf32=dtype == "tf32")
            if counters.tolist() != list(order.group_tiles):
                raise NumericsError(f"counters are {counters.tolist()}; expected {list(order.group_tiles)}")
            for group, tiles in enumerate(order.group_tiles):
                launch.wait_group(counters, group, tiles, status)
            launch.check_status(status, order.group_tiles)
            at = torch.from_numpy(send_offsets(reorder, 1)).to(self.device)
            self._compare("C", packed[at], a.double() @ b.double(), k, dtype)
        self._consume(reorder, dtype)

    def _consume(self, reorder: ReorderMap, dtype: str) -> None:
        restore = RestoreOrder.from_map(reorder, rank=1, device=self.device)
        rows = self._random(dtype, restore.rows, restore.n)
        residual, weight = self._random(dtype, restore.rows, restore.n), self._random(dtype, restore.n)
        received = self._poisoned(rows, restore.packed_elements)
        received[torch.from_numpy(receive_offsets(reorder, 1)).to(self.device)] = rows
        out = self._poisoned(rows, restore.rows, restore.n)
        launch.restored_add(received, restore, residual, out)
        total = rows.double() + residual.double()
        self._compare("restored sum", out, total, 9, dtype)
        normed, stored = torch.empty_like(out), torch.empty_like(out)
        launch.restored_rmsnorm(received, restore, weight, normed, residual=residual, residual_out=stored)
        scale = (total.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
        self._compare("restored norm", normed, total / scale * weight.double(), 81, dtype)
        self._compare("stored sum", stored, total, 9, dtype)

    def strides(self) -> None:
        """A by columns, every second column of B, C by columns."""
        m, n, k = self.sizes
        a, b = self._random("fp16", k, m).T, self._random("fp16", k, 2 * n)[:, ::2]
        out = self._poisoned(a, n, m).T
        launch.signalled_gemm(a, b, out, self._plain(m, n), None, store="row_major")
        self._compare("C", out, a.double() @ b.double(), k, "fp16")

    def half_sums(self) -> None:
        """Sums of products in fp16, whose error grows with their number."""
        m, n, k = self.sizes
        a, b, config = self._random("fp16", m, k), self._random("fp16", k, n), self.config
        out = self._poisoned(a, m, n)
        half = GemmConfig(config.bm, config.bn, config.bk, accumulate="fp16")
        launch.signalled_gemm(a, b, out, self._plain(m, n, half), None, store="row_major")
        self._compare("C", out, a.double() @ b.double(), k, "fp16", summed_in="fp16")

    def experts(self) -> None:
        """Rows of tiles with the weights of three experts, one without any."""
        _, n, k = self.sizes
        bm = self.config.bm
        expert = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=self.device)
        a, b = self._random("fp16", 4 * bm, k), self._random("fp16", 3, k, n)
        out, counters = self._poisoned(a, 4 * bm, n), launch.new_counters(1, self.device)
        launch.grouped_gemm(a, b, expert, out, self._plain(4 * bm, n), counters, store="row_major")
        blocks = [
            a[i * bm : (i + 1) * bm].double() @ b[max(e, 0)].double() * (e >= 0) for i, e in enumerate((2, -1, 0, 1))
        ]
        self._compare("C", out, torch.cat(blocks), k, "fp16")

    def groups(self) -> None:
        """Copy every group away the moment it is signalled, again and again: late stores would leave poison behind."""
        m, n, k = (4096, 4096, 512) if self.on_gpu else self.sizes
        grid = TileGrid(m, n, self.config.bm, self.config.bn)
        cuts = [grid.num_tiles * part // 8 for part in range(9)]
        sizes = [end - begin for begin, end in itertools.pairwise(cuts) if end > begin]
        reorder = collective_map("all_reduce", grid, sizes, ranks=RANKS, swizzle=4)
        order = TileOrder.from_map(reorder, self.config, device=self.device)
        counters = launch.new_counters(order.num_groups, self.device)
        status = launch.new_status(order.num_groups, self.device)
        a, b = self._random("fp16", m, k), self._random("fp16", k, n)
        packed, received = self._poisoned(a, order.packed_elements), self._poisoned(a, order.packed_elements)
        for _ in range(STRESS_RUNS if self.on_gpu else 1):
            packed.fill_(math.nan)
            received.fill_(math.nan)
            self.lanes.fork()
            launch.signalled_gemm(a, b, packed, order, counters)
            for group, tiles in enumerate(order.group_tiles):
                first, end = order.group_start[group : group + 2]
                with self.lanes.communication():
                    launch.wait_group(counters, group, tiles, status)
                    # Through SMs, as the kernels of a collective read; a copy engine would read past their caches.
                    torch.add(packed[first:end], 0, out=received[first:end])
            self.lanes.join()
            launch.check_status(status, order.group_tiles)
            if not torch.equal(packed, received):
                raise NumericsError("a group was signalled before all of its tiles were stored")
        at = torch.from_numpy(send_offsets(reorder, 0)).to(self.device)
        self._compare("C", packed[at], a.double() @ b.double(), k, "fp16")

    def arrival(self) -> None:
        """Let shards come while the GEMM already waits for them."""
        m, n, k = self.sizes
        order = ArrivalOrder.by_arrival(m, n, self.config, (2, 1, 0, 3), device=self.device)
        a, b = self._random("fp16", m, k), self._random("fp16", k, n)
        gathered, out = self._poisoned(a, m, k), self._poisoned(a, m, n)
        flags, status = launch.new_counters(4, self.device), launch.new_status(4, self.device)

        def bring() -> None:
            for shard in (2, 1, 0, 3):
                rows = slice(shard * order.shard_rows, (shard + 1) * order.shard_rows)
                if self.on_gpu:
                    torch.cuda._sleep(DELAY_CYCLES)
                gathered[rows] = a[rows]
                launch.raise_flag(flags, shard)

        self.lanes.fork()
        with self.lanes.communication():
            bring()
        sms = max(1, self.num_sms - 8) if self.on_gpu else None
        launch.arrival_gemm(gathered, b, out, order, flags, status, num_sms=sms)
        self.lanes.join()
        launch.check_status(status, (1, 1, 1, 1), what="shard")
        self._compare("C", out, a.double() @ b.double(), k, "fp16")

    def missing_count(self) -> None:
        """Wait for more tiles than there are: it must end, and say which group."""
        counters, status = launch.new_counters(3, self.device), launch.new_status(3, self.device)
        launch.raise_flag(counters, 1, 6)
        launch.wait_group(counters, 1, 7, status, timeout_s=SHORT_S)
        self._must_fail(status, "group 1 was not complete in time: 6 of 7")

    def passed_count(self) -> None:
        """Wait for fewer tiles than were counted: it must end at once."""
        counters, status = launch.new_counters(2, self.device), launch.new_status(2, self.device)
        launch.raise_flag(counters, 0, 9)
        launch.wait_group(counters, 0, 7, status)
        self._must_fail(status, "group 0 passed its count: 9 of 7")

    def holders(self) -> None:
        """All but one SM held, and let go."""
        started, stop = launch.new_counters(1, self.device), launch.new_counters(1, self.device)
        status = launch.new_status(1, self.device)
        held = self.num_sms - 1 if self.on_gpu else 3
        self.lanes.fork()
        with self.lanes.communication():
            launch.hold_sms(held, started, stop)
        launch.wait_group(started, 0, held, status)
        launch.raise_flag(stop, 0)
        self.lanes.join()
        launch.check_status(status, (held,))

    def _must_fail(self, status: Tensor, message: str) -> None:
        try:
            launch.check_status(status, (7, 7, 7))
        except DeadlockError as error:
            if not str(error).startswith(message):
                raise NumericsError(f"a wait ended with {str(error)[:80]!r}; expected {message!r}") from None
            return
        raise NumericsError(f"a wait went through; expected {message!r}")

    def _plain(self, m: int, n: int, config: GemmConfig | None = None) -> TileOrder:
        config = config or self.config
        grid = TileGrid(m, n, config.bm, config.bn)
        reorder = collective_map("all_reduce", grid, (grid.num_tiles,), ranks=RANKS)
        return TileOrder.from_map(reorder, config, device=self.device)

    def _random(self, dtype: str, *shape: int) -> Tensor:
        self._seed += 1
        generator = torch.Generator(device=self.device).manual_seed(self._seed)
        values = torch.rand(*shape, generator=generator, device=self.device)
        return (2 * values - 1).to(getattr(torch, TORCH_TYPES[dtype]))

    def _poisoned(self, like: Tensor, *shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=like.dtype, device=self.device)

    def _compare(
        self, what: str, got: Tensor, right: Tensor, terms: int, dtype: str, *, summed_in: str = "fp32"
    ) -> None:
        """Hold against float64 within what rounding explains for sums of `terms` products of numbers in (-1, 1)."""
        rounded = ROUNDOFF[dtype] + ROUNDOFF[summed_in] * math.sqrt(terms) + 2.0**-24
        limit = SLACK * math.sqrt(terms) / 3 * rounded
        error = float((got.double() - right).abs().max()) if got.numel() else 0.0
        # Not-a-number compares false with everything.
        if not error <= limit:
            raise NumericsError(
                f"{what} in {dtype} is off by {error:.3g} from the float64 reference; rounding allows {limit:.3g}"
            )


def send_offsets(reorder: ReorderMap, rank: int) -> Any:
    """Where every element of a rank's C stands in its packed buffer, by the map's own formula."""
    if isinstance(reorder, SubtokenMap):
        rows = reorder.sources[rank].rows
        return reorder.send_offset(rank, np.arange(rows)[:, None], np.arange(reorder.n))
    row, column = np.arange(reorder.grid.m)[:, None], np.arange(reorder.grid.n)
    return reorder.offset(row, column) if isinstance(reorder, TileMap) else reorder.send_offset(row, column)


def receive_offsets(reorder: ReorderMap, rank: int) -> Any:
    """Where every element of a rank's consumer stands in what it received, by the map's own formula."""
    if isinstance(reorder, SubtokenMap):
        tokens = len(reorder.tokens(rank)[0])
        return reorder.receive_offset(rank, np.arange(tokens)[:, None], np.arange(reorder.n))
    if isinstance(reorder, SubtileMap):
        mine = np.flatnonzero(reorder.row_rank == rank)
        return reorder.receive_offset(mine[:, None], np.arange(reorder.grid.n))
    return send_offsets(reorder, rank)
