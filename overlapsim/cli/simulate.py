"""`overlapsim simulate`: how long a training (or serving) step takes, where its time goes, what each GPU holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from overlapsim.cli.forward import TRAIN, check_phase, phase_options, run_forward
from overlapsim.cli.options import check_targets, size_bytes
from overlapsim.cli.output import compile_note, print_json
from overlapsim.cli.perturbation import perturbation
from overlapsim.cli.simulate_view import step_json, step_table
from overlapsim.cost.launch import STACKS
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.nic_sharing import RINGS
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.schedule.pipeline_links import P2P_MODES
from overlapsim.step.capacity import memory_shortfall
from overlapsim.step.inputs import DEFAULT_BUCKET_BYTES, DP_OVERLAPS, DP_SYNCS, StepInputs
from overlapsim.step.pieces import layer_gemms
from overlapsim.step.queues import with_queues
from overlapsim.step.simulate import simulate_step, step_memory, step_schedule
from overlapsim.strategy.overlaps import composition
from overlapsim.units import DTYPE_BYTES, whole_number
from overlapsim.workload.dispatchers import DISPATCHERS
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_model
from overlapsim.workload.rank_map import ORDER, read_order
from overlapsim.workload.recipe import COMPRESSIONS, RECIPES, parse_compress, with_dispatch
from overlapsim.workload.recompute import Recompute


@click.command("simulate")
@click.argument("model")
@click.option("--cluster", required=True, help="Profile name (see `profiles list`) or a YAML file.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes of the cluster in use.")
@click.option(
    "--layout",
    default="",
    metavar="KEY=N,..",
    help="tp, sp, cp, cp_kind, ep, etp, pp, vpp, dp, zero, hsdp, sequence_parallel; dp follows from the GPUs, "
    "etp (tensor parallelism within an expert) is tp where left out.",
)
@click.option("--global-batch", type=int, help="Sequences of a step (training).")
@click.option("--seq", type=int, help="Tokens of a sequence; of a prompt those that the step computes.")
@phase_options
@click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences of a micro-batch on one GPU.")
@click.option("--schedule", default="", metavar="NAME", help=f"Pipeline schedule: {', '.join(SCHEDULES)}.")
@click.option("--virtual", type=int, help="Model chunks a stage holds: the layout's vpp.")
@click.option("--stage-layers", metavar="N,..", help="Layers of each chunk, where stages are uneven.")
@click.option("--recompute", default="none", show_default=True, help="none, selective, full, sar, or modules with +.")
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="modern", show_default=True, help="Kernels.")
@click.option("--fp8", is_flag=True, help="Linear layers multiply in fp8 (changes results).")
@click.option(
    "--compress",
    type=parse_compress,
    default="",
    metavar="A,..",
    help=f"Collectives that are narrowed, which changes results: {', '.join(COMPRESSIONS)}.",
)
@click.option("--dtype", type=click.Choice(sorted(DTYPE_BYTES)), help="Type of the model instead of its own.")
@click.option("--stack", default="graph", show_default=True, help=f"How kernels are launched: {', '.join(STACKS)}.")
@click.option("--dp-overlap", type=click.Choice(DP_OVERLAPS), default="none", show_default=True)
@click.option(
    "--dp-sync", type=click.Choice(DP_SYNCS), default="hierarchical", show_default=True, help="Of copies in a node."
)
@click.option("--bucket-size", type=size_bytes, metavar="SIZE", help="Bytes of gradients reduced together.")
@click.option("--p2p", type=click.Choice(P2P_MODES), help="How pipeline transfers stand to computation.")
@click.option("--rings", type=click.Choice(RINGS), default="mirrored", show_default=True, help="Rings across nodes.")
@click.option("--rank-order", type=read_order, metavar="A-B-..", help="Which degrees fill the ranks first.")
@click.option("--sustained-clock", type=float, default=1.0, show_default=True, help="Clock of a long run, a share.")
@click.option(
    "--overlap",
    multiple=True,
    metavar="OPERATOR[:PASS]=STRATEGY[:NAME=VALUE,..]",
    help="A strategy for an operator of every layer, or step=STRATEGY for whole graphs; repeatable.",
)
@click.option("--queues", type=int, help="Hardware queues that streams share (CUDA_DEVICE_MAX_CONNECTIONS).")
@click.option("--no-reshard", is_flag=True, help="ZeRO 3 keeps gathered parameters over the step.")
@click.option(
    "--dispatch",
    default="",
    metavar="NAME[:KEY=X,..]",
    help=f"How tokens reach experts: {', '.join(DISPATCHERS)}; node_limit, dtype, sms, capacity, balanced.",
)
@click.option(
    "--perturb",
    type=perturbation,
    default="",
    metavar="KEY=X,..",
    help="slow=SHARE[@RANK], nvlink=SHARE[@RANK], nic=SHARE[@NODE], jitter, imbalance, routing=zipf:S or FILE, seed.",
)
@click.option("--no-contention", is_flag=True, help="Leave HBM and link sharing out.")
@click.option("--ignore-memory", is_flag=True, help="Simulate a step that does not fit its GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Perfetto trace (.json or .json.gz).")
def command(**given: Any) -> None:
    """Simulate a training or a serving step of MODEL (a name, a model file, a config.json or its folder)."""
    check_phase(click.get_current_context())
    trace = given["trace"]
    check_targets(trace=trace)
    spec, findings = load_model(given["model"])
    if given["dtype"]:
        spec = replace(spec, dtype=given["dtype"])
    machine = load_cluster(given["cluster"]).with_nodes(given["nodes"])
    if given["phase"] != TRAIN:
        run_forward(given, spec, machine, findings)
        return
    stages, recipe = _counts(given["stage_layers"]), with_dispatch(RECIPES[given["recipe"]], given["dispatch"])
    inputs = StepInputs(
        spec,
        machine,
        step_layout(given["layout"], machine, given["virtual"]),
        Job(given["seq"], given["micro_batch"], given["global_batch"], stage_layers=stages),
        schedule=given["schedule"],
        p2p=given["p2p"],
        recompute=Recompute.parse(given["recompute"]),
        recipe=replace(recipe, fp8=given["fp8"], compress=given["compress"]),
        stack=given["stack"],
        dp_overlap=given["dp_overlap"],
        dp_sync=given["dp_sync"],
        bucket_bytes=given["bucket_size"] or DEFAULT_BUCKET_BYTES,
        reshard=not given["no_reshard"],
        rings=given["rings"],
        rank_order=given["rank_order"] or ORDER,
        sustained_clock=given["sustained_clock"],
        contention=not given["no_contention"],
        perturbation=given["perturb"],
    )
    if given["overlap"]:
        inputs = replace(inputs, composition=composition(given["overlap"], layer_gemms(inputs)))
    inputs = with_queues(inputs, given["queues"])
    shortfall = memory_shortfall(inputs, step_memory(inputs, step_schedule(inputs)))
    if shortfall and not given["ignore_memory"]:
        raise LayoutError(f"{shortfall}; --ignore-memory simulates it all the same", exit_code=1)
    with compile_note():
        result = simulate_step(inputs)
    exceeded = (Finding("memory_exceeded", shortfall),) if shortfall else ()
    result = replace(result, findings=(*exceeded, *findings, *result.findings))
    if trace is not None:
        from overlapsim.report.trace import write_trace

        title = f"{spec.name} in {inputs.layout} on {machine.name}, one GPU of each stage"
        write_trace(result.timeline, trace, title=title)
    if as_json := given["as_json"]:
        print_json(step_json(result))
    else:
        step_table(result)
    if trace is not None and not as_json:
        click.echo(f"trace written to {trace}")


def step_layout(text: str, machine: Cluster, virtual: int | None = None) -> Layout:
    """Layout of a text on a machine: `dp` follows from the GPUs where it is left out; given, some may stay idle.

    Raises
    ------
    LayoutError
        If the text is no layout, does not divide the machine, or names another ``vpp`` than `virtual`.
    """
    keys = {part.partition("=")[0].strip() for part in text.split(",")}
    if virtual is not None:
        if "vpp" in keys:
            raise LayoutError("the layout has vpp and --virtual is given; expected one of them")
        text = ",".join(filter(None, (text, f"vpp={virtual}")))
    return Layout.parse(text, None if "dp" in keys else machine.num_devices)


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    counts = [count for part in parts if (count := whole_number(part)) is not None]
    if len(counts) < len(parts):
        raise UsageError(f"--stage-layers is {text!r}; expected whole numbers such as 7,8,8,7")
    return tuple(counts)
