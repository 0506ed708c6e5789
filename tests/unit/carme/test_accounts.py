"""The names that accounts may have."""

import pytest

from carme.accounts import is_account_name


@pytest.mark.parametrize(
    "name", ["ada", "_apt", "anna.maria", "x@lab.org", "Anna", "a-b_c", "a+b", "7days", "1.5", "a" * 64]
)
def test_names_that_unix_and_slurm_take_are_accepted(name: str) -> None:
    assert is_account_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *[
            "",
            "1000",
            "-rf",
            ".ssh",
            "..",
            "@lab",
            "+a",
            "a b",
            "a/b",
            "a:b",
            "a,b",
            "a\\b",
            "a%41",
            "a'b",
            "ada\n",
        ],
        *["\u00e4nna", "\u0661\u0662", "a" * 65, "ada\0"],
    ],
)
def test_names_with_another_meaning_to_a_program_are_refused(name: str) -> None:
    assert not is_account_name(name)
