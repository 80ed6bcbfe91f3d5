"""What a GEMM costs: the vendor's kernel, a strategy's own, a piece of one; measured where the user measured it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from overlapsim.cost.base import MEASURED, Spread, hbm_rate
from overlapsim.cost.gemm import GemmCost, Tile, checked_tile, gemm_cost, lower_bound_s, template_gemm_cost
from overlapsim.cost.grouped import GroupedCost, grouped_gemm_cost
from overlapsim.cost.price_state import PriceState
from overlapsim.units import dtype_bytes
from overlapsim.workload.operators import ADDED_BYTES, GemmOp, GroupedGemmOp

# Time of a piece of a GEMM, or of another tile, over the whole's: what models of neighbouring shapes differ by
# (hwprofiles/SOURCES.md, AIC-GEMM), and the fitted chunked rows of the FlashOverlap artifact.
PIECES: Final = Spread(0.96, 1.06, "residual")
# A signalled kernel over the vendor's: fitted wave_group rows of the same artifact, one shape left out.
TEMPLATE: Final = Spread(0.95, 1.08, "residual")
# Systems run by others than their authors: on the mean of nine reduce-scatters of an A800 a fused kernel took 1.27 to
# 1.31 times as long as the model says, a GEMM decomposed by ranks 1.19 to 1.21 times (hwprofiles/SOURCES.md,
# FLASH-FIG9), while authors' and maintainers' own figures agree with the model. Nothing that is known of stores,
# copies, barriers and launches explains the difference, so until a time is measured it stays in the range.
FUSED: Final = Spread(0.95, 1.30, "prior")
DECOMPOSED: Final = Spread(0.95, 1.20, "prior")
EXACT: Final = Spread(1.0, 1.0, "measured")


class GemmPrices(PriceState):
    """Prices of GEMMs; `prices.PriceBook` has them."""

    def vendor_gemm(self, op: GemmOp) -> GemmCost:
        """Cost of the vendor library's kernel on all SMs."""
        key = ("vendor", op)
        if key not in self._gemms:
            own = self.gemm is None or self._is_measured(op)
            self._gemms[key] = self._vendor_gemm(op, EXACT if own else PIECES)
        return self._gemms[key]

    def shard_gemm(self, op: GemmOp) -> GemmCost:
        """Cost of `vendor_gemm` on one rank's rows, with the range of GEMMs that were decomposed by ranks."""
        key = ("shard", op)
        if key not in self._gemms:
            self._gemms[key] = self._vendor_gemm(op, DECOMPOSED)
        return self._gemms[key]

    def _vendor_gemm(self, op: GemmOp, kernel: Spread) -> GemmCost:
        own = self.gemm is None or self._is_measured(op)
        if self.gemm_time_s is not None and own:
            cost = gemm_cost(op, self._device, tile=self.tile, measured_s=self.gemm_time_s)
        else:
            cost = self._not_below_bound(op, self._vendor_model(op).scaled(self._vendor_ratio))
        if op.adds:
            cost = cost.scaled(self._added(op, cost.duration_s))
        return self._ends(op, cost, self._vendor_spread(cost), kernel)

    def kernel_gemm(
        self, op: GemmOp, strategy: str, tile: Sequence[int] | None = None, *, slowdown: float | None = None
    ) -> GemmCost:
        """Cost of the strategy's own kernel on all SMs; its ``tile_time_s`` holds on fewer SMs too.

        Measured where the user measured it.  Else the vendor's time on this
        shape, ``template_slowdown`` times, for the fastest tile and longer by
        the model's ratio for others, plus the store of each wave, which
        nothing hides in a signalled kernel.

        Parameters
        ----------
        op : shape
        strategy : name in the registry, the key of ``kernel_time_s``
        tile : the kernel's; the book's, or else the fastest of the device's, when None
        slowdown : of a template of another family than the signalled one: its time over the vendor's, stores included

        Raises
        ------
        StrategyError
            If the tile cannot be used with this output.
        """
        tile = self._kernel_tile(op) if tile is None else checked_tile(op, tile, self._device)
        key = (strategy, op, tile, slowdown)
        if key not in self._gemms:
            self._gemms[key] = self._kernel_gemm(op, strategy, tile, slowdown)
        return self._gemms[key]

    def _kernel_gemm(self, op: GemmOp, strategy: str, tile: Tile, slowdown: float | None) -> GemmCost:
        if self.vendor_kernels:
            vendor = self.vendor_gemm(op)
            cost = self._template_model(op, tile)
            return cost.scaled(vendor.duration_s / cost.duration_s)
        measured_s = self.kernel_time_s.get(strategy)
        if measured_s is not None and self._is_measured(op) and tile[:2] == self._kernel_tile(op)[:2]:
            cost = template_gemm_cost(op, self._device, tile=tile, measured_s=measured_s)
            return self._ends(op, cost, EXACT, cost.spread)
        model = self._template_model(op, tile)
        if measured_s is not None:
            assert self.gemm is not None
            reference = self._template_model(self.gemm, self._kernel_tile(self.gemm))
            cost = model.scaled(measured_s / reference.duration_s)
            return self._ends(op, self._not_below_bound(op, cost), EXACT, PIECES)
        signalled_s = self._unmeasured_kernel_s(op, model)
        if slowdown is None:
            cost = model.scaled(signalled_s / model.duration_s)
            cost = cost.scaled(1 + self._epilogue_s(op, cost) / cost.tile_time_s)
        else:
            cost = model.scaled(signalled_s * slowdown / self._device.kernels.template_slowdown / model.duration_s)
            # A ratio of whole kernels must not make one CTA faster than its SM.
            least_s = 2.0 * tile[0] * tile[1] * op.k / self._device.peak(op.dtype, op.accumulate) * self._device.num_sms
            cost = cost.scaled(max(1.0, least_s / cost.tile_time_s))
        spread = self._template_spread if slowdown is None else FUSED
        return self._ends(op, self._not_below_bound(op, cost), self._vendor_spread(cost), spread)

    def kernel_tiles(self, op: GemmOp, strategy: str) -> tuple[Tile, ...]:
        """Tiles that the strategy's kernel may have: one if given or measured, else the device's that fit in C.

        Where none fits, the smallest: its CTAs overhang C.  Tiles that differ in BK alone cost the same here;
        the deepest stands for them.
        """
        if self.tile is not None or strategy in self.kernel_time_s:
            return (self._kernel_tile(op),)
        deepest = {tile[:2]: tile for tile in sorted(self._device.kernels.gemm_tiles, key=lambda tile: tile[2])}
        tiles = tuple(dict.fromkeys(deepest[tile[:2]] for tile in self._device.kernels.gemm_tiles))
        fitting = tuple(tile for tile in tiles if tile[0] <= op.m and tile[1] <= op.n)
        return fitting or (min(tiles, key=lambda tile: tile[0] * tile[1]),)

    def expert_gemm(self, op: GroupedGemmOp, tile: tuple[int, int] | None = None, slowdown: float = 1.0) -> GroupedCost:
        """Cost of a strategy's own grouped GEMM on all SMs, `slowdown` times the library's of this tile.

        Parameters
        ----------
        op : products in the order that the kernel takes them: an expert that it comes back to is several
        tile : (BM, BN); the fastest when None
        """
        key = ("expert", op, tile)
        if key not in self.models:
            self.models[key] = grouped_gemm_cost(
                op.rows, op.n, op.k, self._device, dtype=op.dtype, accumulate=op.accumulate, tile=tile, adds=op.adds
            )
        cost: GroupedCost = self.models[key]
        least_s = op.flop / self._device.peak(op.dtype, op.accumulate)
        if not self.vendor_kernels:
            moved = self._end("gemm", cost.spread) * self._end("kernel", FUSED) * slowdown
            cost = cost.scaled(max(moved, min(1.0, least_s / cost.duration_s)))
        return cost.scaled(self.factors.get("gemm", 1.0))

    def best_gemm_s(self, op: GemmOp) -> float:
        """Time of the fastest kernel known for `op`: the vendor's, or one that the user measured."""
        measured = (self.kernel_gemm(op, strategy) for strategy in self.kernel_time_s)
        return min(kernel.duration_s for kernel in (self.vendor_gemm(op), *measured))

    @cached_property
    def _gemms(self) -> dict[tuple[Any, ...], GemmCost]:
        return {}

    def _vendor_model(self, op: GemmOp) -> GemmCost:
        key = ("vendor", op)
        if key not in self.models:
            self.models[key] = gemm_cost(op, self._device)
        cost: GemmCost = self.models[key]
        return cost

    def _template_model(self, op: GemmOp, tile: Tile | None) -> GemmCost:
        key = ("template", op, tile)
        if key not in self.models:
            self.models[key] = template_gemm_cost(op, self._device, tile=tile)
        cost: GemmCost = self.models[key]
        return cost

    @cached_property
    def _vendor_ratio(self) -> float:
        """Measured over modelled vendor time; 1 without a measurement."""
        if self.gemm is None or self.gemm_time_s is None:
            return 1.0
        return self.gemm_time_s / self._vendor_model(self.gemm).duration_s

    def _unmeasured_kernel_s(self, op: GemmOp, model: GemmCost) -> float:
        vendor = self._vendor_model(op)
        if vendor.split_k > 1:
            # The vendor fills the SMs by splitting k; a signalled kernel cannot, so only the model of its tile holds.
            return model.duration_s * self._vendor_ratio
        # The vendor's time belongs to the best tile there is, whatever tile is asked for.
        best = self._template_model(op, None)
        vendor_s = self.gemm_time_s if self._is_measured(op) else None
        vendor_s = vendor.duration_s * self._vendor_ratio if vendor_s is None else vendor_s
        return vendor_s * self._device.kernels.template_slowdown * model.duration_s / best.duration_s

    def _epilogue_s(self, op: GemmOp, cost: GemmCost) -> float:
        """Time of a wave in which a signalled kernel only stores its tiles."""
        wave_bytes = self._device.num_sms * cost.grid.bm * cost.grid.bn * dtype_bytes(op.dtype)
        return self.overlap.epilogue_factor * wave_bytes / hbm_rate(self._device)

    def _added(self, op: GemmOp, seconds: float) -> float:
        """Time of a GEMM that adds C to an fp32 matrix over that of one which stores C.

        Memory and main loop combine as the root of the sum of squares, as in the model of the plain kernel.
        """
        rate = hbm_rate(self._device) * self._device.kernels.hbm_efficiency
        stored_s = (op.operand_bytes + op.output_bytes) / rate
        added_s = stored_s + (ADDED_BYTES * op.m * op.n - op.output_bytes) / rate
        loop_s = math.sqrt(max(0.0, seconds**2 - stored_s**2))
        return max(1.0, math.hypot(loop_s, added_s) / seconds)

    def _is_measured(self, op: GemmOp) -> bool:
        return self.gemm is not None and _shape(op) == _shape(self.gemm)

    def _kernel_tile(self, op: GemmOp) -> Tile:
        if self.tile is None:
            return self._template_model(op, None).tile
        return checked_tile(op, self.tile, self._device)

    def _not_below_bound(self, op: GemmOp, cost: GemmCost) -> GemmCost:
        """Scaling by a measured ratio must not promise more than the device has."""
        return cost.scaled(max(1.0, lower_bound_s(op, self._device) / cost.duration_s))

    @property
    def _template_spread(self) -> Spread:
        """A slowdown taken over from templates of another architecture may not be there at all."""
        return replace(TEMPLATE, low=TEMPLATE.low / max(1.0, self._device.kernels.template_slowdown))

    def _vendor_spread(self, cost: GemmCost) -> Spread:
        """Spread of the vendor's time: a measurement carries over to what is scaled by it."""
        return cost.spread if self.gemm_time_s is None else MEASURED

    def _ends(self, op: GemmOp, cost: GemmCost, vendor: Spread, kernel: Spread) -> GemmCost:
        """Take `gemm` and `kernel` to their ends; the low end stays above what hardware allows."""
        moved = self._end("gemm", vendor) * self._end("kernel", kernel)
        factor = self.factors.get("gemm", 1.0)
        if moved < 1:
            moved = min(1.0, max(moved, lower_bound_s(op, self._device) / (cost.duration_s * factor)))
        return cost.scaled(moved * factor)


def _shape(op: GemmOp) -> tuple[int, int, int, str, str]:
    return op.m, op.n, op.k, op.dtype, op.accumulate
