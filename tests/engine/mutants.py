"""Loads an engine with one line of its source changed, in plain Python, as modules of their own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from overlapsim import engine
from overlapsim.engine.timeline import Timeline

FOLDER = Path(engine.__file__).parent

# Decorators that compile nothing: the mutants of the compiled engine run as the Python they are written in.
PLAIN_JIT = """
def _same(function):
    return function
compiled = borrowing = inlined = _same
"""


@dataclass(frozen=True)
class Mutation:
    """One rule of docs/program.md section 3 (or of section 4 where marked), and an edit that breaks it."""

    rule: str
    file: str
    old: str
    new: str

    @property
    def engine(self) -> str:
        """The module whose `run` the edit changes."""
        return "reference" if self.file in ("reference.py", "share.py") else "compiled"


def mutated_source(mutation: Mutation) -> str:
    """Source of the file after the edit; the text to replace must be there, once."""
    source = (FOLDER / mutation.file).read_text()
    found = source.count(mutation.old)
    assert found == 1, (
        f"the mutation of rule {mutation.rule!r} is stale: its text is {found} times in {mutation.file}, not once. "
        f"Put into the table what {mutation.file} says now in place of:\n{mutation.old}"
    )
    changed = source.replace(mutation.old, mutation.new)
    assert changed != source
    return changed


@contextmanager
def loaded(engine_name: str, mutation: Mutation | None, folder: Path) -> Iterator[Callable[..., Timeline]]:
    """Yield `run` of the engine, imported afresh from a copy in `folder`, with the edit if there is one."""
    package = folder / f"mutant_{abs(hash((engine_name, mutation)))}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(PLAIN_JIT)
    names = ("reference.py", "share.py") if engine_name == "reference" else ("compiled.py", "kernel_*.py")
    for path in (path for name in names for path in FOLDER.glob(name)):
        mine = mutation is not None and mutation.file == path.name
        source = mutated_source(mutation) if mutation is not None and mine else path.read_text()
        for module in ("share", "kernel_"):
            source = source.replace(f"from overlapsim.engine.{module}", f"from {package.name}.{module}")
        source = source.replace("from overlapsim.engine import kernel", f"from {package.name} import kernel")
        source = source.replace("from overlapsim.jit", f"from {package.name}.jit")
        (package / path.name).write_text(source)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        yield importlib.import_module(f"{package.name}.{engine_name}").run
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
            del sys.modules[name]
