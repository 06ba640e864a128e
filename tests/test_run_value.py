"""RUN/value.json: what is kept of a value, exactly, and when it counts."""

import enum
import json
import math

import numpy
import pytest

from ftslurm.errors import SpecError
from ftslurm.run.layout import RunLayout
from ftslurm.run.value import read_value, value_json, write_value


class Name(str, enum.Enum):
    ADAM = "adam"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0.1 + 0.2, 0.1 + 0.2),
        (5e-324, 5e-324),
        (-math.inf, -math.inf),
        ({"a": [math.inf]}, {"a": [math.inf]}),
        (numpy.float64(0.1), 0.1),
        (numpy.float32(0.1), float(numpy.float32(0.1))),
        (numpy.array([3]), 3),
        ((1, None, True, "x"), [1, None, True, "x"]),
        ({"loss": numpy.int64(3), 2: [1.5]}, {"loss": 3, "2": [1.5]}),
        (Name.ADAM, "adam"),
        (None, None),
    ],
)
def test_a_value_comes_back_bit_for_bit_once_the_run_is_done(tmp_path, value, kept):
    layout = RunLayout(tmp_path)
    write_value(layout, value)
    assert read_value(layout) is None, "a run that was asked to leave may have returned early"
    layout.done.touch()
    found = read_value(layout)
    assert found == kept and type(found) is type(kept)


def test_nan_comes_back_and_the_file_is_json_to_everybody(tmp_path):
    layout = RunLayout(tmp_path)
    write_value(layout, math.nan)
    layout.done.touch()
    assert math.isnan(read_value(layout))
    assert json.loads(value_json(layout).read_text())["value"] == {"float": "nan"}


@pytest.mark.parametrize("value", [object(), numpy.array([1, 2]), {"x": {1, 2}}])
def test_what_json_cannot_hold_is_refused_with_its_type(tmp_path, value):
    with pytest.raises(SpecError, match="is of type"):
        write_value(RunLayout(tmp_path), value)
    assert list(tmp_path.iterdir()) == []
