"""Operators of one fit together: arrays of shapes, the model that the fit's constants go into, and their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.operator_rows import UNFUSED, LinearOp, Work
from overlapsim.cost import attention, grouped_fit, memory_bound
from overlapsim.cost.grouped_fit import GroupedShapes
from overlapsim.cost.priced import Priced
from overlapsim.cost.unfused_attention import unfused_prices
from overlapsim.hardware.profile import DeviceSpec
from overlapsim.workload.attention import AttentionOp, AttentionShapes
from overlapsim.workload.memory_bound import MemoryOp, memory_bytes, traffic_of

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class GroupKey:
    """What operators must share to be priced in one call.

    Attributes
    ----------
    family, key : the fit
    dtype, kv_dtype : of operands and of the cache
    kind, pass_ : memory-bound operator and its pass; phase of attention
    """

    family: str
    key: str
    dtype: str
    kv_dtype: str = ""
    kind: str = ""
    pass_: str = ""


@dataclass(frozen=True, eq=False)
class WorkGroup:
    """Operators of one `GroupKey` and their positions in the list they came from."""

    key: GroupKey
    positions: NDArray[np.intp]
    works: tuple[Work, ...]

    def seconds(self, parameters: Mapping[str, float], device: DeviceSpec) -> FloatArray:
        """Model times with given constants, neither bounded below nor with a spread: what fits minimise over."""
        assert self.key.key != UNFUSED, "made of other models: nothing of its own to fit"
        if self.key.family == attention.FAMILY:
            shapes = self._attention()
            model = attention.decode_seconds if shapes.decode.all() else attention.prefill_seconds
            return model(shapes, parameters, device, self.key.dtype, device.num_sms)
        if self.key.family == grouped_fit.FAMILY:
            return grouped_fit.model_seconds(self._linear(), parameters, device, self.key.dtype, device.num_sms)
        rows, columns = self._grid()
        size = memory_bytes(self.key.kind, rows, columns, self.key.dtype, self.key.pass_)
        kernels = traffic_of(self.key.kind, self.key.pass_).kernels
        return memory_bound.model_seconds(size, rows, columns, parameters, device, kernels=kernels)

    def prices(self, device: DeviceSpec) -> Priced:
        """Times with the device's fits, or the stated priors where it has none."""
        known = f"{self.key.family}.{self.key.key}" in device.fits
        if self.key.key == UNFUSED:
            return unfused_prices(self._attention(), device, dtype=self.key.dtype)
        if self.key.family == attention.FAMILY:
            return attention.attention_prices(
                self._attention(),
                device,
                dtype=self.key.dtype,
                kv_dtype=self.key.kv_dtype,
                key=self.key.key if known else None,
            )
        if self.key.family == grouped_fit.FAMILY:
            return grouped_fit.grouped_prices(self._linear(), device, self.key.key, dtype=self.key.dtype)
        rows, columns = self._grid()
        return memory_bound.memory_prices(
            self.key.kind,
            rows,
            columns,
            device,
            dtype=self.key.dtype,
            pass_=self.key.pass_,
            key=self.key.key if known else None,
        )

    def ranges(self) -> dict[str, FloatArray]:
        """By name the sizes whose box a fit remembers: ``in_range`` is judged by them."""
        if self.key.family == attention.FAMILY:
            shapes = self._attention()
            return {"length": shapes.kv_len, "dim": shapes.head_dim}
        if self.key.family == grouped_fit.FAMILY:
            linear = self._linear()
            return {"rows": linear.m, "weights": linear.n * linear.k}
        rows, columns = self._grid()
        return {"bytes": memory_bytes(self.key.kind, rows, columns, self.key.dtype, self.key.pass_)}

    def _attention(self) -> AttentionShapes:
        return AttentionShapes.of([work.op for work in self.works if isinstance(work.op, AttentionOp)])

    def _linear(self) -> GroupedShapes:
        ops = [work.op for work in self.works if isinstance(work.op, LinearOp)]
        columns = np.array([(op.groups, op.m, op.n, op.k, op.output_bytes, op.uneven) for op in ops]).T
        return GroupedShapes.of(*columns)

    def _grid(self) -> tuple[FloatArray, FloatArray]:
        ops = [work.op for work in self.works if isinstance(work.op, MemoryOp)]
        return np.array([op.rows for op in ops], dtype=float), np.array([op.columns for op in ops], dtype=float)


def group_works(works: Sequence[Work]) -> list[WorkGroup]:
    """Operators by the fit that prices them, in order of first appearance."""
    members: dict[GroupKey, list[int]] = {}
    for position, work in enumerate(works):
        members.setdefault(_key(work), []).append(position)
    return [
        WorkGroup(key, np.array(positions), tuple(works[position] for position in positions))
        for key, positions in members.items()
    ]


def _key(work: Work) -> GroupKey:
    op = work.op
    if isinstance(op, AttentionOp):
        phase = "decode" if op.q_len < op.kv_len else op.pass_
        return GroupKey(attention.FAMILY, work.key, work.dtype, op.kv_dtype, phase)
    if isinstance(op, LinearOp):
        return GroupKey(grouped_fit.FAMILY, work.key, work.dtype)
    return GroupKey(memory_bound.FAMILY, work.key, work.dtype, "", op.kind, op.pass_)
