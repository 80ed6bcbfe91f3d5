"""Real kills: of the sweep itself, and of one of two workers of a cluster."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overlapsim.cli.main import main
from overlapsim.sweep.cluster import ClusterWorkers
from overlapsim.sweep.run import run_sweep
from overlapsim.sweep.spec import parse_sweep
from overlapsim.sweep.store import CsvStore
from tests.sweep.parts import operators, run

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 120.0
"""Nothing here is timed; this only keeps a broken test from hanging."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def ids_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["id"] for row in csv.DictReader(file)]


def sweep_command(spec: Path, output: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "overlapsim.cli.main",
        "sweep",
        str(spec),
        "-o",
        str(output),
        "--workers",
        "1",
        "--json",
    ]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
def test_killed_and_carried_on(tmp_path: Path) -> None:
    """Kill -9 half-way, with a line cut short: nothing is lost, nothing repeated, no process left behind."""
    spec, output = tmp_path / "spec.yaml", tmp_path / "out.csv"
    text = operators(str([256 * size for size in range(1, 41)])).replace("[2, 16]", "[2]")
    spec.write_text(text.replace("quick", "thorough"))
    first = subprocess.Popen(sweep_command(spec, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") > 2)
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    kept = output.read_bytes().count(b"\n") - 1
    assert 2 <= kept < 40 and children
    until(lambda: not any(alive(int(child)) for child in children))
    with output.open("ab") as file:
        file.write(b"0123,ok,,a100-sx")  # as a kill in the middle of a write leaves it
    second = subprocess.run(sweep_command(spec, output), capture_output=True, text=True, check=True)
    said = json.loads(second.stdout)
    assert (said["points"], said["done_before"], said["run"], said["ok"]) == (40, kept, 40 - kept, 40), (
        output.read_text()
    )
    assert f"{kept} of 40 points are there already" in second.stderr
    fresh = tmp_path / "fresh.csv"
    run(spec.read_text(), fresh)
    assert output.read_bytes() == fresh.read_bytes()


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Cluster:
    """A scheduler and two workers of one thread, on loopback, without anything that restarts them."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("distributed")
        found = folder / "scheduler.json"
        self.processes = [
            self._start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(found))
        ]
        until(found.exists)
        until(lambda: bool(found.read_text().strip().endswith("}")))
        self.address = json.loads(found.read_text())["address"]
        options = (self.address, "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny")
        self.workers = [self._start("dask_worker", *options, "--local-directory", str(folder)) for _ in range(2)]
        self.processes += self.workers

    def _start(self, module: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    yield found
    found.close()


def test_a_worker_of_a_cluster_dies(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of two workers is killed with tasks on it; the other does them, and all points are there once."""
    text = operators(str([64 * size for size in range(1, 21)]))
    sweep = parse_sweep(text)
    store = CsvStore(tmp_path / "out.csv", sweep.kind.row_columns)
    workers = ClusterWorkers(cluster.address)
    until(lambda: workers.num_slots() == 2)
    handed_out: list[int] = []
    add = store.append

    def append(rows: list) -> None:
        add(rows)
        if not handed_out and len(store._lines) >= 2:
            handed_out.append(len(store._lines))
            cluster.workers[0].kill()

    store.append = append  # type: ignore[method-assign,assignment]
    store.open()
    try:
        done = run_sweep(sweep, store, workers, lambda text: None)
        until(lambda: workers.num_slots() == 1)
    finally:
        workers.close()
        store.close()
    assert handed_out and handed_out[0] < 40
    assert (done.num_run, done.statuses) == (40, {"ok": 20, "infeasible": 20})
    assert ids_of(tmp_path / "out.csv") == [point.id for point in sweep.points]
    run(text, tmp_path / "here.csv")
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    # The command, on what is left of the cluster.
    spec, output = tmp_path / "spec.yaml", tmp_path / "more.parquet"
    spec.write_text(operators("[64, 128]"))
    main(["sweep", str(spec), "-o", str(output), "--scheduler", cluster.address, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["run"], said["ok"], said["infeasible"], said["failed"]) == (4, 2, 2, 0)
    assert len(list(output.glob("part-*.parquet"))) == 1
