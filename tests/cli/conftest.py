"""Commands are tested at their own width, whatever the terminal the tests run in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
