from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from overlapsim.cli.main import cli, main
from overlapsim.hardware.loading import list_profiles, load_cluster
from tests.hardware import topo_texts


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["profiles", *args])


def test_list_has_every_cluster() -> None:
    result = run("list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(list_profiles("cluster"))
    rows = {row["name"]: row for row in json.loads(run("list", "--json").output)}
    assert rows["gb200-nvl72"]["num_devices"] == 72
    assert (rows["h100-sxm8-p5"]["fabric"], rows["tpu-v5p-host4"]["fabric"]) == ("efa", None)


def test_show_has_levels_fabric_and_fits() -> None:
    text = run("show", "h100-sxm8", "--nodes", "64").output
    assert "level    spine: groups of 512, 50.0 GB/s a GPU and direction, hop 7.00 us" in text
    assert "fabric   spine_oversubscription" in text
    data = json.loads(run("show", "h100-sxm8", "--nodes", "2", "--json").output)
    assert [level["name"] for level in data["levels"]] == ["nvlink", "rail"]
    assert {"part", "name", "value", "layer", "reference", "trust"} <= set(data["values"][1])


def test_check_of_an_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: cluster\nextends: l20-pcie8\nnode: {extends: l20-pcie8, nic_bandwidth: 200 GB/s}\n")
    result = run("check", str(path))
    assert result.exit_code == 3
    assert "contradiction: nic_bandwidth of 200 GB/s a NIC is above a GPU's own link" in result.output
    assert "gap: no measured curve of all_gather" in result.output
    assert "gap: no overlap fit: " in result.output


FAST = "kind: cluster\nextends: a100-sxm8\ncurves:\n  all_reduce/2: {file: fast.csv}\n"


def test_contradictions_are_shown_where_one_looks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(FAST)
    (tmp_path / "fast.csv").write_text("size_bytes,time_s\n1e9,1e-6\n")
    with pytest.raises(SystemExit) as done:
        main(["profiles", "check", str(path)])
    assert done.value.code == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("contradiction: curve all_reduce/2: 954 MiB in 1.00 us is faster than its links")
    assert printed[-1].startswith("mine: 1 contradiction, ")
    main(["profiles", "show", str(path)])
    assert "contradiction: curve all_reduce/2: " in capsys.readouterr().out
    # Everything else refuses it.
    with pytest.raises(SystemExit) as done:
        main(["operator", "--cluster", str(path), "--ranks", "2", "--m", "4096", "--n", "4096", "--k", "4096"])
    assert done.value.code == 3
    assert "contradicts itself" in capsys.readouterr().err


def test_what_was_not_taken_over_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: cluster\nextends: h100-sxm8\nnode: {extends: h100-sxm8, nvlink_bandwidth: 225 GB/s}\n")
    why = "of h100-sxm8 not taken over: nvlink_bandwidth is 225 GB/s, not 450 GB/s"
    shown = run("show", str(path)).output
    assert len([line for line in shown.splitlines() if line.startswith("  dropped") and why in line]) == 2
    checked = run("check", str(path))
    assert checked.exit_code == 0
    assert f"gap: fit collective.nccl {why}" in checked.output
    assert checked.output.splitlines()[-1].startswith("mine: no contradictions, ")
    assert len(json.loads(run("show", str(path), "--json").output)["dropped"]) == 2


def test_seed_writes_a_profile_that_can_be_used(tmp_path: Path) -> None:
    topo, mine = tmp_path / "topo.txt", tmp_path / "mine.yaml"
    topo.write_text(topo_texts.dgx_h100())
    result = run("seed", str(topo), "--device", "h100-sxm5-80gb", "-o", str(mine))
    assert result.exit_code == 0, result.output
    assert f"{mine}: 8 x h100-sxm5-80gb, nvswitch" in result.output
    assert "note: left out as no GPU's nearest: NIC2, NIC5" in result.output
    assert load_cluster(str(mine)).node.num_nics == 8
    assert "mlx5" not in mine.read_text()
    printed = run("seed", str(topo), "--device", "h100-sxm5-80gb")
    assert printed.output == mine.read_text()


@pytest.mark.parametrize(
    ("text", "device", "output", "expected", "code"),
    [
        (topo_texts.dgx_h100()[:600], "h100-sxm5-80gb", "m.yaml", "cut off", 3),
        ("nothing of the kind", "h100-sxm5-80gb", "m.yaml", "topo.txt has no topology matrix", 3),
        (topo_texts.dgx_h100(), "h100", "m.yaml", "device 'h100' is unknown; did you mean h100-", 3),
        (topo_texts.dgx_h100(), "h100-sxm5-80gb", "m.json", "expected a name that ends in .yaml", 2),
        (topo_texts.dgx_h100(), "h100-sxm5-80gb", "no/m.yaml", "folder", 2),
    ],
)
def test_seed_refuses_in_one_line(
    tmp_path: Path, text: str, device: str, output: str, expected: str, code: int
) -> None:
    (tmp_path / "topo.txt").write_text(text)
    result = run("seed", str(tmp_path / "topo.txt"), "--device", device, "-o", str(tmp_path / output))
    assert result.exit_code == code or getattr(result.exception, "exit_code", None) == code
    assert expected in result.output + str(result.exception)
    assert not (tmp_path / output).exists()


def test_seed_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_bytes(b"\xff\xfe\x00\x01")
    result = run("seed", str(tmp_path / "topo.txt"), "--device", "l40s")
    assert "topo.txt is not UTF-8 text" in result.output + str(result.exception)
