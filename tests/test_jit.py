"""Where machine code is kept, and who is told when it has to be made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overlapsim.jit import PACKAGE, cache_folder, compiled, on_compilation

# Decorated when its module is imported; nothing is compiled here.
SHOW = "import numba, overlapsim.planner.partition as p; print(p.{name}.stats.cache_path, repr(numba.config.CACHE_DIR))"


def cache_path(tmp_path: Path, **variables: str) -> tuple[Path, str]:
    """Cache folder of a compiled function of the package and numba's setting afterwards, in a fresh process."""
    from overlapsim.planner import partition

    name = next(name for name, value in vars(partition).items() if hasattr(value, "py_func"))
    kept = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(name=name)],
        env={**kept, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    path, setting = done.stdout.split()
    return Path(path), setting


def test_cache_lies_outside_the_package_and_by_place_of_installation(tmp_path: Path) -> None:
    path, setting = cache_path(tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert path.parent == tmp_path / "overlapsim" / "numba"
    assert path.name.startswith("planner_")  # and a digest of the folder of the source
    assert path.is_dir()
    assert setting == "''"  # other users of numba in the process are left alone


def test_a_folder_set_by_the_user_stands(tmp_path: Path) -> None:
    path, setting = cache_path(tmp_path, XDG_CACHE_HOME=str(tmp_path / "x"), NUMBA_CACHE_DIR=str(tmp_path / "mine"))
    assert path.parent == tmp_path / "mine"
    assert setting == repr(str(tmp_path / "mine"))
    assert not (tmp_path / "x").exists()


def test_where_the_cache_cannot_be_written_the_package_still_loads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path, _ = cache_path(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert tmp_path not in path.parents


@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_without_a_usable_variable_it_is_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "overlapsim" / "numba"


def test_without_a_home_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache_folder() is None


def test_the_package_is_recognised() -> None:
    import overlapsim

    assert Path(overlapsim.__file__).resolve().parent == PACKAGE


def fresh_function() -> Any:
    """A function from no file, which no cache can hold."""
    names: dict[str, Any] = {}
    exec("def double(x):\n    return x + x\n", names)
    return compiled(names["double"])


def test_compilations_are_told_with_their_ends() -> None:
    function, calls = fresh_function(), list[str]()
    with on_compilation(lambda: calls.append("begins"), lambda: calls.append("ends")):
        assert calls == []
        assert function(2) == 4
        assert calls == ["begins", "ends"]
        assert function(3) == 6
        assert calls == ["begins", "ends"]
        assert function(2.5) == 5.0
    assert calls == ["begins", "ends"] * 2
    assert fresh_function()(2) == 4
    assert calls == ["begins", "ends"] * 2
