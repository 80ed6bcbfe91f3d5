"""Profiles from files: bundled by name, or a user's own file or folder, checked and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from overlapsim.errors import ProfileError
from overlapsim.hardware.build import Builder
from overlapsim.hardware.documents import Document, Kind
from overlapsim.hardware.library import Library, bundled, open_document
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


def load_cluster(name_or_path: str, *, search: Sequence[Path] = ()) -> Cluster:
    """Load a cluster with its node, device and measured tables.

    Parameters
    ----------
    name_or_path : str
        Name of a cluster, or path of a YAML file, or of a folder that holds one cluster. What it names in turn
        (``node device extends`` and tables) is looked for beside it, then in `search`, then among the bundled.
    search : sequence of Path
        Folders looked in before the bundled profiles.

    Returns
    -------
    Cluster
        ``digest`` is the SHA-256 over the contents of all files used, whatever folders they stand in.

    Raises
    ------
    ProfileError
        If a name is unknown, a file cannot be read, or the profile has problems: unknown or missing keys, wrong
        units or types, values out of limits. One message lists them all.

    Examples
    --------
    >>> load_cluster("a100-sxm8").num_devices
    8
    """
    library, document = open_document("cluster", name_or_path, search)
    builder = Builder(library)
    cluster = _checked(builder.cluster(document), builder, document)
    return replace(cluster, digest=builder.hexdigest())


def _checked(spec: _Spec | None, builder: Builder, document: Document) -> _Spec:
    count = len(builder.problems)
    if count:
        listed = "".join(f"\n  - {problem}" for problem in builder.problems)
        raise ProfileError(f"profile {document.name} has {count} problem{'s' if count > 1 else ''}:{listed}")
    assert spec is not None
    return spec
