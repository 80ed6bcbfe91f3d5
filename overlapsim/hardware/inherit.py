"""What was measured on one machine and does not hold on another: when inherited curves and fits are left out.

A curve or fit belongs to the machine of the file that names it. A file that extends this one and changes the links,
the network or the GPU describes another machine, whose times the old measurement would silently fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from overlapsim.hardware.profile import CurveKey, DeviceSpec, FabricSpec, NodeSpec
from overlapsim.hardware.schema import (
    DEVICE_FIELDS,
    FABRIC_FIELDS,
    NET_LATENCY_FIELD,
    NIC_GROUPS_FIELD,
    NODE_FIELDS,
    NVLINK_PAIRS_FIELD,
    PEAK_FIELD,
    TENSOR_SHARE_FIELD,
    Dimension,
    Field,
)
from overlapsim.units import format_bandwidth, format_bytes, format_rate, format_time

# What one node's collectives depend on where a switch joins all GPUs: PCIe and host memory carry nothing of them.
_SWITCHED: Final = frozenset({"nvlink_bandwidth", "nvlink_latency", "nvlink_pairs"})
_NICS: Final = frozenset({"num_nics", "nic_bandwidth", "nic_groups"})
_NODE: Final = (*NODE_FIELDS, NVLINK_PAIRS_FIELD, NIC_GROUPS_FIELD)
# Capacity holds data and copy engines run beside kernels: neither moves a kernel's time.
_DEVICE: Final = tuple(field for field in DEVICE_FIELDS if field.key not in ("hbm_capacity", "copy_engines"))
_FORMAT: Final[Mapping[Dimension, Callable[[float], str]]] = {
    "bandwidth": format_bandwidth,
    "bytes": format_bytes,
    "time": format_time,
    "frequency": lambda value: format_rate(value, "Hz"),
    "flop_rate": lambda value: format_rate(value, "FLOP/s"),
    "count": str,
    "ratio": lambda value: f"{value:.4g}",
}
FABRIC_FIT: Final = "collective.fabric"


@dataclass(frozen=True)
class Machine:
    """What a cluster's measurements depend on."""

    node: NodeSpec
    fabric: FabricSpec | None
    net_latency_s: float


def device_changes(here: DeviceSpec, there: DeviceSpec) -> tuple[str, ...]:
    """How the GPU differs in what kernels' times depend on: SMs, clock, peaks, HBM, caches.

    Peaks are compared by dtype where both have it: one more or less says nothing of the others.
    """
    shared = [key for key in here.peak_flop_per_s if key in there.peak_flop_per_s]
    peaks = (
        change
        for key in shared
        for change in _change(
            replace(PEAK_FIELD, key=f"peak_flop.{key}"), here.peak_flop_per_s[key], there.peak_flop_per_s[key]
        )
    )
    return (
        *_words(here, there, "architecture"),
        *_changes(here, there, (*_DEVICE, TENSOR_SHARE_FIELD)),
        *peaks,
    )


def inside_changes(here: Machine, there: Machine) -> tuple[str, ...]:
    """How a node differs in what collectives inside it depend on: NVLink behind a switch, else all links but NICs.

    Behind a switch, some of the GPUs (a virtual machine) reach what as many of all reached; more need another switch.
    """
    if not here.node.scale_up == there.node.scale_up == "nvswitch":
        return _node_changes(here.node, there.node, lambda key: key not in _NICS)
    grown = here.node.num_devices > there.node.num_devices
    return _node_changes(here.node, there.node, lambda key: key in _SWITCHED or (grown and key == "num_devices"))


def across_changes(here: Machine, there: Machine) -> tuple[str, ...]:
    """How machines differ in what collectives across nodes depend on: every link of a node and the network."""
    node = _node_changes(here.node, there.node, lambda key: True)
    latency = _change(NET_LATENCY_FIELD, here.net_latency_s, there.net_latency_s)
    if here.fabric is None or there.fabric is None:
        return (*node, *(() if here.fabric is there.fabric else ("fabric differs",)), *latency)
    if here.fabric.technology != there.fabric.technology:
        return (*node, f"fabric is {here.fabric.name}, not {there.fabric.name}")
    network = (
        *_words(here.fabric, there.fabric, "rail_optimised"),
        *_changes(here.fabric, there.fabric, (field for field in FABRIC_FIELDS if field.key != "net_latency")),
    )
    return (*node, *network, *latency)


def curve_changes(key: CurveKey, here: Machine, there: Machine) -> tuple[str, ...]:
    """How machines differ in what a curve depends on; empty if it holds on both."""
    if key.nodes > 1:
        return across_changes(here, there)
    changes = inside_changes(here, there)
    if not changes and here.node.num_devices < key.ranks <= there.node.num_devices:
        return _change(NODE_FIELDS[0], here.node.num_devices, there.node.num_devices)
    return changes


def fit_changes(name: str, here: Machine, there: Machine) -> tuple[str, ...]:
    """How machines differ in what a cluster's fit ``family.key`` depends on; empty if it holds on both."""
    if name == FABRIC_FIT:
        return across_changes(here, there)
    inside = inside_changes(here, there)
    if name.startswith("collective."):
        return inside
    # What a kernel and a collective cost each other is the GPU's matter too.
    return (*inside, *device_changes(here.node.device, there.node.device))


def dropped_sentence(what: str, names: Sequence[str], owner: str, changes: Sequence[str]) -> str:
    """One sentence on curves or fits of one file that are left out for the same reason.

    Examples
    --------
    >>> dropped_sentence("fit", ["gemm.bf16"], "h100", ["num_sms is 114, not 132"])
    'fit gemm.bf16 of h100 not taken over: num_sms is 114, not 132; measure it here, or list it again if it holds'
    """
    many = len(names) > 1
    listed = f"{what}{'s' if many else ''} {', '.join(names)}"
    pronoun, verb = ("them", "they hold") if many else ("it", "it holds")
    return (
        f"{listed} of {owner} not taken over: {', '.join(changes)}; "
        f"measure {pronoun} here, or list {pronoun} again if {verb}"
    )


def _node_changes(here: NodeSpec, there: NodeSpec, counts: Callable[[str], bool]) -> tuple[str, ...]:
    words = [key for key in ("scale_up", "switch_reduction", "p2p") if key != "p2p" or counts(key)]
    return (*_words(here, there, *words), *_changes(here, there, (field for field in _NODE if counts(field.key))))


def _words(here: Any, there: Any, *keys: str) -> tuple[str, ...]:
    pairs = ((key, getattr(here, key), getattr(there, key)) for key in keys)
    return tuple(f"{key} is {_plain(new)}, not {_plain(old)}" for key, new, old in pairs if new != old)


def _changes(here: Any, there: Any, fields: Iterable[Field]) -> tuple[str, ...]:
    return tuple(
        change
        for field in fields
        for change in _change(field, getattr(here, field.attribute), getattr(there, field.attribute))
    )


def _change(field: Field, new: Any, old: Any) -> tuple[str, ...]:
    if field.dimension in ("groups", "pairs"):
        return () if new == old else (f"{field.key} differ",)
    # The same rate in bits and in bytes may differ in the last place.
    if math.isclose(new, old, rel_tol=1e-9):
        return ()
    shown = _FORMAT[field.dimension]
    return (f"{field.key} is {shown(new)}, not {shown(old)}",)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
