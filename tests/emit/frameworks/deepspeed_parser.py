"""Run by a Python that has DeepSpeed: parse one configuration with its own parser and print what it became, as JSON."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"


def main(path: str, ranks: int) -> dict[str, object]:
    from deepspeed.runtime import config as module

    with (
        mock.patch.object(module.dist, "get_world_size", lambda *_: ranks),
        mock.patch.object(module.dist, "get_rank", lambda *_: 0),
    ):
        config = module.DeepSpeedConfig(path)
    zero = config.zero_config
    return {
        "version": version("deepspeed"),
        "batch": [
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        ],
        "stage": int(zero.stage),
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": int(zero.reduce_bucket_size),
        "ep": config.expert_parallel_config.autoep_size,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
