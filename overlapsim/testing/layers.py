"""Small transformer graphs, forward and backward, with the collectives of a step: for tests of arranging strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveKind, CollectiveOp, GemmOp, KernelOp, Operator, OperatorGraph

GRAD_BYTES: Final = 4
PARAM_BYTES: Final = 2
"""Gradients are summed in fp32, parameters are bf16."""
STAGES: Final = 2


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one transformer layer, whole.

    Attributes
    ----------
    tokens : of one micro-batch
    hidden, ffn : widths
    heads, kv_heads : query heads, and key and value heads
    gated : whether fc1 has two halves
    """

    tokens: int = 1024
    hidden: int = 1024
    ffn: int = 4096
    heads: int = 8
    kv_heads: int = 8
    gated: bool = False

    @property
    def qkv(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return self.hidden + 2 * self.hidden // self.heads * self.kv_heads

    @property
    def fc1(self) -> int:
        """Columns of the first feed-forward matrix."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def parameters(self) -> int:
        """Elements of the four matrices."""
        return self.hidden * (self.qkv + self.hidden + self.fc1 + self.ffn)


def training_layers(
    num_layers: int = 2,
    shape: LayerShape = LayerShape(),
    *,
    tp: int = 2,
    dp: int = 4,
    zero: int = 3,
    pipeline: bool = True,
    micro_batches: int = 1,
) -> OperatorGraph:
    """Return forward and backward of a few layers as one stream of operators, one after another.

    Roles are told by names. Collectives inside a layer have the name and pass of the operator they serve. Those of a
    step: ``grad.X wgrad`` after the weight gradient of X, ``param.X fwd`` before its use (``zero`` of 1 and more) and
    ``param.X dgrad`` before the backward's (3), ``pipe.recv`` and ``pipe.send`` at the ends of a stage.

    Parameters
    ----------
    num_layers, shape : layers of this rank's stage, and their sizes
    tp : ranks of tensor parallelism, with sequence parallelism; 1 leaves its collectives out
    dp : ranks that hold the same shards; 1 leaves gradients and parameters alone
    zero : what is sharded over them: 0 nothing (all_reduce), 1 or 2 state (reduce_scatter, gather before the
        forward), 3 parameters too (gather before the backward as well)
    pipeline : whether activations come from a stage before and go to one behind
    micro_batches : forwards and backwards, one after the other; gradients are summed over ranks in the last, and
        without `zero` 3 parameters are gathered in the first

    Examples
    --------
    >>> graph = training_layers(1, tp=1, dp=1, pipeline=False)
    >>> [f"{op.name} {op.pass_}" for op in graph.operators][:6]
    ['attn.norm fwd', 'attn.qkv fwd', 'attn.core fwd', 'attn.out fwd', 'mlp.norm fwd', 'mlp.fc1 fwd']
    """
    draft = _Draft(shape, tp, dp, zero)
    for number in range(micro_batches):
        draft.first, draft.last = number == 0, number == micro_batches - 1
        draft.pipe("recv", "fwd", pipeline)
        for _ in range(num_layers):
            draft.forward()
        draft.pipe("send", "fwd", pipeline)
        draft.pipe("recv", "dgrad", pipeline)
        for _ in range(num_layers):
            draft.backward()
        draft.pipe("send", "dgrad", pipeline)
    return OperatorGraph(tuple(draft.operators), tuple(sorted(draft.dependencies)))


@dataclass
class _Draft:
    """A graph under construction: each operator needs the one before on the way of activations (or gradients)."""

    shape: LayerShape
    tp: int
    dp: int
    zero: int
    first: bool = True
    last: bool = True
    operators: list[Operator] = field(default_factory=list)
    dependencies: set[tuple[int, int]] = field(default_factory=set)
    head: int = -1
    """The operator whose output goes on."""

    def forward(self) -> None:
        s, tp = self.shape, self.tp
        self._kernel(MemoryOp("rmsnorm", self._rows, s.hidden), "attn.norm", "fwd")
        self._linear("attn.qkv", s.qkv // tp, s.hidden, gather=True)
        self._kernel(self._attention("fwd"), "attn.core", "fwd")
        self._linear("attn.out", s.hidden, s.hidden // tp, gather=False)
        self._kernel(MemoryOp("rmsnorm", self._rows, s.hidden), "mlp.norm", "fwd")
        self._linear("mlp.fc1", s.fc1 // tp, s.hidden, gather=True)
        self._kernel(self._activation("fwd"), "mlp.act", "fwd")
        self._linear("mlp.fc2", s.hidden, s.ffn // tp, gather=False)

    def backward(self) -> None:
        s, tp = self.shape, self.tp
        self._gradients("mlp.fc2", s.hidden, s.ffn // tp, gather=True)
        self._kernel(self._activation("bwd"), "mlp.act", "dgrad")
        self._gradients("mlp.fc1", s.fc1 // tp, s.hidden, gather=False)
        self._kernel(MemoryOp("rmsnorm", self._rows, s.hidden, pass_="bwd"), "mlp.norm", "dgrad")
        self._gradients("attn.out", s.hidden, s.hidden // tp, gather=True)
        self._kernel(self._attention("bwd"), "attn.core", "dgrad")
        self._gradients("attn.qkv", s.qkv // tp, s.hidden, gather=False)
        self._kernel(MemoryOp("rmsnorm", self._rows, s.hidden, pass_="bwd"), "attn.norm", "dgrad")

    def pipe(self, way: str, pass_: str, wanted: bool) -> None:
        if wanted:
            size_bytes = float(self._rows * self.shape.hidden * PARAM_BYTES)
            op = CollectiveOp("send_recv", size_bytes, STAGES, name=f"pipe.{way}", pass_=pass_, group="pp")
            # What comes in waits for another stage, and what goes out is waited for by another.
            at = self._add(op, self.head if way == "send" else -1)
            self.head = at if way == "recv" else self.head

    def _linear(self, name: str, n: int, k: int, *, gather: bool) -> None:
        """A matrix of the forward: its rows gathered before, or its sums scattered behind."""
        weight = self._param(name, n * k, "fwd", self.zero >= 3 or (self.zero > 0 and self.first))
        if gather:
            self._collective("all_gather", self.shape.tokens * k, name, "fwd")
        self.head = self._add(GemmOp(self.shape.tokens, n, k, name=name), self.head, weight)
        if not gather:
            self._collective("reduce_scatter", self.shape.tokens * n, name, "fwd")

    def _gradients(self, name: str, n: int, k: int, *, gather: bool) -> None:
        """Both gradients of a matrix of n columns and k rows: the collectives of the forward, mirrored."""
        s = self.shape
        weight = self._param(name, n * k, "dgrad", self.zero >= 3)
        if gather:
            self._collective("all_gather", s.tokens * n, name, "dgrad")
        upstream = self.head
        self.head = self._add(GemmOp(s.tokens, k, n, name=name, pass_="dgrad"), upstream, weight)
        inputs = -1
        if not gather:
            # The rows of the forward were dropped after it; the weight gradient needs them once more.
            if self.tp > 1:
                again = CollectiveOp(
                    "all_gather", float(s.tokens * k * PARAM_BYTES), self.tp, name=name, pass_="wgrad", group="tp"
                )
                inputs = self._add(again)
            self._collective("reduce_scatter", s.tokens * k, name, "dgrad")
        wgrad = self._add(GemmOp(k, n, s.tokens, name=name, pass_="wgrad"), upstream, inputs)
        if self.last and self.dp > 1:
            kind: CollectiveKind = "reduce_scatter" if self.zero else "all_reduce"
            size_bytes = float(n * k * GRAD_BYTES)
            self._add(CollectiveOp(kind, size_bytes, self.dp, "fp32", f"grad.{name}", "wgrad", group="dp"), wgrad)

    def _param(self, name: str, elements: int, pass_: str, wanted: bool) -> int:
        if not wanted or self.dp == 1:
            return -1
        size_bytes = float(elements * PARAM_BYTES)
        return self._add(CollectiveOp("all_gather", size_bytes, self.dp, name=f"param.{name}", pass_=pass_, group="dp"))

    def _collective(self, kind: CollectiveKind, elements: int, name: str, pass_: str) -> None:
        if self.tp > 1:
            op = CollectiveOp(kind, float(elements * PARAM_BYTES), self.tp, name=name, pass_=pass_, group="tp")
            self.head = self._add(op, self.head)

    def _kernel(self, work: MemoryOp | AttentionOp, name: str, pass_: str) -> None:
        self.head = self._add(KernelOp(work, name, pass_), self.head)

    def _attention(self, pass_: str) -> AttentionOp:
        s = self.shape
        heads, kv_heads = s.heads // self.tp, s.kv_heads // self.tp
        return AttentionOp(1, s.tokens, s.tokens, heads, kv_heads, s.hidden // s.heads, pass_=pass_)

    def _activation(self, pass_: str) -> MemoryOp:
        kind = "silu_mul" if self.shape.gated else "gelu"
        return MemoryOp(kind, self.shape.tokens, self.shape.ffn // self.tp, pass_=pass_)

    @property
    def _rows(self) -> int:
        return self.shape.tokens // self.tp

    def _add(self, op: Operator, *producers: int) -> int:
        self.operators.append(op)
        at = len(self.operators) - 1
        self.dependencies |= {(producer, at) for producer in producers if producer >= 0}
        return at
