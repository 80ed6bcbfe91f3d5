# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 Calibrate your cluster
#
# You own a node of eight B300. Of its kind overlapsim knows the B200. A few files that you have anyway, an nccl-tests
# sweep and some GEMM timings, turn the B200 profile into one of your machine. This notebook does that with published
# measurements of a real B300 node (they ship with overlapsim), and asks at each step: how far can I trust it?

# %%
import tempfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import Image

from overlapsim.calibration.compare import compare
from overlapsim.calibration.fit import Calibration, calibrate
from overlapsim.calibration.fit_gemm import anchors
from overlapsim.calibration.gemm_shapes import rows_of
from overlapsim.calibration.profile_writer import write_profile
from overlapsim.calibration.readers.detect import read_measurements
from overlapsim.calibration.readers.reading import Hints
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import load_cluster
from overlapsim.report.compare_plot import compare_plot

TABLES = Path(str(files("overlapsim.hwprofiles"))) / "tables"
WORK = Path(tempfile.mkdtemp())
BASE = "b200-sxm8"

# %% [markdown]
# ## 1. The files
#
# A collective sweep with a column for everything, and GEMM timings. You would hand in logs as the tools print them;
# the format is told by the content (`docs/records.md`). Of the GEMM table 120 shapes are measured "by you": those that
# lie farthest apart. The rest stays unseen, to judge the result.

# %%
parts = []
for file in sorted((TABLES / "b300-sxm8").glob("*_*.csv")):
    collective, _, ranks = file.stem.rpartition("_")
    parts.append(pd.read_csv(file, comment="#").assign(collective=collective, ranks=int(ranks)))
collectives = pd.concat(parts)
collectives.to_csv(WORK / "collectives.csv", index=False)

gemms = pd.read_csv(TABLES / "gemm" / "b300-sxm-288gb.csv", comment="#").query("dtype == 'bf16'")
chosen = anchors(rows_of(gemms[["m", "n", "k"]].to_numpy(), gemms["time_us"].to_numpy() * 1e-6), 120)
gemms[chosen].to_csv(WORK / "gemms.csv", index=False)
gemms[~chosen].to_csv(WORK / "gemms_unseen.csv", index=False)
print(f"{len(collectives)} collective timings, {chosen.sum()} GEMM timings, {(~chosen).sum()} GEMMs unseen")

# %% [markdown]
# A log has no topology, so we say that all ranks sit on nodes of eight.

# %%
hints = Hints(ranks_per_node=8)
readings = read_measurements([WORK / "collectives.csv", WORK / "gemms.csv"], hints)
records = [record for reading in readings for record in reading.records]
records[0]

# %% [markdown]
# ## 2. Calibrate
#
# Solo times first. Every size between the ends of a curve is predicted once by a curve that has not seen it, a third
# of the shapes is held out, and each regime is judged by itself: a bias in small messages cannot hide behind one in
# large ones.

# %%
base = load_cluster(BASE)
result = calibrate(records, base, BASE)


def judged(result: Calibration) -> pd.DataFrame:
    """Errors on what each part had not seen, by regime."""
    parts = [(curve.name, curve.regimes) for curve in result.curves]
    parts += [(kernel.table.name, kernel.regimes) for kernel in result.kernels]
    rows = [
        {"what": name, "regime": r.name, "held out": r.num_points, "bias": r.median_signed, "median": r.median_abs}
        for name, regimes in parts
        for r in regimes
    ]
    table = pd.DataFrame(rows).set_index(["what", "regime"])
    return table.assign(**{column: table[column].map("{:+.1%}".format) for column in ("bias", "median")})


judged(result)

# %%
for finding in result.findings:
    print(f"{finding.code}: {finding.message}")

# %% [markdown]
# ## 3. The profile
#
# A YAML file that extends the base, with its curves and fits beside it. It works wherever a profile name does.

# %%
path = write_profile(result, WORK / "my-b300")
mine = load_cluster(str(path.parent))
print(path.read_text(encoding="utf-8")[:500])
print(mine.name, "calibrated:", mine.calibrated)

# %% [markdown]
# ## 4. Was it worth it?
#
# The unseen GEMMs, priced by the B200 profile and by ours. Signed, because planners care about direction.

# %%
(unseen,) = read_measurements([WORK / "gemms_unseen.csv"], hints)
before, after = compare(unseen.records, base), compare(unseen.records, mine)
table = pd.DataFrame(
    {
        (name, column): {line.regime: getattr(line, column) for line in comparison.lines}
        for name, comparison in (("B200 profile", before), ("calibrated", after))
        for column in ("median_signed", "median_abs", "p90_abs")
    }
)
table.map("{:+.1%}".format)

# %%
compare_plot(after, WORK / "unseen.png")
Image(WORK / "unseen.png")

# %% [markdown]
# ## 5. What does not belong
#
# Real files hold stalls. These are published all-reduce times of eight H100; one row is off. It is found by its
# neighbours, said, and left out.

# %%
published = """size_bytes,time_us
128,19.2
65536,23
1048576,32.4
2097152,290.7
4194304,59.4
8388608,90.5
16777216,135.7
"""
(WORK / "h100.csv").write_text(published, encoding="utf-8")
(reading,) = read_measurements([WORK / "h100.csv"], Hints(ranks_per_node=8, collective="all_reduce", ranks=8))
h100 = calibrate(reading.records, load_cluster("h100-sxm8"), "h100-sxm8")
(curve,) = h100.curves
print(h100.findings[-1].message)
print(f"latency {curve.latency_s * 1e6:.1f} us, rate {curve.bytes_per_s / 1e9:.0f} GB/s")

# %% [markdown]
# And files hold wrong units. The same numbers in a column of milliseconds are refused, with the likely reason:

# %%
(WORK / "h100_ms.csv").write_text(published.replace("time_us", "time_ms"), encoding="utf-8")
(reading,) = read_measurements([WORK / "h100_ms.csv"], Hints(ranks_per_node=8, collective="all_reduce", ranks=8))
try:
    calibrate(reading.records, load_cluster("h100-sxm8"), "h100-sxm8")
except CalibrationError as error:
    print(error)

# %% [markdown]
# ## On the command line
#
# ```sh
# overlapsim calibrate all_reduce.log gemms.csv --cluster b200-sxm8 --ranks-per-node 8 -o my-b300
# overlapsim compare next_week.log --cluster my-b300 --ranks-per-node 8 --plot drift.png
# ```

# %%
errors = np.array([row.error for row in after.rows])
assert abs(np.median(errors)) < 0.05, "the calibrated profile is biased"
assert np.median(np.abs(errors)) < np.median(np.abs([row.error for row in before.rows])), "calibration did not help"
