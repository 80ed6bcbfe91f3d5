"""Where profiles are found: the caller's folders, then the bundled ones, and what a name or path opens."""

from __future__ import annotations

import difflib
import importlib.resources
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from overlapsim.errors import ProfileError
from overlapsim.hardware.documents import Document, Kind, read_document, stem_of


@dataclass(frozen=True)
class Library:
    """Folders in the order they are searched.

    A folder holds ``devices/ nodes/ clusters/ tables/``, or the files themselves side by side.
    """

    roots: tuple[Traversable, ...]

    def find(self, kind: Kind, name: str, skip: frozenset[str] = frozenset()) -> Document | None:
        """First profile of that kind and name, leaving out the files labelled `skip`."""
        file_name = f"{name.removesuffix('.yaml')}.yaml"
        for root in self.roots:
            for entry in (root / f"{kind}s" / file_name, root / file_name):
                if str(entry) in skip or not entry.is_file():
                    continue
                document = read_document(entry, root)
                # Side by side, a cluster and its node may not share a name; a file of another kind is not meant.
                if document.data.get("kind", kind) == kind:
                    return document
        return None

    def get(self, kind: Kind, name: str) -> Document:
        """As `find`, but a name that is not there is an error.

        Raises
        ------
        ProfileError
            If there is none: the message lists near names and what exists.
        """
        return self.find(kind, name) or self._fail(kind, name)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Names of all profiles of a kind, sorted."""
        found: set[str] = set()
        for root in self.roots:
            folder = root / f"{kind}s"
            if folder.is_dir():
                found.update(stem_of(entry) for entry in folder.iterdir() if entry.name.endswith(".yaml"))
            if root.is_dir():
                found.update(stem_of(entry) for entry in root.iterdir() if _is_kind(entry, kind))
        return tuple(sorted(found))

    def table(self, file: str) -> Traversable | None:
        """First ``tables/FILE`` or ``FILE`` in the folders."""
        places = (place for root in self.roots for place in (root / "tables" / file, root / file))
        return next((place for place in places if place.is_file()), None)

    def fits(self, document: Document) -> tuple[Document, ...]:
        """Fits that lie beside a device or cluster under its name: ``fits/FAMILY/NAME.yaml``, by family."""
        folder = None if document.root is None else document.root / "fits"
        if folder is None or not folder.is_dir():
            return ()
        files = (family / f"{document.name}.yaml" for family in sorted(folder.iterdir(), key=lambda entry: entry.name))
        return tuple(read_document(file) for file in files if file.is_file())

    def fit(self, file: str) -> Document | None:
        """First ``fits/FILE`` or ``FILE`` in the folders."""
        places = (place for root in self.roots for place in (root / "fits" / file, root / file))
        found = next((place for place in places if place.is_file()), None)
        return None if found is None else read_document(found)

    def seen_from(self, document: Document) -> Library:
        """The folders in which a file's own references are found: its folder and those searched after it."""
        places = [place for place, root in enumerate(self.roots) if root is document.root]
        return Library(self.roots[places[0] :]) if places else self

    def _fail(self, kind: Kind, name: str) -> Document:
        names = self.names(kind)
        begun = [known for known in names if name and known.startswith(name.lower())][:3]
        near = begun or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "expected a name below, or the path of a file"
        raise ProfileError(f"{kind} {name!r} is unknown; {hint}\n{_listed(names)}")


def bundled() -> Traversable:
    """Folder of the profiles that come with overlapsim."""
    return importlib.resources.files("overlapsim.hwprofiles")


def open_document(kind: Kind, name_or_path: str, search: Sequence[Path]) -> tuple[Library, Document]:
    """Find a profile by name, or by the path of a file or folder, and the library its references live in.

    Raises
    ------
    ProfileError
        If there is no such name or path, or a folder does not hold exactly one profile of that kind.
    """
    folders = tuple(folder.resolve() for folder in search)
    library = Library((*folders, bundled()))
    path = Path(name_or_path)
    is_path = len(path.parts) > 1 or path.suffix in (".yaml", ".yml")
    if not name_or_path.strip() or (not is_path and not path.is_dir()):
        return library, library.get(kind, name_or_path)
    if not is_path and (document := library.find(kind, name_or_path)):
        return library, document
    path = path.resolve()
    if path.is_file():
        root = path.parent.parent if path.parent.name == f"{kind}s" else path.parent
        return Library((root, *folders, bundled())), read_document(path, root)
    if not path.is_dir():
        raise ProfileError(
            f"there is no file or folder {name_or_path}; give a YAML file, a folder, or a name\n"
            f"{_listed(library.names(kind))}"
        )
    inside = Library((path,))
    names = inside.names(kind)
    if len(names) != 1:
        raise ProfileError(
            f"folder {name_or_path} holds {len(names)} {kind} profiles ({', '.join(names) or 'none'}); "
            "expected exactly one, or name the file"
        )
    return Library((path, *folders, bundled())), inside.get(kind, names[0])


def resolve_chain(kind: Kind, document: Document, library: Library) -> tuple[Document, ...]:
    """The document and what it extends, base first.

    Raises
    ------
    ProfileError
        If ``extends:`` is not a name, names nothing, or comes back to a file of the chain.
    """
    chain = [document]
    while (base := chain[-1].data.get("extends")) is not None:
        if not isinstance(base, str):
            raise ProfileError(f"profile {chain[-1].label}: extends is {base!r}; expected the name of a {kind}")
        # A user's file may extend the bundled profile of its own name, so files in the chain are passed over.
        found = library.find(kind, base, frozenset(entry.label for entry in chain))
        if found is None:
            if any(entry.name == base.removesuffix(".yaml") for entry in chain):
                path = " -> ".join([*(entry.name for entry in chain), base])
                raise ProfileError(f"profile {document.label}: extends in a circle ({path}); one must stand alone")
            library.get(kind, base)
        assert found is not None
        chain.append(found)
    return tuple(reversed(chain))


def _is_kind(entry: Traversable, kind: Kind) -> bool:
    if not entry.name.endswith(".yaml"):
        return False
    try:
        return bool(read_document(entry).data.get("kind") == kind)
    except ProfileError:
        return False


def _listed(names: Sequence[str]) -> str:
    """Names on lines of their own."""
    text = f"there are: {', '.join(names) or 'none'}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)
