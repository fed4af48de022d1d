"""docs/options.md and options.def say the same."""

from __future__ import annotations

import pytest
from conftest import ROOT

from torch_resilient import options


def test_document_is_up_to_date() -> None:
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == options.markdown(), (
        "run `python -m torch_resilient.options --markdown > docs/options.md`"
    )


def test_document_holds_every_option() -> None:
    text = options.markdown()
    table = options.table()
    assert len(table) == text.count("\n## `")
    for option in table:
        assert f"`{option.variable}`" in text
        assert option.doc in text


def test_table_is_consistent() -> None:
    table = options.table()
    assert len({option.field for option in table}) == len(table)
    for option in table:
        assert option.variable == options.PREFIX + option.field.upper()
        if option.kind in ("Bytes", "Count", "AutoCount", "Seconds"):
            assert isinstance(option.default, int | float)
            assert option.min <= option.default <= option.max
            assert option.min < option.max
        else:
            assert option.min == option.max == 0
        if option.kind == "Seconds":
            assert option.field.endswith("_s")
        assert (option.kind == "Bytes") == option.field.endswith("_bytes")
        assert option.doc.endswith(".")


def test_secrets_have_no_default() -> None:
    secrets = [option for option in options.table() if option.kind == "Secret"]
    assert [option.default for option in secrets] == [""] * len(secrets)
    assert secrets


@pytest.mark.parametrize(
    "row", ["X(Count, a, A, 1)", "a = 1", "X(Count, a, A, f(), 0, 1, 'u', 'd')"]
)
def test_a_malformed_row_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match=r"options\.def|malformed"):
        options.parse(row)
