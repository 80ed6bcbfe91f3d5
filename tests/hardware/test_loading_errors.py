from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from overlapsim.errors import ProfileError
from overlapsim.hardware.loading import load_cluster, load_device, load_node

Write = Callable[[str, str], Path]
DEVICE = "kind: device\nextends: a100-sxm4-80gb\n"
NODE = "kind: node\nextends: a100-sxm8\n"
CLUSTER = "kind: cluster\nextends: a100-sxm8\n"


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ProfileError) as caught:
        call()
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_unknown_name_lists_near_ones_and_all() -> None:
    text = message(lambda: load_cluster("A100-SMX8"))
    assert "'A100-SMX8' is unknown" in text
    assert "did you mean a100-sxm8" in text
    first, *names = text.splitlines()
    assert first.endswith("did you mean a100-sxm8 or h100-sxm8 or a800-sxm8?") and "b200" not in first
    assert names[0].startswith("there are: a100-") and all(len(line) <= 100 for line in names)
    assert "rtx4090-pcie8" in "".join(names)
    assert "did you mean" not in message(lambda: load_cluster("zzz"))
    assert "unknown" in message(lambda: load_cluster(""))


def test_paths_that_lead_nowhere(tmp_path: Path, write: Write) -> None:
    assert "there is no file or folder" in message(lambda: load_cluster("no/such.yaml"))
    assert "there is no file or folder" in message(lambda: load_cluster("a100-sxm8.yaml"))
    assert "holds 0 cluster profiles" in message(lambda: load_cluster(str(tmp_path)))
    write("a.yaml", CLUSTER)
    write("clusters/b.yaml", CLUSTER)
    assert "holds 2 cluster profiles (a, b)" in message(lambda: load_cluster(str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: cluster\nnode: [a\nx: 1\n", "line 3"),
        ("kind: cluster\nkind: node\n", "line 2: key 'kind' appears twice"),
        ("kind: cluster\n\tnode: a\n", "line 2"),
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("1: a\n", "not a mapping"),
        ("a: !!python/object:os.system {}\n", "line 1"),
        ("a: 2024-13-45\n", "not YAML"),
        ("[" * 5000, "YAML"),
        ("? [a]\n: b\n", "line 1"),
    ],
)
def test_malformed_yaml_has_a_line(write: Write, text: str, expected: str) -> None:
    path = write("c.yaml", text)
    assert expected in message(lambda: load_cluster(str(path)))


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message(lambda: load_cluster(str(tmp_path / "c.yaml")))


def test_all_problems_come_in_one_message(write: Write) -> None:
    write("gpu.yaml", DEVICE + "num_sms: 108.5\nhbm_bandwith: 2 TB/s\nkernels: {gemm_efficiency: 1.2}\n")
    write("box.yaml", NODE + "device: gpu\nnvlink_bandwidth: 300 Gbps\nscale_up: torus\n")
    path = write(
        "c.yaml", CLUSTER + "node: box\nnet_latency: 5 km\ncollectives: {base: 5}\ncurves: {ring/2: {file: x.csv}}\n"
    )
    text = message(lambda: load_cluster(str(path)))
    assert "profile c has 8 problems" in text
    for expected in (
        "num_sms is 108.5; expected a whole number",
        "unknown key hbm_bandwith; did you mean hbm_bandwidth?",
        "kernels.gemm_efficiency is 1.2; expected above 0 and at most 1",
        "nvlink_bandwidth '300 Gbps' has unit 'Gbps'",
        "scale_up is 'torus'; expected nvswitch, nvlink_mesh, pcie",
        "net_latency '5 km' has unit 'km'",
        "collectives.base is 5 without a unit; expected a quantity such as 3.4 us",
        "curves.ring/2 is no curve",
        "device gpu (",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("hbm_bandwidth: 2039", "without a unit"),
        ("hbm_bandwidth: {value: 2039, unit: GB}", "expected bytes or bits per second"),
        ("hbm_bandwidth: {value: 2039, unit: GB/s, sauce: A}", "unknown key sauce"),
        ("hbm_bandwidth: {value: 2039, unit: GB/s, layer: rumour}", "layer is 'rumour'"),
        ("hbm_bandwidth: {value: 2039, unit: GB/s, trust: 9}", "trust is 9"),
        ("hbm_bandwidth: {value: 2039, unit: GB/s, source: 3}", "source is 3"),
        ("hbm_bandwidth: {value: [1], unit: GB/s}", "is [1]; expected a quantity"),
        ("hbm_bandwidth: {value: true, unit: GB/s}", "is True; expected a quantity"),
        ("hbm_bandwidth: -1 GB/s", "is -1 GB/s; expected above 0"),
        ("hbm_bandwidth: 0 GB/s", "expected above 0"),
        ("hbm_bandwidth: .inf", "is not a quantity"),
        ("hbm_bandwidth: {value: .nan, unit: GB/s}", "is not a quantity"),
        ("hbm_bandwidth: {unit: GB/s}", "has no value"),
        ("boost_clock: 1410 GB", "expected a frequency"),
        ("peak_flop: {bf16: 312 TB/s}", "expected a rate"),
        ("peak_flop: {bf17: 312 TFLOP/s}", "peak_flop.bf17 is no rate"),
        ('peak_flop: {"fp16:fp8": 312 TFLOP/s}', "peak_flop.fp16:fp8 is no rate"),
        ("peak_flop: 3", "peak_flop is 3; expected a section"),
        ("num_sms: many", "num_sms is 'many'; expected a whole number"),
        ("num_sms: .inf", "expected a whole number"),
        ("num_sms: true", "expected a whole number"),
        ("num_sms: 0", "expected at least 1"),
        ("num_sms: {value: 108, unit: GB}", "has unit 'GB'; expected count"),
        ("num_sms: null", "missing key num_sms"),
        ("kernels: null", "missing section kernels"),
        ("kernels: {gemm_tiles: []}", "expected a list of [BM, BN, BK]"),
        ("kernels: {gemm_tiles: [[128, 128]]}", "expected a list of [BM, BN, BK]"),
        ("kernels: {gemm_tiles: [[128, 128, 0]]}", "expected a list of [BM, BN, BK]"),
        ("kernels: {gemm_tiles: [[a, b, c]]}", "expected a list of [BM, BN, BK]"),
        ("kernels: {template_slowdown: 0.9}", "expected at least 1"),
        ("architecture: 7", "architecture is 7; expected a name"),
        ("kind: node", "kind is 'node'; expected kind: device"),
        ("extends: 3", "extends is 3; expected the name of a device"),
        ("extends: nothing", "device 'nothing' is unknown"),
    ],
)
def test_device_entries(write: Write, entry: str, expected: str) -> None:
    key = entry.split(":")[0]
    lines = [line for line in DEVICE.splitlines() if not line.startswith(f"{key}:")]
    path = write("gpu.yaml", "\n".join([*lines, entry]) + "\n")
    assert expected in message(lambda: load_device(str(path)))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("pcie_groups: [[0, 1], [2, 3]]", "pcie_groups is ((0, 1), (2, 3)); expected each device 0..7 exactly once"),
        ("numa_groups: [[0, 1, 2, 3, 4, 5, 6, 7], [7]]", "expected each device 0..7 exactly once"),
        ("numa_groups: [[0.5]]", "expected a list of device lists"),
        ("nvlink_bandwidth: 0 GB/s", "nvlink_bandwidth is 0"),
        ("scale_up: pcie", "nvlink_bandwidth is not 0"),
        ("nic_bandwidth: 0 GB/s", "nic_bandwidth is 0"),
        ("p2p: maybe", "p2p is 'maybe'; expected true or false"),
        ("device: null", "missing key device"),
        ("device: rtx4090", "did you mean rtx-4090"),
        ("nic_count: 4", "unknown key nic_count"),
    ],
)
def test_node_entries(write: Write, entry: str, expected: str) -> None:
    path = write("box.yaml", NODE + entry + "\n")
    assert expected in message(lambda: load_node(str(path)))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("curves: {all_reduce/2: mine.csv}", "expected a mapping with file"),
        ("curves: {all_reduce/2: {file: none.csv}}", "table none.csv is not beside the profile"),
        ("curves: {all_reduce/2: {file: bad.csv}}", "curve bad.csv, line 2"),
        ("curves: {all_reduce/2: {file: binary.csv}}", "not UTF-8"),
        ("curves: {all_reduce/2: {file: bad.csv, colour: red}}", "unknown key curves.all_reduce/2.colour"),
        ("curves: {all_reduce/2: {file: bad.csv, layer: x}}", "layer is 'x'"),
        ("curves: {all_reduce: {file: bad.csv}}", "curves.all_reduce is no curve"),
        ("curves: {all_reduce/0: {file: bad.csv}}", "curves.all_reduce/0 is no curve"),
        ("curves: [1]", "curves is [1]; expected a section"),
        ("num_nodes: 0", "num_nodes is 0; expected at least 1"),
        ("collectives: {sms: -1}", "collectives.sms is -1; expected at least 0"),
        ("collectives: {smz: 1}", "unknown key collectives.smz; did you mean sms?"),
        ("calibrated: 1", "calibrated is 1; expected true or false"),
    ],
)
def test_cluster_entries(write: Write, tmp_path: Path, entry: str, expected: str) -> None:
    write("bad.csv", "size_bytes,time_s\n1,x\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    path = write("c.yaml", CLUSTER + entry + "\n")
    assert expected in message(lambda: load_cluster(str(path)))


def test_extends_circles_are_refused(write: Write) -> None:
    path = write("a.yaml", "kind: device\nextends: b\n")
    write("b.yaml", "kind: device\nextends: a\n")
    assert "extends in a circle (a -> b -> a)" in message(lambda: load_device(str(path)))
    path = write("self.yaml", "kind: device\nextends: self\n")
    assert "extends in a circle (self -> self)" in message(lambda: load_device(str(path)))


def test_an_empty_profile_names_all_missing_keys(write: Write) -> None:
    text = message(lambda: load_device(str(write("gpu.yaml", "kind: device\n"))))
    for key in ("num_sms", "boost_clock", "hbm_bandwidth", "architecture", "section kernels", "section peak_flop"):
        assert f"missing {key}" in text or f"missing key {key}" in text


MESH = NODE + "scale_up: nvlink_mesh\nnvlink_bandwidth: 300 GB/s\n"


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (MESH + "nvlink_pairs: [[0, 1]]\n", "expected a list of [GPU, GPU, links]"),
        (MESH + "nvlink_pairs: [[0, 0, 2]]\n", "of two GPUs and at least 1 link each"),
        (MESH + "nvlink_pairs: [[0, 1, 2], [1, 0, 2]]\n", "expected each two GPUs once"),
        (MESH + "nvlink_pairs: [[0, 8, 2]]\n", "expected devices 0..7"),
        (MESH + "nvlink_pairs: {value: [[0, 1, 2]], unit: GB}\n", "has unit 'GB'; expected links"),
        (NODE + "nvlink_pairs: [[0, 1, 2]]\n", "nvlink_pairs is given with scale_up nvswitch"),
        (NODE + "nic_groups: [[0, 1], [2, 3]]\n", "expected each device 0..7 exactly once"),
        (NODE + "num_nics: 1\nnic_groups: [[0, 1, 2, 3], [4, 5, 6, 7]]\n", "nic_groups has 2 groups"),
    ],
)
def test_meshes_and_nics_that_cannot_be(write: Write, node: str, expected: str) -> None:
    assert expected in message(lambda: load_node(str(write("box.yaml", node))))


