"""What frameworks pad so that tensor parallelism divides it: the vocabulary and attention's heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import LayoutError
from overlapsim.workload.model import Attention, check_size

VOCABULARY_MULTIPLE: Final = 128
"""Megatron-LM's default of ``--make-vocab-size-divisible-by``."""


def padded_vocabulary(vocabulary: int, tp: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows of the embedding and columns of the logits, as Megatron-LM pads them: up to a multiple of `multiple` x `tp`.

    Parameters
    ----------
    vocabulary : tokens
    tp : tensor-parallel ranks that share them
    multiple : for each rank; 1 where a framework pads to `tp` alone

    Raises
    ------
    WorkloadError
        If an argument is not a size.

    Examples
    --------
    >>> padded_vocabulary(50257, 1), padded_vocabulary(50257, 8)
    (50304, 51200)
    """
    for name, value in (("vocabulary", vocabulary), ("tp", tp), ("multiple", multiple)):
        check_size(name, value)
    step = multiple * tp
    return math.ceil(vocabulary / step) * step


@dataclass(frozen=True)
class LocalHeads:
    """Heads of attention on one tensor-parallel rank.

    Attributes
    ----------
    num_heads, num_kv_heads : query heads and key and value heads of a rank, padding included
    kv_copies : ranks that hold the same key and value heads
    padded_heads : query heads of all ranks that the model does not have
    """

    num_heads: int
    num_kv_heads: int
    kv_copies: int
    padded_heads: int


def local_heads(attention: Attention, tp: int, *, pad: bool = False) -> LocalHeads:
    """Split the heads over `tp` ranks; every rank's query heads need keys and values of the same rank.

    Megatron-LM's rule without padding: `tp` divides the query heads, and either divides the key and value heads or is
    a multiple of them, which are then copied. Inference frameworks pad instead: whole groups of query heads are added,
    with their key and value head, until the rule holds.

    Parameters
    ----------
    attention : heads of the model
    tp : tensor-parallel ranks
    pad : whether heads that do not divide are padded rather than refused

    Raises
    ------
    LayoutError
        If the heads do not divide and `pad` is off.
    WorkloadError
        If `tp` is not a size.

    Examples
    --------
    >>> local_heads(Attention(64, 8, 128), 16)
    LocalHeads(num_heads=4, num_kv_heads=1, kv_copies=2, padded_heads=0)
    >>> local_heads(Attention(25, 25, 64), 2, pad=True)
    LocalHeads(num_heads=13, num_kv_heads=13, kv_copies=1, padded_heads=1)
    """
    check_size("tp", tp)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    group = heads // kv_heads
    divides = heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if not divides and not pad:
        raise LayoutError(
            f"{heads} query heads and {kv_heads} key and value heads on {tp} tensor-parallel ranks; expected ranks "
            "that divide both, or divide the query heads and are a multiple of the others; choose another tp, or pad"
        )
    if tp <= kv_heads:
        per_rank = math.ceil(kv_heads / tp)
        return LocalHeads(per_rank * group, per_rank, 1, tp * per_rank * group - heads)
    # More ranks than key and value heads: each of those goes to tp / kv ranks, which share its query heads.
    kv_padded = next(count for count in range(kv_heads, tp + 1) if tp % count == 0)
    copies = tp // kv_padded
    per_rank = math.ceil(group / copies)
    return LocalHeads(per_rank, 1, copies, tp * per_rank - heads)
