"""The README claims what the tests run, no more and no less."""

from __future__ import annotations

from support_matrix import BEGIN, END, README, rewritten


def test_the_readme_holds_todays_matrix() -> None:
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert rewritten(text) == text, "run: python tests/support_matrix.py"
