"""Figure 16 of MegaScale-MoE and FLUX's layers: what is asserted of their predictions."""

from __future__ import annotations

from functools import cache

import pytest

from overlapsim.accuracy.moe_kernels import FINDINGS, KERNELS, comm_sms_choices, predict_row, rows
from overlapsim.accuracy.value_file import parse_figures
from overlapsim.errors import CalibrationError

GIVEN = ("M2", "M4")


@cache
def _rows():
    return {row.id: row for row in rows()[0]}


def _row(model: str, kernel: str, variant: str = "fused"):
    return _rows()[f"fig16|model={model}|kernel={kernel}|variant={variant}|metric=time"]


@pytest.mark.parametrize("model", GIVEN)
def test_fused_kernels_of_a_layer_take_what_figure_16_says(model) -> None:
    total = _row(model, "sum")
    assert abs(total.error) < 0.20 and total.low <= total.measured <= total.high
    parts = [_row(model, kernel) for kernel in KERNELS]
    assert sum(row.predicted for row in parts) == pytest.approx(total.predicted)
    for row in parts[2:]:
        assert abs(row.error) < 0.20, row


@pytest.mark.parametrize("model", GIVEN)
def test_every_fused_kernel_is_faster_than_its_unfused_one(model) -> None:
    for kernel in (*KERNELS, "sum"):
        fused, unfused = (_row(model, kernel, how) for how in ("fused", "unfused"))
        assert fused.measured < unfused.measured and fused.predicted < unfused.predicted


def test_most_of_flux_layers_are_inside_their_range() -> None:
    flux = [row for row in _rows().values() if row.group == "flux-moe"]
    assert len(flux) == 16 and all(abs(row.error) < 0.31 for row in flux)
    assert sum(row.low <= row.measured <= row.high for row in flux) >= 9


def test_fewer_ranks_for_an_expert_want_more_communicating_sms() -> None:
    choices = {(c.m, c.tp): c for c in comm_sms_choices()}
    assert choices[16384, 4].chosen > choices[16384, 8].chosen
    # COMET gives fewer SMs than the model would; its own choice for split experts costs next to nothing here.
    assert choices[16384, 4].cost < 1.05 and all(1 <= choice.cost < 1.5 for choice in choices.values())


def test_other_models_are_predicted_and_wrong_rows_are_refused() -> None:
    header = "id,value,unit\n"
    for model in ("M1", "M6"):
        times = []
        for variant in ("fused", "unfused"):
            text = f"{header}fig16|model={model}|kernel=sum|variant={variant}|metric=time,,ms"
            found = predict_row(parse_figures(text, "asked")[0])
            assert 0 < found.low <= found.value <= found.high
            times.append(found.value)
        assert times[0] < times[1], model
    (row,) = parse_figures(f"{header}fig16|model=M9|kernel=sum|variant=fused|metric=time,,ms", "asked")
    with pytest.raises(CalibrationError, match="model is 'M9'"):
        predict_row(row)


def test_what_was_assumed_is_said() -> None:
    assert {finding.code for finding in FINDINGS} >= {"fig16_tokens_assumed", "fig16_unfused_assumed"}
    assert all(row.fitted is None for row in _rows().values())
