"""What assembly text must show: stores, a block barrier, then a release; an acquire before what it guards."""

from __future__ import annotations

import re
from typing import Final

STORE: Final = re.compile(r"\bst\.global[.\w]*")
BARRIER: Final = re.compile(r"\bbar(?:rier)?\.(?:cta\.)?sync\b")
# Both orders of the qualifiers are in use: `red.global.gpu.release.add` and `red.release.gpu.global.add`.
RELEASE: Final = re.compile(r"\b(?:red|atom|st)\.(?:\w+\.)*?release\.(?:\w+\.)*\w+")
ACQUIRE: Final = re.compile(r"\b(?:ld|atom)\.(?:\w+\.)*?acquire\.(?:\w+\.)*\w+")
DEVICE_SCOPE: Final = re.compile(r"\.gpu\b")
BULK_LOAD: Final = re.compile(r"\b(?:cp\.async\.c[ag]\.shared|ld\.global[.\w]*\.v[24])[.\w]*")


def signal_problems(ptx: str) -> tuple[str, ...]:
    """What is wrong with a kernel that stores tiles and counts them; empty if nothing is.

    Examples
    --------
    >>> signal_problems("st.global.v4.b32 x; bar.sync 0; red.global.gpu.release.add.u32 y, 1;")
    ()
    >>> signal_problems("st.global.v4.b32 x; red.global.gpu.release.add.u32 y, 1;")
    ('no block barrier between the last store and the count: other warps may not have stored yet',)
    """
    releases = list(RELEASE.finditer(ptx))
    if not releases:
        return ("no release: a count may be seen before the tile",)
    problems = [
        f"release without device scope: {found.group()}" for found in releases if not DEVICE_SCOPE.search(found.group())
    ]
    count = releases[-1].start()
    stores = [found.end() for found in STORE.finditer(ptx)]
    if not stores:
        problems.append("no store to global memory")
    elif max(stores) > count:
        problems.append("a store stands behind the count")
    elif not BARRIER.search(ptx, max(stores), count):
        problems.append("no block barrier between the last store and the count: other warps may not have stored yet")
    return tuple(problems)


def acquire_problems(ptx: str, *, guards_loads: bool = False) -> tuple[str, ...]:
    """What is wrong with a kernel that polls; with `guards_loads` the block's loads must come behind a barrier.

    Examples
    --------
    >>> acquire_problems("ld.global.gpu.acquire.b32 r, [x];")
    ()
    >>> acquire_problems("ld.global.b32 r, [x];")
    ('no acquire: what the count stands for may not be seen',)
    """
    acquires = list(ACQUIRE.finditer(ptx))
    if not acquires:
        return ("no acquire: what the count stands for may not be seen",)
    problems = [
        f"acquire without device scope: {found.group()}" for found in acquires if not DEVICE_SCOPE.search(found.group())
    ]
    if guards_loads:
        load = BULK_LOAD.search(ptx)
        if load is None:
            problems.append("no load of operands found")
        elif not BARRIER.search(ptx, acquires[-1].end(), load.start()):
            problems.append("no block barrier between the acquire and the loads that it guards")
    return tuple(problems)
