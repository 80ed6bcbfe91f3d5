"""Reads what ``nvidia-smi topo -m`` prints: what joins each two GPUs, each GPU and NIC, and which CPU is near."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import ProfileError

DISTANCES: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe relations, nearest first: one switch, several, one host bridge, one NUMA node, across sockets."""
_ALIASES: Final[Mapping[str, str]] = {"SOC": "SYS", "PSB": "PIX"}  # printed by drivers before 2018
_NVLINK: Final = re.compile(r"NV([1-9]\d?)")
_GPU: Final = re.compile(r"GPU\d+")
# Terminals underline the header; copies keep the codes.
_STYLE: Final = re.compile("\x1b\\[[0-9;]*m")
_AFFINITIES: Final = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_RERUN: Final = "run 'nvidia-smi topo -m > topo.txt' again and give the whole output"


@dataclass(frozen=True)
class TopoMatrix:
    """One machine as its driver sees it.

    Attributes
    ----------
    gpus : relation of each two GPUs: NVLinks between them (int), a word of `DISTANCES`, or ``X`` with itself
    nics : names of the NICs, in order of their columns
    nic_distances : for each GPU, a word of `DISTANCES` to each NIC
    sockets : for each GPU, a text that GPUs near one CPU share; empty if the matrix does not say
    """

    gpus: tuple[tuple[int | str, ...], ...]
    nics: tuple[str, ...]
    nic_distances: tuple[tuple[str, ...], ...]
    sockets: tuple[str, ...]


def read_topo_matrix(text: str, name: str) -> TopoMatrix:
    r"""Parse the output of ``nvidia-smi topo -m``.

    Tabs or blanks between cells, NIC columns by name or number, with or without NUMA columns, prompts before and
    legends behind: as drivers from 2018 on print it. Names of NICs are kept only for messages.

    Parameters
    ----------
    text : str
        The output.
    name : str
        File name for messages.

    Raises
    ------
    ProfileError
        If there is no matrix in the text, rows or cells are missing, a cell is unknown, or two cells that mean the
        same pair differ.

    Examples
    --------
    >>> text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-31\nGPU1\tNV12\t X \t0-31"
    >>> read_topo_matrix(text, "topo.txt").gpus
    (('X', 12), (12, 'X'))
    """
    lines = [(number, _STYLE.sub("", line).strip()) for number, line in enumerate(text.splitlines(), start=1)]
    start = next((index for index, (_, line) in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise ProfileError(
            f"{name} has no topology matrix; expected what nvidia-smi topo -m prints, with a header of GPU0, GPU1 ...: "
            f"{_RERUN}"
        )
    columns, affinities = _columns(lines[start][1])
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for number, line in lines[start + 1 :]:
        label, *cells = line.split() or [""]
        if label.startswith("Legend"):
            break
        if label in rows:
            raise ProfileError(f"{name}, line {number}: row {label} appears twice; give the output of one machine")
        if label in gpus:
            if len(cells) < len(columns):
                raise ProfileError(
                    f"{name}, line {number}: row {label} has {len(cells)} of {len(columns)} cells, "
                    f"the file is cut off: {_RERUN}"
                )
            rows[label] = ([_cell(name, number, label, cell) for cell in cells[: len(columns)]], cells[len(columns) :])
    missing = [gpu for gpu in gpus if gpu not in rows]
    if missing:
        raise ProfileError(f"{name} has no row for {', '.join(missing)}, the file is cut off: {_RERUN}")
    return _matrix(name, columns, gpus, rows, affinities)


def _is_header(line: str) -> bool:
    # A row of the matrix starts with a GPU too, but goes on with a cell.
    tokens = line.split()
    return bool(tokens) and tokens[0] == "GPU0" and (len(tokens) == 1 or _cell_of(tokens[1]) is None)


def _columns(header: str) -> tuple[list[str], int]:
    """Names of the matrix's columns and how many affinity columns follow."""
    count = sum(title in header for title in _AFFINITIES)
    for title in _AFFINITIES:
        header = header.replace(title, "")
    # Copies may shorten "NUMA Affinity"; nothing that is no device belongs to the matrix.
    return [word for word in header.split() if word not in ("CPU", "NUMA", "Affinity", "GPU", "ID")], count


def _cell_of(text: str) -> int | str | None:
    word = _ALIASES.get(text, text)
    if word == "X" or word in DISTANCES:
        return word
    match = _NVLINK.fullmatch(word)
    return int(match[1]) if match else None


def _cell(name: str, number: int, row: str, text: str) -> str:
    if _cell_of(text) is None:
        raise ProfileError(
            f"{name}, line {number}: row {row} has cell {text!r}; expected X, NV#, {', '.join(DISTANCES)} of "
            f"nvidia-smi topo -m: {_RERUN}"
        )
    return text


def _matrix(
    name: str,
    columns: Sequence[str],
    gpus: Sequence[str],
    rows: Mapping[str, tuple[list[str], list[str]]],
    affinities: int,
) -> TopoMatrix:
    values = {gpu: dict(zip(columns, map(_cell_of, rows[gpu][0]), strict=True)) for gpu in gpus}
    for first in gpus:
        for second in gpus:
            here, there = values[first][second], values[second][first]
            if here != there or (here == "X") != (first == second):
                raise ProfileError(
                    f"{name}: {first} and {second} read {rows[first][0][columns.index(second)]} one way and "
                    f"{rows[second][0][columns.index(first)]} the other; expected one relation, X only with itself"
                )
    nics = [column for column in columns if column not in gpus]
    distances = tuple(tuple(str(values[gpu][nic]) for nic in nics) for gpu in gpus)
    return TopoMatrix(
        gpus=tuple(tuple(_known(values[first][second]) for second in gpus) for first in gpus),
        nics=tuple(nics),
        nic_distances=distances,
        sockets=_sockets([rows[gpu][1] for gpu in gpus], affinities),
    )


def _known(value: int | str | None) -> int | str:
    assert value is not None
    return value


def _sockets(behind: Sequence[Sequence[str]], affinities: int) -> tuple[str, ...]:
    """NUMA node of each GPU, else its CPUs; empty unless every GPU has one."""
    for column in (1, 0):
        if column < affinities and all(len(cells) > column and cells[column] != "N/A" for cells in behind):
            return tuple(cells[column] for cells in behind)
    return ()
