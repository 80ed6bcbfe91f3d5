"""A base profile that is a user's own: what a calibrated profile must carry of it to stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Final

from overlapsim.errors import ProfileError
from overlapsim.hardware.catalogue import Library, bundled, open_document, resolve_chain
from overlapsim.hardware.documents import Document, Kind, is_leaf, merge_chain

_PARTS: Final[Mapping[Kind, tuple[Kind, ...]]] = {"cluster": ("node", "fabric"), "node": ("device",)}


def base_overlay(base_name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Keys that a profile on top of `base_name` begins with, and files it needs beside it.

    A bundled base is only named (``extends``). A user's own is carried along, with its node, device, tables and
    fits, as far as they are not bundled: the new folder must not lean on the old one.

    Parameters
    ----------
    base_name : name or path, as for ``--cluster``

    Returns
    -------
    overlay : mapping
        ``extends`` and the keys of the user's own files.
    files : bytes by path
        Tables and fits.

    Raises
    ------
    ProfileError
        As loading the base.
    """
    library, document = open_document("cluster", base_name, ())
    files: dict[str, bytes] = {}
    return _overlay("cluster", document, library, files), files


def _overlay(kind: Kind, document: Document, library: Library, files: dict[str, bytes]) -> dict[str, Any]:
    chain = resolve_chain(kind, document, library)
    shipped = [entry for entry in chain if _is_bundled(entry)]
    own = [entry for entry in chain if not _is_bundled(entry)]
    if not own:
        return {"extends": document.name}
    data = _stacked(own)
    overlay: dict[str, Any] = {"extends": shipped[-1].name} if shipped else {}
    overlay |= {key: value for key, value in data.items() if key not in ("kind", "extends", "notes", "calibrated")}
    if "fits" in data and data["fits"] is None:
        raise ProfileError(
            f"{kind} {document.name} takes its base's fits away (fits: null), which a profile on top of it cannot "
            "keep; calibrate on the base itself"
        )
    if "curves" in data and data["curves"] is None:
        # A calibrated profile lists curves of its own, so those taken away must be named one by one.
        overlay["curves"] = dict.fromkeys(merge_chain(shipped).get("curves", {}))
    fits = list(overlay.get("fits", []))
    for entry in own:
        for fit in library.fits(entry):
            name = f"{fit.data.get('family')}_{fit.name}.yaml"
            files[f"fits/{name}"] = fit.content
            fits.insert(0, name)
    for file in overlay.get("fits", []):
        if (listed := library.fit(file)) is not None:
            files[f"fits/{file}"] = listed.content
    if fits:
        overlay["fits"] = fits
    for curve in (overlay.get("curves") or {}).values():
        if isinstance(curve, dict) and (table := library.table(str(curve.get("file")))) is not None:
            files[f"tables/{curve['file']}"] = table.read_bytes()
    for part in _PARTS.get(kind, ()):
        _carry(part, overlay, library, files)
    return overlay


def _stacked(own: Sequence[Document]) -> dict[str, Any]:
    """A user's own files, later over earlier; unlike `merge_chain`, a null stays: it takes away what is bundled."""
    stacked: dict[str, Any] = {}

    def put(target: dict[str, Any], data: Mapping[str, Any]) -> None:
        for key, value in data.items():
            if isinstance(value, dict) and not is_leaf(value):
                inherited = target.get(key)
                target[key] = dict(inherited) if isinstance(inherited, dict) and not is_leaf(inherited) else {}
                put(target[key], value)
            else:
                target[key] = value

    for document in own:
        put(stacked, document.data)
    return stacked


def _carry(part: Kind, overlay: dict[str, Any], library: Library, files: dict[str, bytes]) -> None:
    """Replace the name of a user's own node, device or fabric by its content."""
    value = overlay.get(part)
    if isinstance(value, dict):
        inner = Document(part, part, b"", {"kind": part, **value})
        overlay[part] = _overlay(part, inner, library, files)
        return
    if not isinstance(value, str):
        return
    found = library.find(part, value)
    if found is None:
        raise ProfileError(f"{part} {value!r} of the base is not there any more")
    if not _is_bundled(found):
        overlay[part] = _overlay(part, found, library, files)


def _is_bundled(document: Document) -> bool:
    root: Traversable | None = document.root
    return root is not None and str(root) == str(bundled())
