"""From profile files to frozen specs: what each kind of file must hold, and what must agree within it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast, get_args

from overlapsim.errors import ProfileError
from overlapsim.hardware.curves import read_curve
from overlapsim.hardware.documents import Document, Kind
from overlapsim.hardware.library import Library, resolve_chain
from overlapsim.hardware.profile import (
    Cluster,
    CollectiveSpec,
    CurveKey,
    CurveTable,
    DeviceSpec,
    KernelSpec,
    NodeSpec,
    ScaleUp,
    Source,
)
from overlapsim.hardware.reader import Reader
from overlapsim.hardware.schema import (
    CLUSTER_FIELDS,
    COLLECTIVE_FIELDS,
    DEVICE_FIELDS,
    KERNEL_FIELDS,
    NODE_FIELDS,
    NUM_NODES_FIELD,
    PEAK_FIELD,
    Field,
)
from overlapsim.hardware.wire import COLLECTIVES
from overlapsim.units import DTYPE_BYTES

_PEAK_KEY: Final = re.compile(rf"({'|'.join(DTYPE_BYTES)})(:(fp16|fp32))?")
_CURVE_KEY: Final = re.compile(rf"({'|'.join(COLLECTIVES)})/([1-9]\d{{0,6}})(?:/([1-9]\d{{0,6}}))?")


class Builder:
    """Builds specs out of one library and notes what is wrong on the way.

    Each method returns None if the profile has problems.

    Attributes
    ----------
    problems : everything found so far
    """

    def __init__(self, library: Library) -> None:
        self.problems: list[str] = []
        self._library = library
        self._parts: list[bytes] = []

    def hexdigest(self) -> str:
        """SHA-256 over the contents of all files used so far, independent of where they stand."""
        return hashlib.sha256(b"".join(self._parts)).hexdigest()

    def device(self, document: Document) -> DeviceSpec | None:
        """A device."""
        reader = self._reader("device", document)
        reader.unknown_top((*_keys(DEVICE_FIELDS), "architecture", PEAK_FIELD.key, "kernels"))
        reader.unknown(reader.section("kernels"), _keys(KERNEL_FIELDS), "kernels")
        architecture = reader.word("architecture")
        peaks = reader.named_numbers(PEAK_FIELD.key, PEAK_FIELD)
        for key in peaks:
            if not _PEAK_KEY.fullmatch(key):
                reader.problem(
                    f"{PEAK_FIELD.key}.{key} is no rate; expected a dtype ({', '.join(DTYPE_BYTES)}), "
                    "with :fp16 or :fp32 behind it for another accumulate type"
                )
        numbers, kernels = reader.numbers(DEVICE_FIELDS), reader.numbers(KERNEL_FIELDS, "kernels")
        if reader.failed:
            return None
        return DeviceSpec(
            name=reader.name,
            architecture=str(architecture),
            peak_flop_per_s=peaks,
            kernels=KernelSpec(**kernels),
            sources=reader.sources,
            **numbers,
        )

    def node(self, document: Document) -> NodeSpec | None:
        """A node with its device."""
        reader = self._reader("node", document)
        reader.unknown_top((*_keys(NODE_FIELDS), "device", "scale_up", "p2p", "switch_reduction"))
        scale_up = reader.choice("scale_up", get_args(ScaleUp))
        p2p, reduction = reader.flag("p2p", True), reader.flag("switch_reduction", False)
        numbers = reader.numbers(NODE_FIELDS)
        _check_node(reader, numbers, scale_up)
        failed = reader.failed
        device = self._referred("device", reader, self.device)
        if failed or device is None:
            return None
        return NodeSpec(
            name=reader.name,
            device=device,
            scale_up=cast(ScaleUp, scale_up),
            p2p=p2p,
            switch_reduction=reduction,
            sources=reader.sources,
            **numbers,
        )

    def cluster(self, document: Document) -> Cluster | None:
        """A cluster with its node, device and curves."""
        reader = self._reader("cluster", document)
        reader.unknown_top((*_keys(CLUSTER_FIELDS), "node", "num_nodes", "collectives", "curves", "calibrated"))
        reader.unknown(reader.section("collectives"), _keys(COLLECTIVE_FIELDS), "collectives")
        numbers = reader.numbers(CLUSTER_FIELDS)
        num_nodes = reader.optional_number(NUM_NODES_FIELD, 1)
        collectives = reader.numbers(COLLECTIVE_FIELDS, "collectives")
        calibrated = reader.flag("calibrated", False)
        curves = self._curves(reader)
        failed = reader.failed
        node = self._referred("node", reader, self.node)
        if failed or node is None:
            return None
        return Cluster(
            name=reader.name,
            node=node,
            num_nodes=num_nodes,
            collectives=CollectiveSpec(**collectives),
            curves=curves,
            calibrated=calibrated,
            sources=reader.sources,
            **numbers,
        )

    def _reader(self, kind: Kind, document: Document) -> Reader:
        chain = resolve_chain(kind, document, self._library)
        for entry in chain:
            self._count(kind, entry.content)
        return Reader(kind, chain, self.problems)

    def _referred(self, kind: Kind, reader: Reader, build: Any) -> Any:
        name = reader.word(kind)
        if name is None:
            return None
        try:
            return build(self._library.get(kind, name))
        except ProfileError as error:
            # Noted rather than raised, so that it comes together with what else is wrong.
            reader.problem(str(error))
            return None

    def _curves(self, reader: Reader) -> Mapping[CurveKey, CurveTable]:
        curves: dict[CurveKey, CurveTable] = {}
        for key, entry in sorted(reader.section("curves", required=False).items()):
            match = _CURVE_KEY.fullmatch(str(key))
            if match is None:
                reader.problem(
                    f"curves.{key} is no curve; expected collective/ranks or collective/ranks/nodes with a collective "
                    f"of {', '.join(COLLECTIVES)}"
                )
            elif table := reader.table(f"curves.{key}", entry):
                curve = self._curve(reader, *table)
                if curve is not None:
                    curves[CurveKey(match[1], int(match[2]), int(match[3] or 1))] = curve
        return curves

    def _curve(self, reader: Reader, file: str, source: Source) -> CurveTable | None:
        entry = self._library.table(file)
        if entry is None:
            reader.problem(f"table {file} is not beside the profile nor in a tables folder")
            return None
        try:
            content = entry.read_bytes()
            curve = read_curve(file, text=content.decode("utf-8-sig"))
        except UnicodeDecodeError:
            reader.problem(f"table {file} is not UTF-8 text")
        except ProfileError as error:
            reader.problem(str(error))
        else:
            self._count("table", content)
            return replace(curve, source=source)
        return None

    def _count(self, role: str, content: bytes) -> None:
        # Hashing each file first keeps the borders between files in the digest.
        self._parts.append(role.encode() + hashlib.sha256(content).digest())


def _keys(fields: Iterable[Field]) -> tuple[str, ...]:
    return tuple(field.key for field in fields)


def _check_node(reader: Reader, numbers: Mapping[str, Any], scale_up: str | None) -> None:
    """Note what contradicts itself: groups that do not cover the devices, links that are not there."""
    count = numbers.get("num_devices")
    for key in ("pcie_groups", "numa_groups"):
        if count is not None and key in numbers and sorted(d for g in numbers[key] for d in g) != [*range(count)]:
            reader.problem(f"{key} is {numbers[key]}; expected each device 0..{count - 1} exactly once")
    nvlink = numbers.get("nvlink_bandwidth_bytes_per_s")
    if scale_up in ("nvswitch", "nvlink_mesh") and nvlink == 0:
        reader.problem(f"nvlink_bandwidth is 0; expected more with scale_up {scale_up}")
    if scale_up == "pcie" and nvlink:
        reader.problem("nvlink_bandwidth is not 0; expected 0 with scale_up pcie")
    if numbers.get("num_nics") and numbers.get("nic_bandwidth_bytes_per_s") == 0:
        reader.problem(f"nic_bandwidth is 0; expected more with {numbers['num_nics']} NICs")
