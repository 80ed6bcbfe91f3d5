"""What stands before the first layer and after the last: embedding, logits and loss, and the optimizer's step."""

from __future__ import annotations

from overlapsim.units import dtype_bytes
from overlapsim.workload.build_linear import Linear, column_backward, gemm_backward, norm_backward
from overlapsim.workload.build_part import Part, norm_kind
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.recorder import Recorder
from overlapsim.workload.vocabulary import padded_vocabulary
from overlapsim.workload.weights import Matrix, Vector, model_weights


def local_vocabulary(part: Part) -> int:
    """Columns of the logits on one tensor-parallel rank."""
    return padded_vocabulary(part.model.vocabulary, part.layout.tp, part.recipe.vocabulary_multiple) // part.layout.tp


def embed_forward(r: Recorder, part: Part) -> None:
    """Look tokens up; each tensor-parallel rank has some of the vocabulary, so the rows are summed."""
    model, t = part.model, part.tokens
    if model.diffusion is not None:
        _patches(r, part, "embed", ("fwd",))
        return
    r.kernel("embed", MemoryOp("embedding", t.rows, model.hidden, model.dtype))
    if model.positions == "learned":
        r.kernel("embed", MemoryOp("add", t.rows, model.hidden, model.dtype))
    r.collective(part.reduction, "embed", part.hidden_bytes, part.layout.tp, group="tp")
    if part.recipe.dropout:
        r.kernel("embed", MemoryOp("dropout", t.local, model.hidden, model.dtype))


def embed_backward(r: Recorder, part: Part) -> None:
    """Add the gradients of the rows to the table's."""
    model, t = part.model, part.tokens
    if model.diffusion is not None:
        _patches(r, part, "embed", ("wgrad",))
        return
    if part.layout.sequence_parallel:
        r.collective("all_gather", "embed", part.hidden_bytes, part.layout.tp, group="tp", pass_="wgrad")
    r.kernel("embed", MemoryOp("embedding", t.rows, model.hidden, model.dtype, "bwd"), pass_="wgrad")


def head_forward(r: Recorder, part: Part) -> None:
    """Last norm, logits, loss: every rank has some columns of the logits, and sums of rows are shared."""
    model, layout, t = part.model, part.layout, part.tokens
    r.kernel("logits", MemoryOp(norm_kind(model), t.local, model.hidden, model.dtype))
    if model.diffusion is not None:
        _patches(r, part, "logits", ("fwd",))
        return
    if layout.sequence_parallel:
        r.collective("all_gather", "logits", part.hidden_bytes, layout.tp, group="tp")
    columns = local_vocabulary(part)
    r.gemm("logits", t.rows, columns, model.hidden)
    r.kernel("loss", MemoryOp(_loss(part), t.rows, columns, model.dtype))
    # Maximum, target's logit and sum of each row, fp32.
    r.collective("all_reduce", "loss", 3.0 * t.rows * dtype_bytes("fp32"), layout.tp, group="tp")


def head_backward(r: Recorder, part: Part, *, keep: frozenset[str]) -> None:
    """Gradients of loss, logits and last norm."""
    model, t = part.model, part.tokens
    if model.diffusion is not None:
        _patches(r, part, "logits", tuple(sorted(keep)))
    else:
        columns = local_vocabulary(part)
        if "dgrad" in keep:
            r.kernel("loss", MemoryOp(_loss(part), t.rows, columns, model.dtype, "bwd"), pass_="dgrad")
        column_backward(r, part, "logits", [Linear(t.rows, model.hidden, columns)], keep)
    if "dgrad" in keep:
        norm_backward(r, part, "logits", summed=False)


def optimizer_step(r: Recorder, part: Part, parameters: float, *, norm_ranks: int = 1) -> None:
    """Record the step over the parameters whose state this rank holds.

    Parameters
    ----------
    parameters : of this rank, after sharding of the optimizer
    norm_ranks : ranks that sum the gradient norm
    """
    count = max(1, round(parameters))
    if part.recipe.optimizer == "chain":
        r.kernel("optim.step", MemoryOp("optimizer_step", count, 1, part.model.dtype))
    else:
        r.kernel("optim.norm", MemoryOp("grad_norm", count, 1, part.model.dtype))
        r.kernel("optim.step", MemoryOp("adam", count, 1, part.model.dtype))
    r.collective("all_reduce", "optim.norm", 8.0, norm_ranks, group="world")


def _loss(part: Part) -> str:
    return "cross_entropy" if part.recipe.loss == "chain" else "fused_cross_entropy"


def _patches(r: Recorder, part: Part, name: str, passes: tuple[str, ...]) -> None:
    """GEMMs of a diffusion model's patches, context and time step."""
    t, diffusion = part.tokens, part.model.diffusion
    assert diffusion is not None
    rows_of = {"token": t.local, "context": t.batch * diffusion.context_tokens, "sequence": t.batch}
    for weight in model_weights(part.model):
        if isinstance(weight, Vector) or weight.operator != name:
            continue
        assert isinstance(weight, Matrix)
        rows = rows_of[weight.rows]
        if "fwd" in passes:
            r.gemm(name, rows, weight.outputs, weight.inputs)
        else:
            gemm_backward(r, part, name, rows, weight.inputs, weight.outputs, frozenset(passes))
