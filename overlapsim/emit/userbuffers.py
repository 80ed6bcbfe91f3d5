"""Transformer Engine's userbuffer settings of a layer's GEMMs: which plan entry becomes which, every key spelt out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from overlapsim.emit.rules import Version
from overlapsim.plan import OperatorSettings
from overlapsim.workload.layout import Layout

GEMMS: Final[Mapping[tuple[str, str], str]] = {
    ("attn.qkv", "fwd"): "qkv_fprop",
    ("attn.out", "fwd"): "proj_fprop",
    ("mlp.fc1", "fwd"): "fc1_fprop",
    ("mlp.fc2", "fwd"): "fc2_fprop",
    ("mlp.fc2", "dgrad"): "fc2_dgrad",
    ("attn.out", "dgrad"): "proj_dgrad",
    ("mlp.fc1", "dgrad"): "fc1_dgrad",
    ("mlp.fc1", "wgrad"): "fc1_wgrad",
    ("attn.qkv", "dgrad"): "qkv_dgrad",
    ("attn.qkv", "wgrad"): "qkv_wgrad",
}
"""GEMM of Transformer Engine by operator and pass."""
EXPERTS: Final = ("moe.fc1", "moe.fc2")
"""Grouped GEMMs: there are no userbuffers for them."""
GATHERS: Final = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
"""Where the input is gathered: a ring only."""
SCATTERS: Final = ("proj_fprop", "fc2_fprop")
"""Where the output is scattered: a ring or a pipeline."""
COLUMNS: Final = ("qkv", "fc1")
"""Column-split layers: the gather of the input beside dgrad and the scatter of its gradient beside wgrad (bulk), or the
scatter overlapped with dgrad itself, which is one switch for all of them."""
FIRST_GEMM_SINCE: Final = Version.parse("2.2")
CGA_SIZE: Final = 2
"""Of kernels that move whole tensors: the library's default, and that of every published setting."""
STRATEGIES: Final[Mapping[str, str]] = {"ring_exchange": "ring_exchange", "pipelined_rs": "pipeline", "bulk": "bulk"}
"""Method of Transformer Engine by strategy."""


@dataclass(frozen=True)
class Userbuffers:
    """Settings of the file and of the switches beside it.

    Attributes
    ----------
    gemms : keys by name of the GEMM; the library's defaults stand for those left out
    scatter_with_dgrad : ``tp_comm_overlap_rs_dgrad``
    used : whether the plan overlaps anything
    gather, scatter, bulk_dgrad, bulk_wgrad : kinds of overlap that are on; without userbuffers Megatron runs the last
        two beside GEMMs as well, so that they stay on
    unexpressed : what the file cannot say
    """

    gemms: Mapping[str, Mapping[str, Any]]
    scatter_with_dgrad: bool
    used: bool
    gather: bool
    scatter: bool
    bulk_dgrad: bool
    bulk_wgrad: bool
    unexpressed: tuple[str, ...]


