"""Which layers a pipeline stage holds: even or given counts, one chunk after another (interleaving)."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Layer, ModelSpec


def chunk_layers(layout: Layout, num_layers: int, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each model chunk in the order in which a micro-batch passes them.

    A layout has ``pp x vpp`` chunks; chunk c lies on stage ``c % pp``. Layers must divide evenly, as frameworks ask by
    default, unless counts are given (a stage may then hold none: the first its embedding, the last its logits alone).

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    given : sequence of int, optional
        Layers of each chunk, for uneven stages (`spread_layers` proposes some).

    Raises
    ------
    LayoutError
        If the layers do not divide, or the given counts do not fit chunks and layers.

    Examples
    --------
    >>> chunk_layers(Layout(pp=4, vpp=2), 16)
    (2, 2, 2, 2, 2, 2, 2, 2)
    """
    chunks = layout.pp * layout.vpp
    if given is None:
        if num_layers % chunks:
            raise LayoutError(
                f"{num_layers} layers do not divide into pp x vpp = {layout.pp} x {layout.vpp} = {chunks} chunks; "
                "expected a divisor, or layers of each chunk given (uneven stages)"
            )
        return (num_layers // chunks,) * chunks
    if len(given) != chunks or sum(given) != num_layers or min(given) < 0:
        raise LayoutError(
            f"layers of chunks are {list(given)} with pp x vpp = {chunks} and {num_layers} layers; "
            f"expected {chunks} counts from 0 with the sum {num_layers}"
        )
    return tuple(given)


def spread_layers(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk as even as can be; those with fewer stand at both ends, the last first.

    Raises
    ------
    LayoutError
        If there is no chunk.

    Examples
    --------
    Llama-3 405B, as its authors ran it: one layer fewer on the first and the last of 16 stages.

    >>> spread_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    if chunks < 1:
        raise LayoutError(f"{chunks} chunks for {num_layers} layers; expected at least 1")
    few, fuller = divmod(num_layers, chunks)
    first = (chunks - fuller) // 2
    return (few,) * first + (few + 1,) * fuller + (few,) * (chunks - fuller - first)


def stage_layers(
    model: ModelSpec, layout: Layout, stage: int, given: Sequence[int] | None = None
) -> tuple[tuple[Layer, ...], ...]:
    """Layers that a stage holds, chunk by chunk.

    Parameters
    ----------
    stage : int
        Pipeline stage, from 0.
    given : sequence of int, optional
        As in `chunk_layers`.

    Raises
    ------
    LayoutError
        If there is no such stage, or as `chunk_layers`.
    """
    if not 0 <= stage < layout.pp:
        raise LayoutError(f"stage is {stage}; expected 0 to {layout.pp - 1}")
    counts = chunk_layers(layout, model.num_layers, given)
    begins = [sum(counts[:chunk]) for chunk in range(len(counts) + 1)]
    own = range(stage, len(counts), layout.pp)
    return tuple(model.layers[begins[chunk] : begins[chunk + 1]] for chunk in own)
