"""What goes together: rules on what chosen strategies are and need, with the reason in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.schedule.pipeline_links import P2pMode
from overlapsim.strategy.base import Need, Strategy, Trait
from overlapsim.workload.layout import Layout

Recompute = Literal["none", "selective", "full", "moe"]
Dispatcher = Literal["allgather", "alltoall", "direct"]
"""How tokens reach experts; ``direct`` is a library that writes into peers' memory (DeepEP and its like)."""
# Megatron asserts one hardware queue for tensor and context parallelism up to Hopper.
BEFORE_BLACKWELL: Final = ("volta", "turing", "ampere", "ada", "hopper")


@dataclass(frozen=True)
class Setting:
    """What is known of the run that strategies are chosen for; None is "not said", and no rule looks at it.

    Attributes
    ----------
    tp, cp, pp, vpp, ep, dp : parallel degrees
    sequence_parallel : whether norms and residuals of a tensor-parallel group are split along the sequence
    micro_batches : of one step
    p2p : how transfers of the pipeline stand to computation
    architecture : of the GPU, as in device profiles
    num_queues : hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``); None gives every stream its own, as when unset
    recompute : what is recomputed in the backward
    framework : ``megatron``, ``megatron_fsdp2``, ``torchtitan`` ...: what only one of them asserts is checked for it
    trains_all_weights : False where adapters leave weights without gradients
    dispatcher : how tokens reach experts
    compiled : whether pipeline stages are compiled as wholes
    """

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    dp: int | None = None
    sequence_parallel: bool | None = None
    micro_batches: int | None = None
    p2p: P2pMode | None = None
    architecture: str | None = None
    num_queues: int | None = None
    recompute: Recompute | None = None
    framework: str | None = None
    trains_all_weights: bool | None = None
    dispatcher: Dispatcher | None = None
    compiled: bool | None = None

    @classmethod
    def of(cls, layout: Layout, **known: object) -> Self:
        """The degrees of a layout, with what else is known.

        Examples
        --------
        >>> Setting.of(Layout(tp=8, pp=4, vpp=2), micro_batches=16).vpp
        2
        """
        degrees = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "dp", "sequence_parallel")}
        return cls(**{**degrees, "cp": layout.context, **known})

    @property
    def before_blackwell(self) -> bool:
        """True on NVIDIA GPUs up to Hopper."""
        return self.architecture in BEFORE_BLACKWELL


def check_compatible(chosen: Sequence[Strategy], setting: Setting) -> tuple[str, ...]:
    """Return why these strategies cannot run together in this setting; empty where they can.

    Raises
    ------
    StrategyError
        If a strategy declares a trait or need that is no word of the contract.

    Examples
    --------
    >>> check_compatible((), Setting(tp=4, ep=2, sequence_parallel=False))
    ('ep=2 with tp=4 needs sequence parallelism: every tensor-parallel rank would dispatch all tokens',)
    """
    strategies = tuple({strategy.name: strategy for strategy in chosen}.values())
    for strategy in strategies:
        _check_words(strategy)
    reasons = (
        *_of_setting(strategies, setting),
        *(
            f"{strategy.name} needs {reason}"
            for strategy in strategies
            for need in strategy.needs
            if (reason := RULES[need](setting))
        ),
        *_of_pairs(strategies),
        *_of_queues(strategies, setting),
        *_of_megatron(strategies, setting),
    )
    return tuple(dict.fromkeys(reasons))


def advise(chosen: Sequence[Strategy], setting: Setting) -> tuple[Finding, ...]:
    """Return what is allowed and does not help."""
    names = [s.name for s in chosen if s.traits & {"data_parallel", "pipeline_p2p"}]
    if setting.num_queues != 1 or not names or (setting.tp or 2) > 1 or (setting.cp or 2) > 1:
        return ()
    message = (
        f"one hardware queue with tp=1 and cp=1 keeps {' and '.join(dict.fromkeys(names))} from overlapping: each "
        "collective runs beside one kernel only; leave CUDA_DEVICE_MAX_CONNECTIONS unset"
    )
    return (Finding("one_queue_serialises", message),)


def _check_words(strategy: Strategy) -> None:
    for kind, words, known in (
        ("trait", (*strategy.traits, *strategy.excludes), get_args(Trait)),
        ("need", strategy.needs, get_args(Need)),
    ):
        for word in words:
            if word not in known:
                raise StrategyError(f"{strategy.name} declares the {kind} {word!r}; expected one of {', '.join(known)}")


def _of_setting(chosen: Sequence[Strategy], s: Setting) -> Iterator[str]:
    """What is wrong whatever is chosen (facts of Megatron-Core's argument checks that hold for any framework)."""
    tp, ep, pp, vpp = s.tp or 1, s.ep or 1, s.pp or 1, s.vpp or 1
    if ep > 1 and tp > 1 and s.sequence_parallel is False:
        yield f"ep={ep} with tp={tp} needs sequence parallelism: every tensor-parallel rank would dispatch all tokens"
    if vpp > 1 and s.pp == 1:
        yield f"vpp={vpp} with pp=1: there is nothing to interleave"
    if vpp > 1 and pp == 2 and s.p2p == "blocking" and not any("pipeline_p2p" in c.traits for c in chosen):
        yield (
            "interleaving over two stages needs transfers beside compute (steady or overlapped): both neighbours are "
            "the same rank; p2p is blocking"
        )
    if vpp > 1 and s.micro_batches is not None and pp > 1 and s.micro_batches % pp:
        yield f"interleaving runs micro-batches in rounds of pp={pp}; {s.micro_batches} do not divide into them"