FABRIC = "  technology: ours\n  net_latency: 3 us\n  nic_efficiency: {value: 0.9}\n  nodes_per_leaf: 4\n"


def test_fabrics(write: Write) -> None:
    own = CLUSTER + "fabric:\n" + FABRIC + "  spine_oversubscription: 2\n"
    cluster = load_cluster(str(write("c.yaml", own)))
    assert cluster.fabric is not None
    assert (cluster.fabric.name, cluster.fabric.nodes_per_leaf, cluster.fabric.rail_optimised) == ("c", 4, False)
    assert cluster.net_latency_s == cluster.fabric.net_latency_s == pytest.approx(3e-6)
    assert cluster.sources["net_latency_s"].reference == "c.yaml"
    slower = load_cluster(str(write("c.yaml", own + "net_latency: 8 us\n")))
    assert (slower.net_latency_s, slower.fabric) == (pytest.approx(8e-6), cluster.fabric)
    text = message(lambda: load_cluster(str(write("c.yaml", own.replace(": 2\n", ": 0.5\n").replace("ours", "''")))))
    assert "spine_oversubscription is 0.5; expected at least 1" in text and "technology is ''" in text
    assert "fabric 'nope' is unknown" in message(lambda: load_cluster(str(write("c.yaml", CLUSTER + "fabric: nope\n"))))
    alone = message(lambda: load_cluster(str(write("c.yaml", CLUSTER + "fabric: null\n"))))
    assert "missing key net_latency; give it, or a fabric that has one" in alone


