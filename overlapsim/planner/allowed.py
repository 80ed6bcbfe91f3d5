"""What changes the numbers that a job computes: never chosen unless the user allows it by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from overlapsim.hardware.profile import DeviceSpec
from overlapsim.plan import Finding
from overlapsim.workload.recipe import COMPRESSIONS, Recipe

COMPRESSION: Final = "compression"
DISPATCH: Final = "dispatch-fp8"
ALLOWED: Final = ("fp8", COMPRESSION, *COMPRESSIONS, DISPATCH)
"""Linear layers that multiply in fp8, all of `COMPRESSIONS` or some of them, tokens sent to their experts in fp8."""


def multiplying(recipe: Recipe, allow: Collection[str], device: DeviceSpec) -> tuple[Recipe, ...]:
    """The recipe, and with GEMMs in fp8 where that is allowed and the device has it."""
    fp8 = "fp8" in allow and "fp8" in device.peak_flop_per_s and not recipe.fp8
    return (recipe, replace(recipe, fp8=True)) if fp8 else (recipe,)


def narrower(recipe: Recipe, allow: Collection[str]) -> Iterator[Recipe]:
    """The recipe with one more of what is allowed sent in fewer bytes; none where all is."""
    wanted = COMPRESSIONS if COMPRESSION in allow else tuple(name for name in COMPRESSIONS if name in allow)
    for name in wanted:
        if name not in recipe.compress and (recipe.fp8 or name != "params-fp8"):
            yield replace(recipe, compress=tuple(n for n in COMPRESSIONS if n == name or n in recipe.compress))
    if DISPATCH in allow and not recipe.dispatch.dtype:
        yield replace(recipe, dispatch=replace(recipe.dispatch, dtype="fp8"))


def not_applied(allow: Collection[str], device: DeviceSpec, used: Collection[Recipe]) -> Iterator[Finding]:
    """Say what is allowed and in no plan, whose recipes are given."""
    compressed = {name for recipe in used for name in recipe.compress}
    for name in allow:
        if name == "fp8" and "fp8" not in device.peak_flop_per_s:
            yield Finding("not_applied", f"fp8 is allowed and {device.name} has no fp8 peak; no plan uses it")
        elif name == "params-fp8" and "fp8" not in allow and not any(recipe.fp8 for recipe in used):
            yield Finding("not_applied", "params-fp8 is allowed without fp8: GEMMs do not read fp8; allow fp8 as well")
        elif name != "fp8" and not (compressed if name == COMPRESSION else name in compressed or _sends(name, used)):
            yield Finding("not_applied", f"{name} is allowed and saves too little here; no plan uses it")


def _sends(name: str, used: Collection[Recipe]) -> bool:
    return name == DISPATCH and any(recipe.dispatch.dtype for recipe in used)


def changes(recipe: Recipe, given: Recipe) -> Iterator[Finding]:
    """Say what a plan uses that was allowed; what is compressed, the step says itself."""
    if recipe.fp8 and not given.fp8:
        yield Finding("accuracy_changes", "linear layers multiply in fp8, as allowed: check the loss of a run with it")
    if recipe.dispatch.dtype and not given.dispatch.dtype:
        yield Finding(
            "accuracy_changes",
            f"tokens reach their experts in {recipe.dispatch.dtype}, as allowed: check the loss of a run with it",
        )
