"""Names in a run directory: each step has one, and each name is of one step."""

import pytest

from ftslurm.run.layout import parse_step_name, parse_temporary_name, step_name, temporary_name


@pytest.mark.parametrize("step", [0, 7, 10**12 - 1, 10**12, 10**15])
def test_a_step_of_any_size_is_found_under_its_name(step: int) -> None:
    assert parse_step_name(step_name(step)) == step
    assert parse_temporary_name(temporary_name(step, 3)) == (step, 3)
    assert parse_temporary_name(temporary_name(step, 10_000)) == (step, 10_000)


@pytest.mark.parametrize(
    "name",
    ["step-7", "step-0000000000007", "step-000000000007\n", "step-00000000000\u0667", "step-"],
)
def test_a_name_that_we_do_not_give_is_no_step(name: str) -> None:
    assert parse_step_name(name) is None
    assert parse_temporary_name(f"{name}.tmp-0001") is None
