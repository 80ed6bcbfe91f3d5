"""What uneven routing makes of a step: how full the fullest expert rank is, and what is believed of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.workload.build_dispatch import fullest_share
from overlapsim.workload.build_part import Tokens
from overlapsim.workload.dispatchers import DispatchOptions, route_of
from overlapsim.workload.model import MoE
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.routes import DEFAULT_SMS

if TYPE_CHECKING:
    from overlapsim.step.serving import ForwardInputs


def expert_load(inputs: StepInputs) -> float:
    """Rows of the fullest expert rank over the even share of all routed copies, the most of all layers; from 1.

    It sets memory too: capacity that drops below the even share frees none, since buffers are made for it.
    """
    perturbation, layout = inputs.perturbation, inputs.layout
    if perturbation.routing.even:
        return perturbation.imbalance
    local = Tokens.of(layout, inputs.job.micro_batch, inputs.job.seq_len).local
    shares = [
        fullest_share(layer.mlp, layout, inputs.recipe, perturbation.routing, local)
        for layer in inputs.model.kinds
        if isinstance(layer.mlp, MoE)
    ]
    return max((1.0, *shares))


def fullest_possible(moe: MoE, ranks: int) -> float:
    """Rows that one of `ranks` expert ranks can get at most over the even share: as many picks of each token as fit.

    Examples
    --------
    >>> from overlapsim.workload.presets import load_preset
    >>> fullest_possible(load_preset("mixtral-8x7b").layers[0].mlp, 8)
    4.0
    """
    return min(moe.top_k, moe.num_experts // ranks) * ranks / moe.top_k


def routing_findings(inputs: StepInputs) -> Iterator[Finding]:
    """What of routing is assumed, or asked for and not applied.

    Codes: ``routing_assumed``, ``routing_skewed``, ``imbalance_not_applied``, ``imbalance_beyond_routing``,
    ``dispatch_option_not_applied``, ``accuracy_affecting``.
    """
    perturbation = inputs.perturbation
    if not any(isinstance(layer.mlp, MoE) for layer in inputs.model.kinds):
        if perturbation.imbalance > 1 or not perturbation.routing.even:
            asked = f"routing={perturbation.routing}"
            if perturbation.routing.even:
                asked = f"imbalance={perturbation.imbalance:g}"
            yield Finding("imbalance_not_applied", f"{asked} of experts: {inputs.model.name} has none")
        yield from dispatch_findings(inputs)
        return
    kinds = [layer.mlp for layer in inputs.model.kinds if isinstance(layer.mlp, MoE)]
    most = max(fullest_possible(moe, inputs.layout.ep) for moe in kinds)
    if perturbation.imbalance > most:
        message = (
            f"imbalance={perturbation.imbalance:g}: experts of one of {inputs.layout.ep} ranks get at most {most:g} "
        )
        yield Finding("imbalance_beyond_routing", message + "times the even share, since a token picks different ones")
    if perturbation.routing.even and perturbation.imbalance > 1:
        message = (
            f"the fullest of {inputs.layout.ep} expert ranks has {perturbation.imbalance:g} times the even share, as "
            "asked, and sets the pace; that it does in every layer is assumed"
        )
        yield Finding("routing_assumed", message)
    elif perturbation.routing.even:
        yield Finding("routing_assumed", "every expert gets the same number of tokens; the fullest rank sets the pace")
    else:
        placed = " (the most wanted on one rank)" if perturbation.routing.kind == "zipf" else ""
        yield Finding(
            "routing_skewed",
            f"tokens go to experts by {perturbation.routing.kind}{placed}: the fullest of {inputs.layout.ep} expert "
            f"ranks has {expert_load(inputs):.3g} times the even share, sets the pace of every layer and holds as much "
            "of the activations of experts; that all layers are as uneven is assumed",
        )
    yield from dispatch_findings(inputs)
    if inputs.recipe.dispatch.dtype and inputs.layout.ep * inputs.layout.etp > 1:
        message = f"tokens go to their experts in {inputs.recipe.dispatch.dtype}: this changes results; check the loss"
        yield Finding("accuracy_affecting", message)


def dispatch_findings(inputs: StepInputs | ForwardInputs) -> Iterator[Finding]:
    """What was said of a dispatcher, or of capacity, and changes nothing here: ``dispatch_option_not_applied``."""
    for message in _idle_options(inputs):
        yield Finding("dispatch_option_not_applied", message)


def _idle_options(inputs: StepInputs | ForwardInputs) -> Iterator[str]:
    recipe, options, layout = inputs.recipe, inputs.recipe.dispatch, inputs.layout
    routing = inputs.perturbation.routing if isinstance(inputs, StepInputs) else inputs.routing
    kinds = [layer.mlp for layer in inputs.model.kinds if isinstance(layer.mlp, MoE)]
    exchanged = layout.ep > 1 or (recipe.dispatcher == "all_gather" and layout.etp > 1)
    if not kinds or not exchanged:
        if (recipe.dispatcher, options) != (Recipe().dispatcher, DispatchOptions()):
            why = "ep is 1: tokens stay where they are" if kinds else f"{inputs.model.name} has no experts"
            yield f"dispatch {recipe.dispatcher}: {why}"
        return
    route = route_of(recipe.dispatcher, options, kinds[0])
    if (options.node_limit or options.sms) and route is None:
        yield f"node_limit and sms of dispatch {recipe.dispatcher}: the library moves every copy by its own channels"
    elif options.sms and route is not None and not DEFAULT_SMS[route.method]:
        by = "the library's own channels move it" if route.method == "hierarchical" else "its flights hold none"
        yield f"sms of dispatch {recipe.dispatcher}: {by}"
    if options.balanced and routing.even:
        yield "balanced dispatch: routing is even; --perturb routing=.. says how experts of a GPU differ"
    if options.capacity == "device" and all(moe.capacity_factor is None for moe in kinds):
        yield f"capacity of a device: {inputs.model.name} has no capacity factor and drops nothing"
