"""Records of measurements as files: what was measured before is kept and not measured again."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from overlapsim.validate.measure import Timing

from overlapsim.calibration.records import Header, Record, RecordSet, dump_records, read_records
from overlapsim.errors import UsageError
from overlapsim.report.files import check_writable, write_text

if TYPE_CHECKING:
    from overlapsim.validate.ranks import Ranks

# Everything of a record but what was measured.
_RESULT: Final = ("median_s", "p10_s", "p90_s", "repeats", "valid")
CONDITIONS: Final = tuple(item.name for item in fields(Record) if item.name not in _RESULT)


class RecordFile:
    """A record file that grows: rank 0 writes it whole after every record.

    Parameters
    ----------
    path : of the file, or None to keep records in memory only
    header : where they are taken
    writes : whether this process writes (rank 0)

    Raises
    ------
    UsageError
        If the file cannot be written, or holds records of another machine or other versions.
    CalibrationError
        If there is a file that holds no records.
    """

    def __init__(self, path: Path | None, header: Header, *, writes: bool = True) -> None:
        self.path, self.header, self._writes = path, header, writes
        self.records: list[Record] = []
        if path is None:
            return
        check_writable(path)
        if path.exists():
            earlier = read_records(path)
            if replace(earlier.header, date="") != replace(header, date=""):
                raise UsageError(
                    f"{path} holds records of another machine or other versions of its libraries; give another file"
                )
            self.records = list(earlier.records)

    def find(self, like: Record) -> Record | None:
        """Record that was taken before under the same conditions and is valid."""
        wanted = conditions(like)
        return next((record for record in self.records if record.valid and conditions(record) == wanted), None)

    def add(self, record: Record) -> Record:
        """Keep a record, in place of an earlier one under the same conditions, and write the file."""
        wanted = conditions(record)
        self.records = [entry for entry in self.records if conditions(entry) != wanted]
        self.records.append(record)
        if self.path is not None and self._writes:
            write_text(self.path, dump_records(RecordSet(tuple(self.records), self.header)))
        return record


def conditions(record: Record) -> tuple[Any, ...]:
    """Under which conditions a record was taken: what makes two of them repeats of one."""
    return tuple(getattr(record, name) for name in CONDITIONS)


def timed(like: Record, timing: Timing) -> Record:
    """A record's conditions with what was measured.

    Examples
    --------
    >>> timed(Record("launch", "event", 1.0), Timing(2e-6, 1.9e-6, 2.1e-6, 20)).median_s
    2e-06
    """
    return replace(
        like,
        median_s=timing.median_s,
        p10_s=timing.p10_s,
        p90_s=timing.p90_s,
        repeats=timing.repeats,
        valid=timing.valid,
    )


def header_of(ranks: Ranks) -> Header:
    """Where measurements of these ranks are taken: product names and versions, no host or user."""
    import torch

    from overlapsim import __version__

    libraries = {"torch": str(torch.__version__), "overlapsim": __version__}
    driver = ""
    if ranks.backend == "nccl":
        import torch.cuda.nccl

        device = torch.cuda.get_device_name(ranks.device)
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        libraries |= {"nccl": ".".join(map(str, nccl)), "cuda": str(torch.version.cuda)}
        driver = _driver()
    else:
        device = f"CPU {cpu_name()}"
        libraries["gloo"] = f"of torch {torch.__version__}"
    topology = f"{ranks.local_size} ranks a node, {ranks.num_nodes} nodes"
    return Header(device, driver, libraries, topology, datetime.date.today().isoformat())


def cpu_name() -> str:
    """Product name of the CPU, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names: Iterable[str] = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(iter(names), platform.machine())


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
