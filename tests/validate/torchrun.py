"""Starts scripts and commands on several ranks with the real torchrun, one agent a node; never waits for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 120.0
"""A guard against hangs, not a measurement: runs take a few seconds on a quiet machine."""


@dataclass(frozen=True)
class Outcome:
    """Exit codes of the agents, and what all ranks printed."""

    codes: tuple[int, ...]
    out: str
    err: str


def torchrun(arguments: Sequence[str], *, ranks: int, nodes: int = 1, **environment: str) -> Outcome:
    """Run ``torchrun ARGUMENTS`` on `ranks` ranks; with several nodes as many agents meet on this machine."""
    per_node = ranks // nodes
    # Every agent runs on this machine: addresses of other devices must not be looked for.
    known = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    base = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(per_node)]
    if nodes == 1:
        agents = [[*base, "--standalone", *arguments]]
    else:
        meeting = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        agents = [[*base, *meeting, "--node-rank", str(node), *arguments] for node in range(nodes)]
    running = [
        subprocess.Popen(agent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=known)
        for agent in agents
    ]
    texts = []
    try:
        for process in running:
            texts.append(process.communicate(timeout=LIMIT_S))
    finally:
        for process in running:
            process.kill()
    return Outcome(
        tuple(process.returncode for process in running),
        "".join(out for out, _ in texts),
        "".join(err for _, err in texts),
    )


def script(name: str, *arguments: str, ranks: int, nodes: int = 1, **environment: str) -> Outcome:
    """Run one of ``tests/validate/scripts`` on several ranks."""
    return torchrun([str(SCRIPTS / f"{name}.py"), *arguments], ranks=ranks, nodes=nodes, **environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