def _of_pairs(chosen: Sequence[Strategy]) -> Iterator[str]:
    for one, other in itertools.combinations(chosen, 2):
        for a, b in ((one, other), (other, one)):
            clash = sorted(a.excludes & b.traits)
            if clash:
                yield f"{a.name} cannot be combined with {b.name} ({clash[0].replace('_', ' ')})"
                break


def _of_queues(chosen: Sequence[Strategy], s: Setting) -> Iterator[str]:
    """Launch order kept by one queue, and streams that must not share one."""
    if not s.before_blackwell:
        return
    one = [c.name for c in chosen if "one_queue_before_blackwell" in c.needs]
    many = [c.name for c in chosen if "many_queues" in c.needs]
    if one and many:
        yield (
            f"{' and '.join(one)} needs one hardware queue on {s.architecture} and {' and '.join(many)} needs more "
            "than one; choose one of them, or a GPU from Blackwell on"
        )
    wide = max(s.tp or 1, s.cp or 1) > 1
    free = many or any("expert_pair" in c.traits for c in chosen)
    if s.framework == "megatron" and wide and not free and s.num_queues != 1:
        given = "unset" if s.num_queues is None else str(s.num_queues)
        yield f"Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 with tp or cp above 1 on {s.architecture}; it is {given}"


def _of_megatron(chosen: Sequence[Strategy], s: Setting) -> Iterator[str]:
    traits = {trait for c in chosen for trait in c.traits}
    if s.framework == "megatron" and "wgrad_delay" in traits and "expert_pair" not in traits:
        yield "Megatron delays weight gradients only together with overlapped expert exchanges of two micro-batches"
    if s.framework == "megatron_fsdp2" and "sharded_parameters" in traits:
        for name, degree in (("pp", s.pp or 1), ("ep", s.ep or 1)):
            if degree > 1:
                yield f"FSDP2 in Megatron takes {name}=1; it is {degree}"


def _above(name: str, value: int | None) -> str | None:
    return f"{name} of at least 2; it is {value}" if value is not None and value < 2 else None


def _sequence_parallel(s: Setting) -> str | None:
    if s.sequence_parallel is False:
        return "sequence parallelism: without it the collective is an all_reduce that is not split by rows"
    return _above("tp", s.tp)


def _interleaved(s: Setting) -> str | None:
    if s.framework == "megatron" and s.vpp == 1:
        return "virtual stages in Megatron: its schedule without interleaving batches sends and receives and blocks"
    return None


def _interleaved_if_pipelined(s: Setting) -> str | None:
    if (s.pp or 1) > 1 and s.vpp == 1:
        return f"virtual stages with pp={s.pp}: forwards and backwards to pair come from different model chunks"
    return None


def _two_stages(s: Setting) -> str | None:
    return f"exactly two stages on each rank; vpp is {s.vpp}" if s.vpp is not None and s.vpp != 2 else None


def _twice_the_stages(s: Setting) -> str | None:
    if s.micro_batches is None or s.pp is None or s.micro_batches >= 2 * s.pp:
        return None
    return f"at least 2 x pp = {2 * s.pp} micro-batches, half from each end; there are {s.micro_batches}"


def _one_queue(s: Setting) -> str | None:
    if s.before_blackwell and s.num_queues is not None and s.num_queues != 1:
        return (
            f"one hardware queue on {s.architecture}, so that communication is launched before the GEMM beside it; "
            f"there are {s.num_queues}"
        )
    return None


def _many_queues(s: Setting) -> str | None:
    reason = "more than one hardware queue: collectives of both kinds would wait for each other"
    return reason if s.num_queues == 1 else None


def _direct(s: Setting) -> str | None:
    if s.dispatcher is not None and s.dispatcher != "direct":
        return f"a dispatcher that writes into peers' memory; it is {s.dispatcher}"
    return None


def _exchanged(s: Setting) -> str | None:
    return "a dispatcher that exchanges tokens; it gathers all of them" if s.dispatcher == "allgather" else None


RULES: Final[Mapping[Need, Callable[[Setting], str | None]]] = {
    "tensor_parallel": lambda s: _above("tp", s.tp),
    "sequence_parallel": _sequence_parallel,
    "data_parallel": lambda s: _above("dp x cp", None if s.dp is None else s.dp * (s.cp or 1)),
    "expert_parallel": lambda s: _above("ep", s.ep),
    "pipeline": lambda s: _above("pp", s.pp),
    "interleaved": _interleaved,
    "interleaved_if_pipelined": _interleaved_if_pipelined,
    "two_stages_a_rank": _two_stages,
    "micro_batches_twice_the_stages": _twice_the_stages,
    "weight_gradients": lambda s: (
        "gradients of the weights; they are frozen" if s.trains_all_weights is False else None
    ),
    "no_full_recompute": lambda s: "no full recomputation in the backward" if s.recompute == "full" else None,
    "no_moe_recompute": lambda s: "no recomputation of expert layers" if s.recompute in ("full", "moe") else None,
    "one_queue_before_blackwell": _one_queue,
    "many_queues": _many_queues,
    "direct_dispatch": _direct,
    "exchanged_tokens": _exchanged,
    "eager_stages": lambda s: "stages that are not compiled as wholes" if s.compiled else None,
}
"""The rule behind each need: what is needed and not there, or None."""
