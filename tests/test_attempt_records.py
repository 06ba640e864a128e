"""The claim of an attempt as a restore reads it: whole, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftslurm.errors import FormatError
from ftslurm.run import attempts
from ftslurm.run.attempts import AdoptedStep, Attempt, read_attempt
from ftslurm.run.layout import RunLayout

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    steps = [AdoptedStep(20, "b" * 64), AdoptedStep(10, "a" * 64)]
    attempts.claim(layout, Attempt(0, "7", 0, ["n1"], 1.0, steps))
    return layout


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=VALUES, data=st.data())
def test_a_damaged_claim_is_read_or_refused_and_never_breaks_the_reader(
    layout: RunLayout, value: Any, data: st.DataObject
) -> None:
    path = layout.attempt(1).attempt_json
    whole = path.read_bytes()
    record = json.loads(whole)
    place = data.draw(st.sampled_from(["top", "row", *sorted(record)]))
    if place == "row":
        record["adopted"][0] = value
    elif place == "top":
        record.pop(data.draw(st.sampled_from(sorted(record))))
    else:
        record[place] = value
    path.write_text(json.dumps(record))
    try:
        read_attempt(layout, 1)
    except FormatError as error:
        assert "attempt.json" in str(error)
    finally:
        path.write_bytes(whole)
