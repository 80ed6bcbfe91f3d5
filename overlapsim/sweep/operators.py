"""Points of `operator`: how one GEMM overlaps with its collective."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from overlapsim.hardware.profile import Cluster
from overlapsim.plan import OperatorInputs
from overlapsim.planner.operator import QUICK, THOROUGH, plan_operator
from overlapsim.planner.operator_plan import context_from
from overlapsim.strategy.base import Strategy
from overlapsim.strategy.registry import load_strategies
from overlapsim.sweep.keys import (
    Cell,
    Column,
    choice_key,
    finding_codes,
    flag_key,
    quantity_key,
    text_key,
    whole_key,
    words,
)
from overlapsim.units import DTYPE_BYTES, parse_bytes, parse_time_s
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.operators import COLLECTIVES

EFFORTS: Final = {"thorough": THOROUGH, "quick": QUICK}


@lru_cache
def _strategies(text: str) -> tuple[Strategy, ...]:
    """Baselines and the strategies named, or all; finding them costs as much as planning a point."""
    chosen = tuple(s for s in load_strategies(words(text), "pair") if s.overlaps)
    return (*(s for s in load_strategies(scope="pair") if not s.overlaps), *chosen)


KEYS: Final = (
    text_key("cluster"),
    whole_key("nodes", 1),
    whole_key("ranks"),
    whole_key("m"),
    whole_key("n"),
    whole_key("k"),
    choice_key("dtype", sorted(DTYPE_BYTES), "bf16"),
    choice_key("accumulate", ("fp16", "fp32"), "fp32"),
    choice_key("collective", COLLECTIVES, "all_reduce"),
    quantity_key("gemm_time", parse_time_s, "gemm_time_s", None),
    whole_key("comm_sms", None),
    quantity_key("independent", parse_bytes, "independent_bytes", None),
    text_key("stack", "graph"),
    text_key("strategy", "", check=_strategies),
    flag_key("contention", True),
    choice_key("effort", tuple(EFFORTS), "thorough"),
)
COLUMNS: Final = (
    Column("verdict", "text"),
    Column("cause", "text"),
    Column("best", "text"),
    Column("best_parameters", "text"),
    *(Column(name, "float") for name in ("best_s", "best_low_s", "best_high_s", "serial_s")),
    *(Column(name, "float") for name in ("speedup", "speedup_low", "speedup_high")),
    Column("best_overlap", "text"),
    Column("overlap_s", "float"),
    Column("ceiling", "float"),
    Column("lower_bound_s", "float"),
    Column("findings", "text"),
)


def answer(
    given: Mapping[str, Any], cluster: Cluster, model: ModelSpec | None, models: dict[object, object]
) -> Mapping[str, Cell]:
    """Plan one operator as `overlapsim operator` does; parameters and errors as `planner.operator.plan_operator`."""
    inputs = OperatorInputs(
        cluster=given["cluster"],
        cluster_sha256=cluster.digest,
        nodes=given["nodes"],
        ranks=given["ranks"],
        m=given["m"],
        n=given["n"],
        k=given["k"],
        dtype=given["dtype"],
        accumulate=given["accumulate"],
        collective=given["collective"],
        gemm_time_s=given["gemm_time"],
        comm_sms=given["comm_sms"],
        contention=given["contention"],
        independent_bytes=given["independent"],
        stack=given["stack"],
    )
    effort = EFFORTS[given["effort"]]
    result = plan_operator(
        context_from(inputs, cluster), _strategies(given["strategy"]), contention=inputs.contention, effort=effort
    )
    best, serial = result.best, result.serial
    assert best.best is not None and best.prediction is not None and serial.best is not None
    overlapping = [r.best for r in result.results if r.best is not None and r.strategy.overlaps]
    fastest = min(overlapping, key=lambda candidate: candidate.predicted_s, default=None)
    return {
        "verdict": result.verdict,
        "cause": result.cause,
        "best": best.strategy.name,
        "best_parameters": json.dumps(msgspec.to_builtins(best.best.parameters), sort_keys=True),
        "best_s": best.best.predicted_s,
        "best_low_s": best.prediction.low_s if effort.ranges else None,
        "best_high_s": best.prediction.high_s if effort.ranges else None,
        "serial_s": serial.best.predicted_s,
        "speedup": best.speedup,
        "speedup_low": best.speedup_low if effort.ranges else None,
        "speedup_high": best.speedup_high if effort.ranges else None,
        "best_overlap": None if fastest is None else fastest.strategy.name,
        "overlap_s": None if fastest is None else fastest.predicted_s,
        "ceiling": result.ceiling,
        "lower_bound_s": result.lower_bound_s,
        "findings": finding_codes(result.findings),
    }
