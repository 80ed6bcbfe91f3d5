from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from overlapsim.errors import ProfileError
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.loading import load_cluster, load_device

Write = Callable[[str, str], Path]
GEMM = """\
kind: fit
family: gemm
of: {of}
notes: a test
fits:
  bf16:
    source: MINE
    layer: measured
    trust: high
    num_points: 120
    notes: half of 240 shapes
    spread: {{small: [0.9, 1.12], large: [0.97, 1.02]}}
    parameters:
      floor: {{value: 1.68, unit: us}}
      l2: {{value: 5.5, unit: TB/s}}
      rate: {{value: {rate}, unit: ratio}}
      tiles: {{value: 4, unit: count}}
      clock: {{value: 1.5, unit: GHz}}
      peak: {{value: 800, unit: TFLOP/s}}
      footprint: {{value: 50, unit: MiB}}
"""


def test_values_in_si_units(write: Write) -> None:
    write("fits/gemm/gpu.yaml", GEMM.format(of="gpu", rate=0.9))
    device = load_device(str(write("devices/gpu.yaml", "kind: device\nextends: h800-sxm5-80gb\n")))
    fit = device.fits["gemm.bf16"]
    assert fit.parameters == {
        "floor": pytest.approx(1.68e-6),
        "l2": 5.5e12,
        "rate": 0.9,
        "tiles": 4.0,
        "clock": 1.5e9,
        "peak": 800e12,
        "footprint": 50 * 2**20,
    }
    assert (fit.family, fit.key, fit.num_points, fit.notes) == ("gemm", "bf16", 120, "half of 240 shapes")
    assert fit.spread == {"small": (0.9, 1.12), "large": (0.97, 1.02)}
    assert (fit.source.layer, fit.source.reference, fit.source.trust) == ("measured", "MINE", "high")


def test_listed_files_go_over_what_is_inherited(write: Write) -> None:
    """Base's fits by name, then the listed ones, later over earlier; null drops all."""
    write("fits/gemm/base.yaml", GEMM.format(of="base", rate=0.5))
    write("devices/base.yaml", "kind: device\nextends: a100-sxm4-80gb\nfits: null\n")
    own = GEMM.format(of="whatever", rate=0.7).replace("bf16:", "fp16:")
    write("own.yaml", own)
    path = write("devices/mine.yaml", "kind: device\nextends: base\nfits: [own.yaml]\n")
    write("fits/x.yaml", GEMM.format(of="base", rate=0.8))
    fits = load_device(str(path)).fits
    assert {key: fit.parameters["rate"] for key, fit in fits.items()} == {"gemm.bf16": 0.5, "gemm.fp16": 0.7}
    path = write("devices/other.yaml", "kind: device\nextends: mine\nfits: [x.yaml]\n")
    assert load_device(str(path)).fits["gemm.bf16"].parameters["rate"] == 0.8
    path = write("devices/none.yaml", "kind: device\nextends: mine\nfits: null\n")
    assert load_device(str(path)).fits == {}


def test_a_cluster_has_its_own_and_its_devices_fits(write: Write) -> None:
    write("fits/collective/lab.yaml", GEMM.format(of="lab", rate=1).replace("family: gemm", "family: collective"))
    write("fits/gemm/gpu.yaml", GEMM.format(of="gpu", rate=0.9))
    device = "{extends: a100-sxm4-80gb, fits: [gemm/gpu.yaml]}"
    text = f"kind: cluster\nextends: a100-sxm8\nnode:\n  extends: a100-sxm8\n  device: {device}\n"
    path = write("clusters/lab.yaml", text)
    cluster = load_cluster(str(path))
    assert "collective.bf16" in cluster.fits and "gemm.bf16" not in cluster.fits
    assert cluster.device.fits["gemm.bf16"].parameters["rate"] == 0.9
    before = cluster.digest
    write("fits/gemm/gpu.yaml", GEMM.format(of="gpu", rate=0.8))
    assert load_cluster(str(path)).digest != before


def test_another_profile_of_a_bundled_name_gets_no_bundled_fits(write: Write) -> None:
    """Fits belong to the folder their profile was found in."""
    assert load_device("a100-sxm4-80gb").fits
    sheet = (bundled() / "devices" / "a100-sxm4-80gb.yaml").read_text()
    assert load_device(str(write("a100-sxm4-80gb.yaml", sheet))).fits == {}
    assert load_device(str(write("mine.yaml", "kind: device\nextends: h100-sxm5-80gb\n"))).fits


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kind: fit", "kind: fits", "kind is 'fits'; expected kind: fit"),
        ("of: gpu", "of: gpus", "of is 'gpus'; the file lies where gpu's is expected"),
        ("family: gemm", "family: 3", "family is 3; expected a name"),
        ("notes: a test", "note: a test", "unknown key note"),
        ("unit: us", "unit: parsec", "parameters.floor: '1.68 parsec' has unit 'parsec'"),
        ("unit: ratio", "unit: ''", "parameters.rate: unit is ''"),
        ("value: 4,", "value: many,", "parameters.tiles is 'many'; expected a finite number"),
        ("value: 4,", "value: .inf,", "parameters.tiles is inf; expected a finite number"),
        ("{value: 4, unit: count}", "4", "parameters.tiles is 4; expected {value: NUMBER, unit: UNIT}"),
        ("[0.9, 1.12]", "[1.12, 0.9]", "spread.small is [1.12, 0.9]"),
        ("[0.9, 1.12]", "[0, 1]", "spread.small is [0, 1]"),
        ("[0.9, 1.12]", "1.1", "spread.small is 1.1"),
        ("num_points: 120", "num_points: -1", "num_points is -1"),
        ("num_points: 120", "points: 120", "has unknown key points"),
        ("layer: measured", "layer: guessed", "layer is 'guessed'"),
        ("    parameters:", "    parameters: {}\n    ignored:", "unknown key ignored"),
    ],
)
def test_problems_name_file_and_place(write: Write, old: str, new: str, expected: str) -> None:
    text = GEMM.format(of="gpu", rate=0.9)
    assert old in text
    write("fits/gemm/gpu.yaml", text.replace(old, new))
    path = write("devices/gpu.yaml", "kind: device\nextends: a100-sxm4-80gb\n")
    with pytest.raises(ProfileError) as caught:
        load_device(str(path))
    assert expected in str(caught.value)
    assert "gpu" in str(caught.value) and "fits/gemm" in str(caught.value)


def test_files_that_are_not_there(write: Write) -> None:
    path = write("gpu.yaml", "kind: device\nextends: a100-sxm4-80gb\nfits: [no.yaml]\n")
    with pytest.raises(ProfileError, match=r"fit no\.yaml is not beside the profile nor in a fits folder"):
        load_device(str(path))
    path = write("gpu.yaml", "kind: device\nextends: a100-sxm4-80gb\nfits: no.yaml\n")
    with pytest.raises(ProfileError, match="expected a list of files"):
        load_device(str(path))