def userbuffers(operators: Sequence[OperatorSettings], layout: Layout, version: Version) -> Userbuffers:
    """Settings for the operators of a plan.

    Parameters
    ----------
    operators : with the strategy of each
    layout : whose tensor-parallel group shares the buffers; without sequence parallelism there are none
    version : of Transformer Engine

    Notes
    -----
    A GEMM left out of the file keeps the library's default and is not switched off. Whole kinds of overlap are, by
    the switches beside the file, where the plan overlaps none of their GEMMs by any strategy; where it overlaps some,
    or by strategies that the library does not have, the library's default stands in and is named. Stream priorities
    are left to the library, which puts communication first, as plans do.
    """
    left = list(_experts_left(operators))
    operators = [op for op in operators if op.operator not in EXPERTS]
    tp = layout.tp
    if tp == 1 or not layout.sequence_parallel:
        asked = ", ".join(dict.fromkeys(op.strategy for op in operators))
        why = "tp is 1" if tp == 1 else "sequence parallelism is off"
        reason = (f"{asked}: userbuffers need split sequences, and {why}",) if operators else ()
        return Userbuffers({}, False, False, False, False, False, False, (*left, *reason))
    chosen = {GEMMS[op.operator, op.pass_]: op for op in operators if (op.operator, op.pass_) in GEMMS}
    left += [f"{op.operator} {op.pass_} has no userbuffers" for op in operators if op not in chosen.values()]
    gemms: dict[str, Mapping[str, Any]] = {}
    for name in (*GATHERS, *SCATTERS):
        if name in chosen and (keys := _keys(name, chosen[name], tp, version, left)):
            gemms[name] = keys
    scattering = _columns(chosen, tp, version, left, gemms)
    strategies = dict.fromkeys(op.strategy for name, op in chosen.items() if name not in gemms and not _method(op))
    for strategy in strategies:
        names = [name for name, op in chosen.items() if op.strategy == strategy and name not in gemms]
        left.append(
            f"{strategy} of {', '.join(names)}: Transformer Engine has none and overlaps in its own way; "
            "`emit --model` fills its file with what it has"
        )
    for kind in (GATHERS, SCATTERS):
        alone = [name for name in kind if name not in chosen]
        if alone and len(alone) < len(kind):
            left.append(
                f"{', '.join(alone)} not overlapped: GEMMs of a kind are switched together, so that Transformer "
                "Engine's default overlaps them"
            )
    ordered = {name: gemms[name] for name in GEMMS.values() if name in gemms}
    return Userbuffers(
        ordered,
        scattering,
        used=bool(chosen),
        gather=any(name in chosen for name in GATHERS),
        scatter=any(name in chosen for name in SCATTERS),
        bulk_dgrad=not scattering,
        bulk_wgrad=not scattering,
        unexpressed=tuple(dict.fromkeys(left)),
    )


def _experts_left(operators: Sequence[OperatorSettings]) -> Iterator[str]:
    """A sentence for each strategy of experts: userbuffers are of plain GEMMs, whatever the tensor parallelism."""
    experts = [op for op in operators if op.operator in EXPERTS]
    for strategy in dict.fromkeys(op.strategy for op in experts):
        names = ", ".join(f"{op.operator} {op.pass_}" for op in experts if op.strategy == strategy)
        yield (
            f"{strategy} of {names}: neither Megatron nor Transformer Engine overlaps grouped GEMMs of experts with "
            "their exchange inside; the plan's time counts on it"
        )


def _columns(
    chosen: Mapping[str, OperatorSettings],
    tp: int,
    version: Version,
    left: list[str],
    gemms: dict[str, Mapping[str, Any]],
) -> bool:
    """Add the backward of column-split layers; True where the scatter overlaps with dgrad itself."""
    dgrads = {f"{layer}_dgrad": chosen.get(f"{layer}_dgrad") for layer in COLUMNS}
    with_dgrad = [
        name for name, op in dgrads.items() if op is not None and _method(op) in ("ring_exchange", "pipeline")
    ]
    scattering = len(with_dgrad) == len(COLUMNS)
    gathered: list[str] = []
    if with_dgrad and not scattering:
        left.append(
            f"{with_dgrad[0]} alone scatters with its own GEMM in the plan; the switch for it is one for "
            f"{' and '.join(dgrads)}, which stay bulk"
        )
    for layer in COLUMNS:
        dgrad, wgrad = chosen.get(f"{layer}_dgrad"), chosen.get(f"{layer}_wgrad")
        if dgrad is not None and (scattering or _method(dgrad) not in ("ring_exchange", "pipeline")):
            _add(f"{layer}_dgrad", dgrad, tp, version, left, gemms)
        if wgrad is not None and _method(wgrad) == "bulk" and not scattering:
            _add(f"{layer}_wgrad", wgrad, tp, version, left, gemms)
        elif wgrad is not None and _method(wgrad):
            gathered.append(f"{layer}_wgrad")
    if gathered:
        left.append(
            f"the gather of the input of {' and '.join(gathered)}: it runs beside dgrad or before it, not in pieces "
            "with the GEMM itself"
        )
    return scattering


