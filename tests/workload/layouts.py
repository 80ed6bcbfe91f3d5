"""Random sound layouts, and small models that they fit."""

from __future__ import annotations

from hypothesis import strategies as st

from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout

_SMALL = st.sampled_from((1, 2, 3, 4))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of a few ranks: an expert grid is drawn from the divisors of the dense one."""
    tp, sp, cp, pp, dp = (draw(_SMALL) for _ in range(5))
    inner = tp * sp * cp * dp
    etp = draw(st.sampled_from([degree for degree in range(1, inner + 1) if inner % degree == 0]))
    ep = draw(st.sampled_from([degree for degree in range(1, inner // etp + 1) if inner // etp % degree == 0]))
    edp = inner // etp // ep
    zero = draw(st.integers(0, 3))
    hsdp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if dp % n == 0 and edp % n == 0])) if zero else 1
    kind = draw(st.sampled_from(("ring", "allgather") if sp == 1 else ("ring",)))
    vpp = draw(_SMALL) if pp > 1 else 1
    try:
        return Layout(tp, sp, cp, kind, ep, etp, pp, vpp, dp, zero, hsdp, draw(st.booleans()))
    except LayoutError as error:  # pragma: no cover - a drawn layout is sound
        raise AssertionError(str(error)) from None
