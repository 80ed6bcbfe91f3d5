"""From profile files to frozen specs: what each kind of file must hold, and what must agree within it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast, get_args

from overlapsim.errors import ProfileError
from overlapsim.hardware.catalogue import Library, resolve_chain
from overlapsim.hardware.curves import read_curve
from overlapsim.hardware.documents import Document, Kind
from overlapsim.hardware.fits import read_fits
from overlapsim.hardware.inherit import Machine, curve_changes, device_changes, dropped_sentence, fit_changes
from overlapsim.hardware.profile import (
    Cluster,
    CollectiveSpec,
    CurveKey,
    CurveTable,
    DeviceSpec,
    FabricSpec,
    Fit,
    KernelSpec,
    NodeSpec,
    ScaleUp,
    Source,
)
from overlapsim.hardware.reader import Reader
from overlapsim.hardware.schema import (
    COLLECTIVE_FIELDS,
    DEVICE_FIELDS,
    FABRIC_FIELDS,
    KERNEL_FIELDS,
    NET_LATENCY_FIELD,
    NIC_GROUPS_FIELD,
    NODE_FIELDS,
    NUM_NODES_FIELD,
    NVLINK_PAIRS_FIELD,
    PEAK_FIELD,
    TENSOR_SHARE_FIELD,
    Field,
)
from overlapsim.hardware.shape import check_node
from overlapsim.hardware.wire import COLLECTIVES
from overlapsim.units import DTYPE_BYTES

# Elements of fp4 are half a byte: peaks are known, tensors of them are not priced.
_PEAK_DTYPES: Final = (*DTYPE_BYTES, "fp4")
_PEAK_KEY: Final = re.compile(rf"({'|'.join(_PEAK_DTYPES)})(:(fp16|fp32))?")
_K = TypeVar("_K")
_T = TypeVar("_T")
_CURVE_KEY: Final = re.compile(rf"({'|'.join(COLLECTIVES)})/([1-9]\d{{0,6}})(?:/([1-9]\d{{0,6}}))?")


class Builder:
    """Builds specs out of one library and notes what is wrong on the way.

    Each method returns None if the profile has problems.

    Attributes
    ----------
    problems : everything found so far
    dropped : curves and fits that were inherited from another machine, a sentence for each group
    """

    def __init__(self, library: Library, *, bare: bool = False) -> None:
        self.problems: list[str] = []
        self.dropped: list[str] = []
        self._library = library
        # A bare builder reads numbers alone: enough to compare machines.
        self._bare = bare
        self._parts: list[bytes] = []

    def hexdigest(self) -> str:
        """SHA-256 over the contents of all files used so far, independent of where they stand."""
        return hashlib.sha256(b"".join(self._parts)).hexdigest()

    def device(self, document: Document) -> DeviceSpec | None:
        """A device."""
        reader = self._reader("device", document)
        return self._device(reader)

    def _device(self, reader: Reader) -> DeviceSpec | None:
        reader.unknown_top(
            (*_keys(DEVICE_FIELDS), "architecture", PEAK_FIELD.key, TENSOR_SHARE_FIELD.key, "kernels", "fits")
        )
        reader.unknown(reader.section("kernels"), _keys(KERNEL_FIELDS), "kernels")
        architecture = reader.word("architecture")
        peaks = reader.named_numbers(PEAK_FIELD.key, PEAK_FIELD)
        for key in peaks:
            if not _PEAK_KEY.fullmatch(key):
                reader.problem(
                    f"{PEAK_FIELD.key}.{key} is no rate; expected a dtype ({', '.join(_PEAK_DTYPES)}), "
                    "with :fp16 or :fp32 behind it for another accumulate type"
                )
        numbers, kernels = reader.numbers(DEVICE_FIELDS), reader.numbers(KERNEL_FIELDS, "kernels")
        share = reader.optional_number(TENSOR_SHARE_FIELD, 1.0)
        fits, owners = self._fits(reader)
        if reader.failed:
            return None
        spec = DeviceSpec(
            name=reader.name,
            architecture=str(architecture),
            peak_flop_per_s=peaks,
            kernels=KernelSpec(**kernels),
            tensor_share=share,
            sources=reader.sources,
            **numbers,
        )

        def changes(_: str, owner: int) -> tuple[str, ...]:
            there = self._of_base("device", reader, owner, Builder._device)
            return () if there is None else device_changes(spec, there)

        return replace(spec, fits=self._kept("fit", reader, fits, owners, changes))

    def node(self, document: Document) -> NodeSpec | None:
        """A node with its device."""
        reader = self._reader("node", document)
        optional = (NVLINK_PAIRS_FIELD, NIC_GROUPS_FIELD)
        reader.unknown_top((*_keys((*NODE_FIELDS, *optional)), "device", "scale_up", "p2p", "switch_reduction"))
        scale_up = reader.choice("scale_up", get_args(ScaleUp))
        p2p, reduction = reader.flag("p2p", True), reader.flag("switch_reduction", False)
        numbers = reader.numbers(NODE_FIELDS)
        numbers.update({field.attribute: reader.optional_number(field, ()) for field in optional})
        check_node(reader, numbers, scale_up)
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

    def fabric(self, document: Document) -> FabricSpec | None:
        """A network."""
        reader = self._reader("fabric", document)
        reader.unknown_top((*_keys(FABRIC_FIELDS), "technology", "rail_optimised"))
        technology, rails = reader.word("technology"), reader.flag("rail_optimised", False)
        numbers = reader.numbers(FABRIC_FIELDS)
        if reader.failed:
            return None
        return FabricSpec(
            name=reader.name, technology=str(technology), rail_optimised=rails, sources=reader.sources, **numbers
        )

    def cluster(self, document: Document) -> Cluster | None:
        """A cluster with its node, device, fabric and curves."""
        reader = self._reader("cluster", document)
        reader.unknown_top(
            ("net_latency", "fabric", "node", "num_nodes", "collectives", "curves", "calibrated", "fits")
        )
        reader.unknown(reader.section("collectives"), _keys(COLLECTIVE_FIELDS), "collectives")
        if not reader.has("fabric") and not reader.has("net_latency"):
            reader.problem("missing key net_latency; give it, or a fabric that has one")
        num_nodes = reader.optional_number(NUM_NODES_FIELD, 1)
        collectives = reader.numbers(COLLECTIVE_FIELDS, "collectives")
        calibrated = reader.flag("calibrated", False)
        (curves, curve_owners), (fits, fit_owners) = self._curves(reader), self._fits(reader)
        failed = reader.failed
        machine = self._machine(reader)
        if failed or machine is None:
            return None
        there = functools.cache(lambda owner: self._of_base("cluster", reader, owner, Builder._machine))

        def curve_differs(key: CurveKey, owner: int) -> tuple[str, ...]:
            base = there(owner)
            return () if base is None else curve_changes(key, machine, base)

        def fit_differs(name: str, owner: int) -> tuple[str, ...]:
            base = there(owner)
            return () if base is None else fit_changes(name, machine, base)

        return Cluster(
            name=reader.name,
            node=machine.node,
            num_nodes=num_nodes,
            net_latency_s=machine.net_latency_s,
            fabric=machine.fabric,
            collectives=CollectiveSpec(**collectives),
            curves=self._kept("curve", reader, curves, curve_owners, curve_differs),
            calibrated=calibrated,
            fits=self._kept("fit", reader, fits, fit_owners, fit_differs),
            dropped=tuple(self.dropped),
            sources=reader.sources,
        )

    def _machine(self, reader: Reader) -> Machine | None:
        """Node, network and hop of a cluster."""
        latency = reader.optional_number(NET_LATENCY_FIELD, None)
        node = self._referred("node", reader, self.node)
        fabric = self._referred("fabric", reader, self.fabric) if reader.has("fabric") else None
        if node is None or (fabric is None and (reader.has("fabric") or latency is None)):
            return None
        if latency is None:
            assert fabric is not None
            latency = fabric.net_latency_s
            reader.sources[NET_LATENCY_FIELD.attribute] = fabric.sources[NET_LATENCY_FIELD.attribute]
        return Machine(node, fabric, latency)

    def _of_base(self, kind: Kind, reader: Reader, owner: int, build: Callable[[Builder, Reader], _T]) -> _T:
        """The machine that a file of the chain describes by itself, from the numbers of it and its bases."""
        chain = reader.chain[: owner + 1]
        # As that file sees it: a name that the profile's own folder gives again is not meant there.
        builder = Builder(self._library.seen_from(chain[-1]), bare=True)
        return build(builder, Reader(kind, chain, builder.problems))

    def _kept(
        self,
        what: str,
        reader: Reader,
        found: Mapping[_K, _T],
        owners: Mapping[_K, int],
        changes: Callable[[_K, int], tuple[str, ...]],
    ) -> dict[_K, _T]:
        """Curves or fits without those that belong to another machine; a base that is no machine has none."""
        dropped: dict[tuple[int, tuple[str, ...]], list[_K]] = {}
        for key, owner in owners.items():
            if owner < len(reader.chain) - 1 and (differing := changes(key, owner)):
                dropped.setdefault((owner, differing), []).append(key)
        for (owner, differing), keys in dropped.items():
            names = [str(key) for key in keys]
            self.dropped.append(dropped_sentence(what, names, reader.chain[owner].name, differing))
        gone = {key for keys in dropped.values() for key in keys}
        return {key: value for key, value in found.items() if key not in gone}

    def _reader(self, kind: Kind, document: Document) -> Reader:
        chain = resolve_chain(kind, document, self._library)
        for entry in chain:
            self._count(kind, entry.content)
        return Reader(kind, chain, self.problems)

    def _referred(self, kind: Kind, reader: Reader, build: Any) -> Any:
        """What a profile names or holds below `kind`, built."""
        document = reader.inline(kind)
        name = None if document else reader.word(kind)
        if document is None and name is None:
            return None
        try:
            return build(document or self._library.get(kind, str(name)))
        except ProfileError as error:
            # Noted rather than raised, so that it comes together with what else is wrong.
            reader.problem(str(error))
            return None

    def _fits(self, reader: Reader) -> tuple[dict[str, Fit], dict[str, int]]:
        """Fits of every file of the chain, base first: those beside it by name, then those it lists.

        Also which file of the chain each comes from.
        """
        found: dict[str, Fit] = {}
        owners: dict[str, int] = {}
        for owner, document in enumerate(() if self._bare else reader.chain):
            files = document.data.get("fits", [])
            if files is None:
                # As everywhere in a profile, null takes away what the base had.
                found.clear()
                owners.clear()
                files = []
            for entry in self._library.fits(document):
                owners.update(dict.fromkeys(self._add_fits(reader, found, entry, document.name), owner))
            if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
                reader.problem(f"fits is {files!r}; expected a list of files")
                continue
            for file in files:
                listed = self._library.fit(file)
                if listed is None:
                    reader.problem(f"fit {file} is not beside the profile nor in a fits folder")
                else:
                    owners.update(dict.fromkeys(self._add_fits(reader, found, listed, None), owner))
        return found, owners

    def _add_fits(self, reader: Reader, found: dict[str, Fit], document: Document, of: str | None) -> Iterable[str]:
        fits, problems = read_fits(document, of)
        self._count("fit", document.content)
        for problem in problems:
            reader.problem(problem)
        found.update(fits)
        return fits

    def _curves(self, reader: Reader) -> tuple[dict[CurveKey, CurveTable], dict[CurveKey, int]]:
        """Measured curves, and which file of the chain names each."""
        curves: dict[CurveKey, CurveTable] = {}
        owners: dict[CurveKey, int] = {}
        for key, entry in () if self._bare else sorted(reader.section("curves", required=False).items()):
            match = _CURVE_KEY.fullmatch(str(key))
            if match is None:
                reader.problem(
                    f"curves.{key} is no curve; expected collective/ranks or collective/ranks/nodes with a collective "
                    f"of {', '.join(COLLECTIVES)}"
                )
            elif table := reader.table(f"curves.{key}", entry):
                curve = self._curve(reader, *table)
                named, owner = CurveKey(match[1], int(match[2]), int(match[3] or 1)), reader.last_with("curves", key)
                # One node may be spelt out or not: of the two spellings the later file's counts.
                if curve is not None and owner >= owners.get(named, 0):
                    curves[named], owners[named] = curve, owner
        return curves, owners

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