def _add(
    name: str,
    op: OperatorSettings,
    tp: int,
    version: Version,
    left: list[str],
    gemms: dict[str, Mapping[str, Any]],
) -> None:
    if keys := _keys(name, op, tp, version, left):
        gemms[name] = keys


def _method(op: OperatorSettings) -> str:
    return STRATEGIES.get(op.strategy, "")


def _keys(name: str, op: OperatorSettings, tp: int, version: Version, left: list[str]) -> Mapping[str, Any]:
    """All keys of one GEMM; empty (and a sentence) where there is no method for its strategy."""
    method, settings = _method(op), op.settings
    if not method:
        return {}
    if method == "ring_exchange":
        return _ring(name, settings, tp, left)
    if method == "bulk":
        return {
            "method": method,
            "num_sm": settings["comm_sms"],
            "cga_size": _cga(settings["comm_sms"]),
            "set_sm_margin": settings["sm_margin"],
            "num_splits": 4,  # read and not used by a whole collective
            "aggregate": False,
            "atomic_gemm": False,
            "use_ce": True,
            "fp8_buf": name.endswith("dgrad"),
        }
    rows, splits = sum(settings["split_rows"]), settings["num_splits"]
    if rows % splits:
        splits = max(count for count in range(1, splits) if rows % count == 0)
        left.append(f"{name}: {rows} rows do not divide into {settings['num_splits']} splits; {splits} are written")
    keys = {
        "method": method,
        "num_sm": settings["comm_sms"],
        "cga_size": _cga(settings["comm_sms"]),
        "set_sm_margin": settings["sm_margin"],
        "num_splits": splits,
        "aggregate": False,
        "atomic_gemm": False,
        "use_ce": True,
        "fp8_buf": False,
    }
    if settings["overlap_first_gemm"]:
        if version < FIRST_GEMM_SINCE:
            left.append(f"{name}: overlap_first_gemm has no key before Transformer Engine {FIRST_GEMM_SINCE}")
        else:
            keys["pipeline_rs_overlap_first_gemm"] = True
    return keys


def _ring(name: str, settings: Mapping[str, Any], tp: int, left: list[str]) -> Mapping[str, Any]:
    if settings["form"] == "bidirectional":
        left.append(f"{name}: the ring of the plan goes both ways; Transformer Engine's goes one way")
    if settings["compute_streams"] == 1:
        left.append("Transformer Engine spreads the GEMMs of a ring over up to 3 streams; the plan takes one")
    kernel = settings["comm_engine"] == "kernel"
    return {
        "method": "ring_exchange",
        "num_sm": max(1, settings["comm_sms"]),
        "cga_size": 1,
        "set_sm_margin": kernel,
        "num_splits": tp,
        "aggregate": settings["form"] == "aggregate",
        "atomic_gemm": False,
        "use_ce": not kernel,
        "fp8_buf": name in GATHERS,
    }


def _cga(num_sm: int) -> int:
    """Cluster size: two, where the SMs make pairs."""
    return CGA_SIZE if num_sm % CGA_SIZE == 0 else 1


def yaml_text(gemms: Mapping[str, Mapping[str, Any]]) -> str:
    """The file: one line a GEMM.

    Examples
    --------
    >>> print(yaml_text({"qkv_dgrad": {"method": "bulk", "num_sm": 4, "set_sm_margin": False}}), end="")
    qkv_dgrad: {method: bulk, num_sm: 4, set_sm_margin: false}
    """
    lines = []
    for name, keys in gemms.items():
        pairs = ", ".join(f"{key}: {str(v).lower() if isinstance(v, bool) else v}" for key, v in keys.items())
        lines.append(f"{name}: {{{pairs}}}\n")
    return "".join(lines)
