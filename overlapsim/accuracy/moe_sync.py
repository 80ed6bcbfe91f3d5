"""Parameter synchronisation of MegaScale-MoE (figure 15): attention's weights in copies against split ones."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final, Literal

import numpy as np

from overlapsim.accuracy.suite import Row
from overlapsim.engine import compiled
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline_kinds import make_schedule
from overlapsim.step.inputs import StepInputs
from overlapsim.step.line import Line
from overlapsim.step.pieces import StagePieces
from overlapsim.step.replicas import HEALTHY, Replica
from overlapsim.step.simulate import step_prices
from overlapsim.step.traffic import traffic_of
from overlapsim.units import dtype_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.stage_weights import LocalParameters

Attention = Literal["tp", "sp"]
CLUSTER: Final = "h800-sxm8"
NODE: Final = 8
EXPERT_BYTES: Final = 10e9
LAYOUTS: Final[Mapping[Attention, str]] = {
    "tp": "tp=8,ep=8,etp=1,dp={dp},zero=1",
    "sp": "sp=8,ep=8,dp={dp},zero=1",
}
READINGS: Final[Mapping[str, Recipe]] = {
    "bf16 both ways": Recipe(compress=("grads-bf16",)),
    "parameters in fp8": Recipe(fp8=True, compress=("grads-bf16", "params-fp8")),
}
"""What is sent of sizes read as bytes of fp32 gradients of one GPU (attention's: of its eighth)."""
FINDING: Final = Finding(
    "sync_reading_assumed",
    "figure 15 does not say what its sizes count or what is timed. Read as fp32 gradients of one GPU, which are "
    "exchanged in bf16, with parameters gathered in bf16, its times are more than NICs of 50 GB/s can do; with "
    "parameters gathered in fp8 they are not. Slopes are scored under the second reading, the first is printed",
)


def sync_seconds(attention: Attention, dp: int, attention_bytes: float, recipe: Recipe) -> float:
    """Seconds in which gradients are reduced and parameters gathered, with nothing beside them.

    Parameters
    ----------
    attention : whether a node splits attention's weights (``tp``) or holds a copy on each GPU (``sp``)
    dp : nodes that hold the same part of the model
    attention_bytes : fp32 gradients of an eighth of attention's weights
    recipe : what is compressed
    """
    layout = Layout.parse(LAYOUTS[attention].format(dp=dp))
    cluster = load_cluster(CLUSTER).with_nodes(dp)
    job = Job(8192, 1, global_batch=layout.dp)
    inputs = StepInputs(load_preset("megascale-mixtral-8x7b"), cluster, layout, job, recipe=recipe)
    width = dtype_bytes("fp32")
    held = attention_bytes * (NODE if attention == "sp" else 1)
    traffic = traffic_of(inputs, LocalParameters(round(held / width), round(EXPERT_BYTES / width)))
    schedule, builder = make_schedule("1f1b", 1, 1), ProgramBuilder()
    pieces = {HEALTHY: StagePieces(inputs, step_prices(inputs), schedule)}
    line = Line(inputs, schedule, Replica((HEALTHY,)), 0, builder, pieces, {}, [None])
    reduced = [line.collective(op, 0) for op, _ in traffic.reduce]
    for op, _ in traffic.gather:
        gathered = line.collective(op, 0)
        for task in reduced:
            builder.add_edge(task, gathered)
    return compiled.run(builder.freeze()).duration_s


@cache
def published_ms() -> Mapping[tuple[int, Attention], Mapping[float, float]]:
    """Figure 15: milliseconds by MB of attention parameters, by data-parallel degree and kind of attention."""
    text = (bundled() / "tables" / "moe" / "synchronisation.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("# ")))
    sizes = [float(size) for size in rows[0][2:]]
    kinds: Mapping[str, Attention] = {"tp": "tp", "sp": "sp"}
    return {(int(row[0]), kinds[row[1]]): dict(zip(sizes, map(float, row[2:]), strict=True)) for row in rows[1:]}


def slope(times: Mapping[float, float]) -> float:
    """Milliseconds for each GB, by least squares over milliseconds by MB."""
    return float(np.polyfit(list(times), list(times.values()), 1)[0]) * 1e3


def predicted_ms(attention: Attention, dp: int, reading: str) -> dict[float, float]:
    """Milliseconds of the sizes of figure 15 under a reading."""
    sizes = published_ms()[dp, attention]
    return {size: sync_seconds(attention, dp, size * 1e6, READINGS[reading]) * 1e3 for size in sizes}


def sync_rows() -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Slopes over attention's size, and the time of copies over that of split weights, predicted and published."""
    return tuple(_rows()), (FINDING,)


def _rows() -> Iterator[Row]:
    published = published_ms()
    for reading, group in (("parameters in fp8", "sync slope"), ("bf16 both ways", "sync slope, bf16 both ways")):
        for attention in LAYOUTS:
            # Both degrees as one: a digitised slope of five points is good to a quarter.
            measured = [slope(published[dp, attention]) for dp in (4, 8)]
            predicted = [slope(predicted_ms(attention, dp, reading)) for dp in (4, 8)]
            yield _row(group, f"attention={attention}", sum(measured) / 2, sum(predicted) / 2, "ms/GB")
    for dp in (4, 8):
        times = {attention: predicted_ms(attention, dp, "parameters in fp8") for attention in LAYOUTS}
        for size in times["tp"]:
            measured_ratio = published[dp, "sp"][size] / published[dp, "tp"][size]
            ratio = times["sp"][size] / times["tp"][size]
            yield _row("sync copies", f"dp={dp}|mb={size:g}", measured_ratio, ratio, "ratio")


def _row(group: str, name: str, measured: float, predicted: float, unit: str) -> Row:
    return Row(f"{group}|{name}", group, measured, predicted, predicted, predicted, unit, None)
