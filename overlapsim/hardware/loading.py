"""Profiles from files: bundled by name, or a user's own file or folder, checked and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from overlapsim.errors import ProfileError
from overlapsim.hardware.build import Builder
from overlapsim.hardware.catalogue import Library, bundled, open_document
from overlapsim.hardware.check import impossible_curves
from overlapsim.hardware.documents import Document, Kind, parse_document
from overlapsim.hardware.profile import Cluster, DeviceSpec, NodeSpec

_Spec = TypeVar("_Spec")


def list_profiles(kind: Kind, *, search: Sequence[Path] = ()) -> tuple[str, ...]:
    """Names of the bundled profiles of a kind, and of those in the given folders, sorted.

    Examples
    --------
    >>> "a100-sxm8" in list_profiles("cluster")
    True
    """
    return Library((*search, bundled())).names(kind)


def load_device(name_or_path: str, *, search: Sequence[Path] = ()) -> DeviceSpec:
    """Load a device; parameters and errors as `load_cluster`."""
    library, document = open_document("device", name_or_path, search)
    builder = Builder(library)
    return _checked(builder.device(document), builder, document)


def load_node(name_or_path: str, *, search: Sequence[Path] = ()) -> NodeSpec:
    """Load a node and its device; parameters and errors as `load_cluster`."""
    library, document = open_document("node", name_or_path, search)
    builder = Builder(library)
    return _checked(builder.node(document), builder, document)


def load_cluster(name_or_path: str, *, search: Sequence[Path] = (), consistent: bool = True) -> Cluster:
    """Load a cluster with its node, device and measured tables.

    Parameters
    ----------
    name_or_path : str
        Name of a cluster, or path of a YAML file, or of a folder that holds one cluster. What it names in turn
        (``node device extends`` and tables) is looked for beside it, then in `search`, then among the bundled.
    search : sequence of Path
        Folders looked in before the bundled profiles.
    consistent : bool
        False loads a profile whose measured curves contradict its links too, in order to show what is wrong with it.

    Returns
    -------
    Cluster
        ``digest`` is the SHA-256 over the contents of all files used, whatever folders they stand in.

    Raises
    ------
    ProfileError
        If a name is unknown, a file cannot be read, or the profile has problems: unknown or missing keys, wrong
        units or types, values out of limits. One message lists them all. Also if a measured curve is faster than
        the links allow.

    Examples
    --------
    >>> load_cluster("a100-sxm8").num_devices
    8
    """
    library, document = open_document("cluster", name_or_path, search)
    return _cluster(library, document, consistent=consistent)


def parse_cluster(name: str, text: str, *, search: Sequence[Path] = ()) -> Cluster:
    """Build a cluster from the text of a profile that is in no file yet; errors as `load_cluster`.

    Parameters
    ----------
    name : str
        What the file will be called, without its suffix.
    text : str
        YAML.
    search : sequence of Path
        Folders looked in before the bundled profiles.
    """
    library = Library((*search, bundled()))
    document = parse_document(name, f"{name}.yaml", text.encode())
    return _cluster(library, document, consistent=True)


def nearest_cluster(device: str, *, search: Sequence[Path] = ()) -> Cluster:
    """The plainest cluster of a device, by the shortest name: where its own machine is described from.

    Raises
    ------
    ProfileError
        If the device is unknown or no cluster has it.

    Examples
    --------
    >>> nearest_cluster("h100-sxm5-80gb").name
    'h100-sxm8'
    """
    wanted = load_device(device, search=search).name
    clusters = [load_cluster(name, search=search, consistent=False) for name in list_profiles("cluster", search=search)]
    found = [cluster for cluster in clusters if cluster.device.name == wanted]
    if not found:
        raise ProfileError(f"no cluster has device {wanted}; write one by hand as hwprofiles/README.md says")
    return min(found, key=lambda cluster: (len(cluster.name), cluster.name))


def _cluster(library: Library, document: Document, *, consistent: bool) -> Cluster:
    builder = Builder(library)
    cluster = _checked(builder.cluster(document), builder, document)
    if consistent and (wrong := impossible_curves(cluster)):
        listed = "".join(f"\n  - {problem}" for problem in wrong)
        raise ProfileError(f"profile {document.name} contradicts itself:{listed}")
    return replace(cluster, digest=builder.hexdigest())


def _checked(spec: _Spec | None, builder: Builder, document: Document) -> _Spec:
    count = len(builder.problems)
    if count:
        listed = "".join(f"\n  - {problem}" for problem in builder.problems)
        raise ProfileError(f"profile {document.name} has {count} problem{'s' if count > 1 else ''}:{listed}")
    assert spec is not None
    return spec
