"""Run inside a clean environment that has only the wheel: the main job works without the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import overlapsim.hwprofiles
import overlapsim.strategies
import overlapsim.validate

import overlapsim

checkout = Path(__file__).resolve().parent.parent
assert checkout not in Path(overlapsim.__file__).resolve().parents, overlapsim.__file__
curve = files(overlapsim.hwprofiles) / "tables" / "a800-sxm8" / "all_reduce_2.csv"
arguments = (
    "operator --cluster a800-sxm8 --ranks 2 --m 8192 --n 8192 --k 4096 --dtype fp16 --accumulate fp16 --tile 256x128 "
    f"--gemm-time 2.042ms --curve {curve} --json -o plan.yaml --trace trace.json --plot plan.png"
)
run = subprocess.run(
    [sys.executable, "-m", "overlapsim.cli.main", *arguments.split()], check=True, capture_output=True, text=True
)
answer = json.loads(run.stdout)
assert answer["best"] == "wave_group", answer
assert all(Path(name).stat().st_size > 1000 for name in ("plan.yaml", "trace.json", "plan.png"))
subprocess.run([sys.executable, "-m", "overlapsim.cli.main", "trace", "plan.yaml", "--json"], check=True)
step = "simulate gpt2-126m --cluster a100-sxm8 --layout dp=8 --global-batch 8 --seq 1024 --json"
run = subprocess.run(
    [sys.executable, "-m", "overlapsim.cli.main", *step.split()], check=True, capture_output=True, text=True
)
answer = json.loads(run.stdout)
assert abs(sum(answer["breakdown_s"].values()) - answer["step_time_s"]) < 1e-9, answer
subprocess.run([sys.executable, "-m", "overlapsim.validate", "plan", "plan.yaml", "--check"], check=True)
print("wheel ok:", overlapsim.__file__)
