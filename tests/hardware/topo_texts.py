"""Outputs of ``nvidia-smi topo -m`` in the forms that drivers of several years print, composed for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(
    gpus: int,
    relation: Callable[[int, int], str],
    nics: Sequence[str] = (),
    nic: Callable[[int, int], str] = lambda gpu, nic: "SYS",
    cpu: Sequence[str] = (),
    numa: Sequence[str] = (),
    gpu_numa: bool = False,
    gap: str = "\t",
) -> str:
    """A matrix with its NIC rows and legend."""
    titles = [f"GPU{gpu}" for gpu in range(gpus)] + list(nics)
    titles += ["CPU Affinity"] * bool(cpu) + ["NUMA Affinity"] * bool(numa) + ["GPU NUMA ID"] * gpu_numa
    lines = [gap + gap.join(titles)]
    for row in range(gpus):
        cells = [f"GPU{row}", *(" X " if row == other else relation(row, other) for other in range(gpus))]
        cells += [nic(row, number) for number in range(len(nics))]
        cells += [*cpu[row : row + 1], *numa[row : row + 1], *["N/A"] * gpu_numa]
        lines.append(gap.join(cells))
    for number, name in enumerate(nics):
        between = (" X " if number == other else "SYS" for other in range(len(nics)))
        lines.append(gap.join([name, *(nic(gpu, number) for gpu in range(gpus)), *between]))
    return "\n".join(lines) + "\n" + LEGEND


def dgx_h100() -> str:
    """Driver of 2023: numbered NICs, ten of them, GPU and NIC in pairs below a switch; storage NICs 2 and 5."""
    compute = {0: 0, 1: 1, 2: 3, 3: 4, 4: 6, 5: 7, 6: 8, 7: 9}
    side = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]

    def nic(gpu: int, number: int) -> str:
        if compute[gpu] == number:
            return "PXB"
        return "NODE" if gpu // 4 == side[number] else "SYS"

    cpus = ["0-55,112-167"] * 4 + ["56-111,168-223"] * 4
    text = matrix(
        8,
        lambda a, b: "NV18",
        [f"NIC{number}" for number in range(10)],
        nic,
        cpus,
        ["0"] * 4 + ["1"] * 4,
        gpu_numa=True,
    )
    legend = "".join(f"  NIC{number}: mlx5_{number}\n" for number in range(10))
    return f"$ nvidia-smi topo -m\n{text}\nNIC Legend:\n\n{legend}\n"


def dgx_a100() -> str:
    """Two GPUs and two NICs below each switch, NICs by name, four NUMA nodes in use."""
    numa = ["3", "3", "1", "1", "7", "7", "5", "5"]
    return matrix(
        8,
        lambda a, b: "NV12",
        [f"mlx5_{number}" for number in range(8)],
        lambda gpu, number: "PXB" if gpu // 2 == number // 2 else "SYS",
        ["0-127"] * 8,
        numa,
    )


def p5() -> str:
    """Four EFA devices for each GPU."""
    return matrix(
        8,
        lambda a, b: "NV18",
        [f"rdmap{number}s0" for number in range(32)],
        lambda gpu, number: "PIX" if number // 4 == gpu else ("NODE" if number // 16 == gpu // 4 else "SYS"),
        ["0-47"] * 4 + ["48-95"] * 4,
        ["0"] * 4 + ["1"] * 4,
        gpu_numa=True,
    )


def dgx1() -> str:
    """Driver of 2017: a hybrid cube mesh, SOC for SYS, blanks between cells, no NUMA column, underlined header."""
    links = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2}
    links |= {(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}
    text = matrix(
        8,
        lambda a, b: f"NV{links[min(a, b), max(a, b)]}" if (min(a, b), max(a, b)) in links else "SOC",
        [f"mlx5_{number}" for number in (0, 2, 1, 3)],
        lambda gpu, number: "PIX" if gpu // 2 == number else ("PHB" if gpu // 4 == number // 2 else "SOC"),
        ["0-19,40-59"] * 4 + ["20-39,60-79"] * 4,
        gap="   ",
    )
    header, rest = text.split("\n", 1)
    return f"\x1b[4m{header}\x1b[0m\r\n" + rest.replace("\n", "\r\n")


def polaris() -> str:
    """Four A100 in a mesh, no NIC columns."""
    return matrix(4, lambda a, b: "NV4", cpu=["24-31", "16-23", "8-15", "0-7"], numa=["3", "2", "1", "0"])


def pcie_switches() -> str:
    """Eight GPUs, four below each switch, one NIC at the first socket and none at the second."""

    def relation(a: int, b: int) -> str:
        return "SYS" if a // 4 != b // 4 else ("PIX" if a // 2 == b // 2 else "PXB")

    return matrix(
        8,
        relation,
        ["NIC0"],
        lambda gpu, number: "NODE" if gpu < 4 else "SYS",
        ["0-31"] * 4 + ["32-63"] * 4,
        ["0"] * 4 + ["1"] * 4,
        gpu_numa=True,
    )


def two_on_one_bridge() -> str:
    """A desktop: two GPUs below one host bridge, nothing else."""
    return matrix(2, lambda a, b: "PHB", cpu=["0-63"] * 2, numa=["0"] * 2, gpu_numa=True)


def virtual_machine() -> str:
    """Four GPUs of an NVSwitch machine; the hypervisor hides CPUs."""
    return matrix(4, lambda a, b: "NV18", ["NIC0"], lambda gpu, number: "PHB", ["N/A"] * 4, ["N/A"] * 4, gpu_numa=True)
