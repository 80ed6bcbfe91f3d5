"""The suite catches strategies that break physics, dependencies or the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.plan import Finding
from overlapsim.strategy.base import Applicability
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing import strategies as suite
from overlapsim.units import ps_from_s

Chunked = type(load_strategy("chunked"))


class Early(Chunked):
    """Sends every piece before it is computed."""

    def rewrite(self, context, parameters, site):
        pair, prices, gpu = context.pair(), context.prices, site.gpu()
        flow = gpu.add_collective(pair.collective, sms=prices.comm_sms(pair.collective.kind))
        kernel = gpu.add_gemm(pair.gemm, prices.vendor_gemm(pair.gemm))
        return pair.placement(((kernel,), (kernel,)), ((flow,), (flow,)))


class Short(Chunked):
    """Forgets half of the bytes."""

    def rewrite(self, context, parameters, site):
        pair = context.pair()
        half = replace(pair.collective, size_bytes=pair.collective.size_bytes / 2.5)
        graph = replace(
            context.graph, operators=tuple(half if op is pair.collective else op for op in context.graph.operators)
        )
        return super().rewrite(replace(context, graph=graph), parameters, site)


class Lazy(Chunked):
    """Computes an eighth of the rows."""

    def rewrite(self, context, parameters, site):
        pair = context.pair()
        part = replace(pair.gemm, m=-(-pair.gemm.m // 8))
        graph = replace(
            context.graph, operators=tuple(part if op is pair.gemm else op for op in context.graph.operators)
        )
        return super().rewrite(replace(context, graph=graph), parameters, site)


class Silent(Chunked):
    """Refuses without saying why."""

    def applies_to(self, context):
        return Applicability(False)


class Careless(Chunked):
    """Takes any parameters."""

    def check(self, parameters) -> None:
        return


class Detached(Chunked):
    """Does not tell the rest of a graph what to wait for."""

    def rewrite(self, context, parameters, site):
        placed = super().rewrite(context, parameters, site)
        return replace(placed, entries={0: placed.exits[0], 1: placed.exits[1]})


class Slow(Chunked):
    """Takes another time than serial where nothing overlaps."""

    def rewrite(self, context, parameters, site):
        gpu = site.gpu()
        site.builder.add_blocks(
            stream=gpu.compute_stream, pool=gpu.pool, units=1, unit_ps=ps_from_s(1e-4), sm=1, op="gemm"
        )
        return super().rewrite(context, parameters, site)


class Boundless(Chunked):
    """Claims memory that no device has."""

    def extra_memory_bytes(self, context, parameters) -> float:
        return float("inf")


class Wordless(Chunked):
    """Gives findings without words."""

    def findings(self, context, parameters):
        return (Finding("", ""),)


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Early, suite.check_dependencies),
        (Short, suite.check_work_conserved),
        (Lazy, suite.check_work_conserved),
        (Silent, suite.check_refuses_with_reasons),
        (Careless, suite.check_refuses_with_reasons),
        (Detached, suite.check_composed),
        (Slow, suite.check_degenerate_is_serial),
        (Boundless, suite.check_settings),
        (Wordless, suite.check_settings),
    ],
)
def test_a_wrong_strategy_is_caught(wrong, check) -> None:
    strategy = wrong()
    case = next(iter(suite.cases(strategy)))
    check(Chunked(), case)
    with pytest.raises(AssertionError):
        check(strategy, case)


def test_a_random_strategy_is_caught() -> None:
    class Moody(Chunked):
        def parameters(self, context):
            space = super().parameters(context)
            Moody.asked = getattr(Moody, "asked", 0) + 1
            return replace(space, screen=lambda point: (-1) ** Moody.asked * point["chunks"])

    with pytest.raises(AssertionError):
        suite.check_deterministic(Moody(), next(iter(suite.cases(Moody()))))