def test_problems_of_an_inline_node_name_the_file(write: Write) -> None:
    path = write("c.yaml", CLUSTER + "node:\n  extends: a100-sxm8\n  num_nics: many\n  nvlink_bandwith: 3 GB/s\n")
    text = message(lambda: load_cluster(str(path)))
    assert "node c (node in" in text and "c.yaml" in text
    assert "num_nics is 'many'; expected a whole number" in text
    assert "unknown key nvlink_bandwith; did you mean nvlink_bandwidth" in text


def test_shares_above_one_are_refused(write: Write) -> None:
    path = write("gpu.yaml", DEVICE + "tensor_share: 1.5\n")
    assert "tensor_share is 1.5; expected above 0 and at most 1" in message(lambda: load_device(str(path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "hbm_bandwith: 3 TB/s",
            "hbm_bandwith; did you mean hbm_bandwidth? It stands in a file of kind: device",
        ),
        ("num_nics: 4", "unknown key num_nics; it stands in a file of kind: node (read as kind: cluster"),
        ("num_nics: 4", "which the file does not say: add its kind:)"),
        ("kind: cluster\nnum_nics: 4", "(read as kind: cluster)"),
    ],
)
def test_a_key_of_another_kind_of_file_is_sent_there(write: Write, text: str, expected: str) -> None:
    path = write("mine.yaml", f"extends: h100-sxm8\n{text}\n")
    assert expected in message(lambda: load_cluster(str(path)))


def test_a_file_without_a_kind_is_told_which(write: Write) -> None:
    path = write("mine.yaml", "node: h100-sxm8\n")
    assert "missing key kind; expected kind: cluster" in message(lambda: load_cluster(str(path)))
