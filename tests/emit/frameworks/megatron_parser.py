"""Run Megatron's own argument checks and rank grid on files of arguments, without a GPU; prints a JSON line a file.

``python megatron_parser.py [--tree FOLDER] FILE...``: the installed megatron-core (0.19.2 holds ``megatron.training``),
or the checkout in FOLDER. Transformer Engine counts as 2.18 and the GPU as a Hopper. The configuration is built
as well, since half of the rules stand in ``TransformerConfig``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

USERS = ("--train-iters 10", "--lr 1e-4", "--mock-data", "--tokenizer-type NullTokenizer", "--no-rope-fusion")
"""What an emitted file leaves to the user, and fusion that needs a kernel library."""


def load(tree: str | None) -> Any:
    """Megatron's arguments module, with what it asks of GPUs answered."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    if tree:
        sys.path.insert(0, tree)
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    import megatron.core.utils
    import megatron.training.arguments as arguments
    from packaging.version import Version

    megatron.core.utils._te_version = Version("2.18.0")
    if hasattr(arguments, "get_device_arch_version"):
        arguments.get_device_arch_version = lambda: 9
    return arguments


def check(arguments: Any, path: Path) -> dict[str, Any]:
    """Parse one file; returns what was understood, or the error."""
    world, words, names = 1, [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# world_size="):
            world = int(line.partition("=")[2])
        elif line.startswith("# env "):
            name, _, value = line.removeprefix("# env ").partition("=")
            os.environ[name] = value
            names.append(name)
        elif line.strip() and not line.startswith("#"):
            words += shlex.split(line)
    for extra in USERS:
        if extra.split()[0] not in words:
            words += extra.split()
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    sys.argv = ["pretrain", *words]
    try:
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        config = arguments.core_transformer_config_from_args(args)
        ranks = groups(args, world)
    except (Exception, SystemExit) as error:
        return {"file": path.name, "error": f"{type(error).__name__}: {error}"}
    finally:
        for name in names:
            os.environ.pop(name, None)
    return {
        "file": path.name,
        "error": "",
        "world_size": world,
        "dp": args.data_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "overlap_p2p": config.overlap_p2p_comm,
        "groups": ranks,
    }


def groups(args: Any, world: int) -> dict[str, list[int]]:
    """Ranks of the groups of one rank in the middle, by kind."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = world // 2 + 1 if world > 2 else 0
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            order="tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        ranks = torch.distributed.get_process_group_ranks
        return {
            "rank": [rank],
            "tp": ranks(parallel_state.get_tensor_model_parallel_group()),
            "pp": ranks(parallel_state.get_pipeline_model_parallel_group()),
            "cp": ranks(parallel_state.get_context_parallel_group()),
            "dp": ranks(parallel_state.get_data_parallel_group()),
            "ep": ranks(parallel_state.get_expert_model_parallel_group()),
        }
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def main() -> None:
    """Check the files that are named."""
    warnings.simplefilter("ignore")
    given = sys.argv[1:]
    tree = given.pop(1) if given[:1] == ["--tree"] else None
    given = given[1:] if tree else given
    arguments = load(tree)
    for path in given:
        print(json.dumps(check(arguments, Path(path))))


if __name__ == "__main__":
    main()
