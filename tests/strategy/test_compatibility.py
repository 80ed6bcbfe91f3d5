"""Which strategies go together: every rule with a setting that breaks it and one that does not, and one SM budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Need,
    NoParameters,
    Parameters,
    ParameterSpace,
    StrategyInfo,
)
from overlapsim.strategy.budget import sm_budget
from overlapsim.strategy.compatibility import RULES, Setting, advise, check_compatible
from overlapsim.strategy.compose import ArrangingStrategy, Chosen, Composition, compose, lower
from overlapsim.strategy.registry import load_strategies, load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.testing.layers import training_layers
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph


class Declared(ArrangingStrategy):
    """A strategy that changes nothing and declares what a test wants."""

    parameter_type = NoParameters
    info = StrategyInfo("declares", "op", "nothing", "nothing")

    def __init__(self, name: str = "declared", *, traits=(), needs=(), excludes=()) -> None:
        self.name = name  # type: ignore[misc]
        self.traits, self.needs, self.excludes = frozenset(traits), tuple(needs), frozenset(excludes)  # type: ignore[misc]

    def applies_to(self, context: Context) -> Applicability:
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        return ParameterSpace()

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        return context.graph

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        return {"nothing": True}


HOPPER = {"architecture": "hopper"}
# need -> (a setting that breaks it, a word of the reason, one that does not)
CASES: dict[Need, tuple[Setting, str, Setting]] = {
    "tensor_parallel": (Setting(tp=1), "tp of at least 2", Setting(tp=2)),
    "sequence_parallel": (
        Setting(tp=8, sequence_parallel=False),
        "sequence parallelism",
        Setting(tp=8, sequence_parallel=True),
    ),
    "data_parallel": (Setting(dp=1, cp=1), "dp x cp", Setting(dp=1, cp=2)),
    "expert_parallel": (Setting(ep=1), "ep of at least 2", Setting(ep=8)),
    "pipeline": (Setting(pp=1), "pp of at least 2", Setting(pp=2)),
    "interleaved": (
        Setting(pp=4, vpp=1, framework="megatron"),
        "virtual stages",
        Setting(pp=4, vpp=1, framework="torchtitan"),
    ),
    "interleaved_if_pipelined": (Setting(pp=4, vpp=1), "virtual stages", Setting(pp=1, vpp=1)),
    "two_stages_a_rank": (Setting(pp=4, vpp=4), "exactly two stages", Setting(pp=4, vpp=2)),
    "micro_batches_twice_the_stages": (Setting(pp=8, micro_batches=12), "2 x pp = 16", Setting(pp=8, micro_batches=16)),
    "weight_gradients": (Setting(trains_all_weights=False), "frozen", Setting(trains_all_weights=True)),
    "no_full_recompute": (Setting(recompute="full"), "recomputation", Setting(recompute="selective")),
    "no_moe_recompute": (Setting(recompute="moe"), "expert layers", Setting(recompute="selective")),
    "one_queue_before_blackwell": (
        Setting(num_queues=8, **HOPPER),
        "one hardware queue on hopper",
        Setting(num_queues=8, architecture="blackwell"),
    ),
    "many_queues": (Setting(num_queues=1), "more than one hardware queue", Setting(num_queues=8)),
    "direct_dispatch": (Setting(dispatcher="alltoall"), "peers' memory", Setting(dispatcher="direct")),
    "exchanged_tokens": (Setting(dispatcher="allgather"), "exchanges tokens", Setting(dispatcher="alltoall")),
    "eager_stages": (Setting(compiled=True), "compiled", Setting(compiled=False)),
}


@pytest.mark.parametrize("need", CASES)
def test_each_need_is_refused_with_its_reason_and_only_where_it_is_not_met(need: Need) -> None:
    broken, word, met = CASES[need]
    strategy = Declared(needs=(need,))
    (reason,) = check_compatible((strategy,), broken)
    assert reason.startswith("declared needs ")
    assert word in reason
    assert check_compatible((strategy,), met) == ()
    # What is not said is not checked.
    assert check_compatible((strategy,), Setting()) == ()
    assert check_compatible((Declared(),), broken) == ()


def test_every_need_has_a_rule_and_a_case() -> None:
    assert set(RULES) == set(get_args(Need)) == set(CASES)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        (Setting(ep=8, tp=2, sequence_parallel=False), "ep=8 with tp=2"),
        (Setting(pp=1, vpp=2), "nothing to interleave"),
        (Setting(pp=2, vpp=2, p2p="blocking"), "two stages"),
        (Setting(pp=4, vpp=2, micro_batches=10), "rounds of pp=4"),
        (Setting(tp=8, framework="megatron", **HOPPER), "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (Setting(cp=2, framework="megatron", num_queues=8, **HOPPER), "it is 8"),
    ],
)
def test_settings_that_no_strategy_can_mend(setting: Setting, word: str) -> None:
    (reason,) = check_compatible((), setting)
    assert word in reason


def test_interleaving_over_two_stages_goes_with_transfers_beside_compute() -> None:
    blocking = Setting(pp=2, vpp=2, micro_batches=8, p2p="blocking")
    assert check_compatible((load_strategy("p2p_overlap"),), blocking) == ()
    # The mode of the run decides, whatever strategies operators take.
    assert check_compatible((load_strategy("fused_tiles"),), blocking) == check_compatible((), blocking) != ()
    for mode in ("steady", "overlapped", None):
        for chosen in ((), (load_strategy("fused_tiles"),)):
            assert check_compatible(chosen, replace(blocking, tp=2, sequence_parallel=True, p2p=mode)) == ()


# The matrix of combinations, in the words of strategies that declare them; what ships declares the same.
PAIR_OVERLAP = Declared("expert_pair", traits={"expert_pair"}, needs=("expert_parallel", "interleaved_if_pipelined",
                        "no_full_recompute", "no_moe_recompute"), excludes={"shared_expert"})  # fmt: skip
SHARED_EXPERT = Declared("shared_expert", traits={"shared_expert"}, needs=("expert_parallel",))
RING = Declared("ring", traits={"tensor_parallel"}, needs=("sequence_parallel", "one_queue_before_blackwell"))
BIDIRECTIONAL = Declared("bidirectional", traits={"bidirectional"}, needs=("two_stages_a_rank", "eager_stages",
                         "micro_batches_twice_the_stages"))  # fmt: skip


def test_expert_pairs_exclude_shared_expert_overlap_and_recomputation() -> None:
    (reason,) = check_compatible((SHARED_EXPERT, PAIR_OVERLAP), Setting(ep=8))
    assert reason == "expert_pair cannot be combined with shared_expert (shared expert)"
    reasons = check_compatible((PAIR_OVERLAP,), Setting(ep=8, pp=4, vpp=1, recompute="full"))
    assert len(reasons) == 3
    assert check_compatible((PAIR_OVERLAP,), Setting(ep=8, pp=4, vpp=2, micro_batches=8, recompute="none")) == ()


def test_delayed_weight_gradients_in_megatron_come_with_expert_pairs() -> None:
    delay = load_strategy("wgrad_delay")
    assert "only together" in check_compatible((delay,), Setting(framework="megatron"))[0]
    assert check_compatible((delay, PAIR_OVERLAP), Setting(framework="megatron", ep=8)) == ()
    assert check_compatible((delay,), Setting(framework="torchtitan")) == ()


def test_sharded_parameters_and_launch_order_conflict_up_to_hopper() -> None:
    both = (RING, load_strategy("fsdp_prefetch"))
    (reason,) = check_compatible(both, Setting(tp=8, dp=8, sequence_parallel=True, **HOPPER))
    assert "ring needs one hardware queue on hopper and fsdp_prefetch needs more" in reason
    assert check_compatible(both, Setting(tp=8, dp=8, sequence_parallel=True, architecture="blackwell")) == ()


def test_sharded_parameters_and_buckets_exclude_each_other() -> None:
    both = load_strategies(("grad_buckets", "fsdp_prefetch"))
    (reason,) = check_compatible(both, Setting(dp=8))
    assert "cannot be combined" in reason
    reasons = check_compatible(both[1:], Setting(dp=8, pp=4, ep=2, framework="megatron_fsdp2"))
    assert len(reasons) == 2


def test_bidirectional_pipelines_name_all_that_is_missing() -> None:
    reasons = check_compatible((BIDIRECTIONAL,), Setting(pp=8, vpp=1, micro_batches=8, compiled=True))
    assert len(reasons) == 3


def test_unknown_words_are_refused() -> None:
    for wrong in ({"traits": {"tensor"}}, {"needs": ("luck",)}, {"excludes": {"tensor"}}):
        with pytest.raises(StrategyError, match=r"declares the (trait|need) '(tensor|luck)'; expected one of"):
            check_compatible((Declared(**wrong),), Setting())


def test_what_ships_declares_known_words() -> None:
    check_compatible(load_strategies(), Setting())


def test_setting_of_a_layout() -> None:
    setting = Setting.of(Layout(tp=8, pp=4, vpp=2, sp=2, dp=3), micro_batches=16)
    assert (setting.tp, setting.pp, setting.vpp, setting.cp, setting.dp) == (8, 4, 2, 2, 3)
    assert setting.num_queues is None


def test_one_queue_without_tensor_parallelism_is_pointed_out() -> None:
    chosen = (load_strategy("grad_buckets"),)
    (finding,) = advise(chosen, Setting(tp=1, cp=1, dp=64, num_queues=1))
    assert finding.code == "one_queue_serialises"
    for other in (Setting(tp=1, cp=1, num_queues=8), Setting(tp=8, cp=1, num_queues=1), Setting(tp=1, cp=1)):
        assert not advise(chosen, other)


# SMs


def _lowered(sms: int, streams: tuple[str, ...]):
    """A GEMM on compute and collectives on other streams, each holding `sms` of 132 SMs."""
    ops = (GemmOp(1024, 2048, 1024), *(CollectiveOp("all_gather", 1e6, 8) for _ in streams))
    graph = OperatorGraph(ops, (), ("compute", *streams))
    book = PriceBook(load_cluster("h100-sxm8"), 8, collective_sms=sms)
    builder = ProgramBuilder()
    site = Site(builder, book)
    lower(Context(graph, book), site)
    return graph, book, sm_budget(builder, site.gpu().pool, site.gpu().num_sms)


def test_streams_are_charged_together() -> None:
    graph, book, budget = _lowered(2, ("tp", "dp", "dp"))
    assert budget.held == {"tp": 2, "dp": 2}
    assert (budget.total, budget.beside_compute) == (4, 4)
    assert budget.verdict() == YES
    tiles = book.vendor_gemm(graph.operators[0]).grid.num_tiles
    assert tiles <= 132 - 4
    assert not budget.findings(graph, book)


def test_more_sms_than_there_are_is_contention() -> None:
    _, _, budget = _lowered(50, ("tp", "dp", "ep"))
    answer = budget.verdict()
    assert not answer.applies
    assert answer.cause == "contention"
    assert "may hold 150 SMs at once (dp 50, ep 50, tp 50); the GPU has 132" in answer.reasons[0]


def test_a_gemm_that_loses_its_wave_is_a_finding() -> None:
    graph, book, budget = _lowered(60, ("tp", "dp"))
    tiles = book.vendor_gemm(graph.operators[0]).grid.num_tiles
    assert 132 - 120 < tiles <= 132
    (finding,) = budget.findings(graph, book)
    assert finding.code == "below_one_wave"
    assert "gemm fwd" in finding.message


def test_collectives_in_line_with_gemms_take_nothing_from_them() -> None:
    graph, book, budget = _lowered(60, ("compute", "compute"))
    assert (budget.total, budget.beside_compute) == (60, 0)
    assert not budget.findings(graph, book)


def test_compose_refuses_too_many_sms_and_incompatible_strategies() -> None:
    book = PriceBook(load_cluster("h100-sxm8"), 8, collective_sms=50)
    context = Context(training_layers(1, zero=3), book)
    point = {"layers_per_group": 1, "depth": 2, "rate_limit": True, "reshard_after_forward": True, "keep_last": False}
    chosen = Chosen(load_strategy("fsdp_prefetch"), point)
    delay, transfers = (Chosen(load_strategy(n), p) for n, p in (("wgrad_delay", {"pending": 2}),
                        ("p2p_overlap", {"batched": False, "early": 1})))  # fmt: skip
    with pytest.raises(StrategyError, match=r"may hold \d+ SMs at once .*\(contention\)"):
        compose(context, Composition((chosen, delay, transfers)), Site(ProgramBuilder(), book))
    fewer = replace(context, prices=book.with_comm_sms(8))
    out = compose(fewer, Composition((chosen, delay, transfers)), Site(ProgramBuilder(), fewer.prices))
    assert len(set(out.graph.streams)) == 6
    one_stage = Composition((transfers,), setting=Setting(pp=1))
    with pytest.raises(StrategyError, match="p2p_overlap needs pp of at least 2"):
        compose(fewer, one_stage, Site(ProgramBuilder(), fewer.prices))
