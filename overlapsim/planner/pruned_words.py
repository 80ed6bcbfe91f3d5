"""Why layouts were left out, in words that many of them share: the sentence of one layout without its numbers."""

from __future__ import annotations

import re
from typing import Final

# Start of a reason of `layout_reasons` -> what all such reasons say.
_SHARED: Final = (
    (r"ep is \d+ with tp=", "ep with tp needs sequence parallelism"),
    (r"ep is \d+ and etp is", "ep or etp without experts"),
    (r"ep is", "ep does not divide the experts of a layer"),
    (r"sp is", "sp does not divide the heads of a tensor-parallel rank"),
    (r"(etp|tp) is \d+ and a feed-forward block", r"\1 does not divide the width of a feed-forward block"),
    (r"\d+ query heads and", "tp does not divide the query, key and value heads"),
    (r"a sequence of .* by 2 x cp", "2 x cp does not divide the sequence"),
    (r"a sequence of .* by sp", "sp does not divide the sequence"),
    (r"\d+ tokens of a sequence", "tp does not divide the tokens of a sequence on each rank"),
)


def shared_reason(reason: str) -> str:
    """What a reason says of all layouts that are left out for the like.

    Examples
    --------
    >>> shared_reason("ep is 3 and a layer has 8 experts; expected a divisor: ranks hold whole experts")
    'ep does not divide the experts of a layer'
    >>> shared_reason("7 ranks stand idle; expected none")
    'N ranks stand idle'
    """
    for start, words in _SHARED:
        if found := re.match(start, reason):
            return found.expand(words)
    return re.sub(r"\d+", "N", reason.partition(";")[0])
