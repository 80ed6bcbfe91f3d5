"""The tuner that ships as an example with NCCL reads the emitted table and picks what the table says."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from overlapsim.emit.nccl import COLLECTIVES, EMITTER, TABLE, groups_of
from tests.emit.frameworks.runs import folder
from tests.emit.subjects import PLANS, subject
from tests.emit.test_nccl import match, rows

pytestmark = pytest.mark.frameworks
LIBRARY = "libnccl-tuner-example.so"
# As the interface numbers them (plugins/tuner/example/nccl/tuner.h, NCCL 2.30.7).
FUNCTIONS = {"broadcast": 0, "reduce": 1, "all_gather": 2, "reduce_scatter": 3, "all_reduce": 4}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
SIZES = [0, 1, 4096, 65536, 65537, 2**20, 10**7, 2**28, 2**33]
Logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)


class Interface(ctypes.Structure):
    """``ncclTuner_v6_t``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.c_void_p),
        ("info", ctypes.c_void_p),
        ("finalize", ctypes.c_void_p),
        ("chunk", ctypes.c_void_p),
    )


INIT = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_size_t,
    Logger,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
INFO = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
)


class Tuner:
    """The plugin for one communicator; answers with algorithm, protocol and channels."""

    def __init__(self, table: Path, nodes: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder() / LIBRARY
        if not path.exists():
            pytest.skip(f"no {LIBRARY} in {folder()}")
        # The plugin reads the environment of the process, which Python's changes reach.
        monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(table))
        self.interface = Interface.in_dll(ctypes.CDLL(str(path)), "ncclTunerPlugin_v6")
        self.context = ctypes.c_void_p()
        self.silent = Logger(lambda *_: None)
        assert INIT(self.interface.init)(self.context, 1, ranks, nodes, self.silent, None, None) == 0

    def pick(self, function: int, size: int, gone: tuple[str, ...] = ()) -> tuple[str, str, int]:
        """Answer for one collective; algorithms in `gone` are not offered."""
        costs = ((ctypes.c_float * 3) * 7)()
        for a, algorithm in enumerate(ALGORITHMS):
            for p in range(3):
                costs[a][p] = -1.0 if algorithm in gone else 100.0
        channels = ctypes.c_int(0)
        assert INFO(self.interface.info)(self.context, function, size, 1, costs, 7, 3, 0, channels) == 0
        chosen = [(a, p) for a in range(7) for p in range(3) if costs[a][p] == 0.0]
        assert len(chosen) == 1
        return ALGORITHMS[chosen[0][0]], PROTOCOLS[chosen[0][1]], channels.value


@pytest.mark.parametrize("name", PLANS)
def test_it_picks_what_the_table_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = subject(name)
    assert base.cluster is not None
    table, lines = tmp_path / TABLE, rows(base)
    table.write_text(EMITTER.emit(base).files[TABLE], encoding="utf-8")
    for nodes, ranks in (*groups_of(base, base.cluster), (7, 56)):
        tuner = Tuner(table, nodes, ranks, monkeypatch)
        for collective in COLLECTIVES:
            for size in SIZES:
                row = match(lines, collective, size, nodes, ranks)
                assert tuner.pick(FUNCTIONS[collective], size) == (row[3], row[4], int(row[5]))


def test_it_falls_to_a_ring_where_an_algorithm_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / TABLE
    table.write_text(EMITTER.emit(subject("dense")).files[TABLE], encoding="utf-8")
    tuner = Tuner(table, 1, 8, monkeypatch)
    assert tuner.pick(FUNCTIONS["all_reduce"], 2**28)[0] == "nvls"
    assert tuner.pick(FUNCTIONS["all_reduce"], 2**28, gone=("nvls",)) == ("ring", "simple", 0)


def test_a_table_without_a_row_would_leave_one_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why every collective and size has a row."""
    table = tmp_path / TABLE
    table.write_text("allreduce,0,1024,ring,ll,4,-1,-1\n", encoding="utf-8")
    tuner = Tuner(table, 1, 8, monkeypatch)
    costs = ((ctypes.c_float * 3) * 7)()
    channels = ctypes.c_int(0)
    assert INFO(tuner.interface.info)(tuner.context, 2, 2**20, 1, costs, 7, 3, 0, channels) == 0
    assert channels.value == 1
