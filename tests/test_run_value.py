"""RUN/value.json: what is kept of a value, exactly, and when it counts."""

import enum
import json
import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf

from ftslurm.errors import FormatError, SpecError
from ftslurm.run.layout import RunLayout
from ftslurm.run.value import plain, read_value, value_json, write_value


class Name(str, enum.Enum):
    ADAM = "adam"


class Breaks:
    """Whatever is asked of it."""

    def __getattr__(self, name):
        raise OSError("no such\ndevice")


class BadMap(dict):
    def items(self):
        raise ZeroDivisionError


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
        ({Name.ADAM: 1, numpy.int64(2): 3, None: 4}, {"adam": 1, "2": 3, "None": 4}),
        ({"float": "fp16"}, {"float": "fp16"}),
        ({"float": "nan"}, {"float": "nan"}),
        ({"map": {"float": "nan"}}, {"map": {"float": "nan"}}),
        ({"map": 3}, {"map": 3}),
        ([{"map": {"map": {}}}, math.inf], [{"map": {"map": {}}}, math.inf]),
        (2**4000, 2**4000),
        ("a\ud800", "a\ud800"),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (torch.tensor(3), 3),
        (numpy.bool_(True), True),
        (OmegaConf.create({"a": [1]})["a"][0], 1),
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


ENDLESS = []
ENDLESS.append(ENDLESS)
DEEP = []
for _ in range(2000):
    DEEP = [DEEP]
MANY = [1]
for _ in range(60):
    MANY = [MANY, MANY]


REFUSED = [
    (object(), "of type object"),
    (numpy.array([1, 2]), "of type ndarray"),
    ({"x": {1, 2}}, "of type set"),
    (torch.zeros(2), "of type Tensor"),
    (torch.zeros(1, device="meta"), "of type Tensor"),
    (numpy.longdouble(1), "of type longdouble"),
    (numpy.datetime64("2026-01-01"), "of type date"),
    (1j, "of type complex"),
    (b"x", "of type bytes"),
    (10**5000, "16610 bits"),
    ({10**5000: 1}, "16610 bits"),
    (ENDLESS, "more than 100 deep"),
    (DEEP, "more than 100 deep"),
    (MANY, "more than 100 deep|more than 100,000 values"),
    ([0] * 100_001, "more than 100,000 values"),
    ({1: "a", "1": "b"}, "two keys"),
    ({(1, 2): "a"}, "key of type tuple"),
    ({"\ud800\udc00": 1}, "surrogates"),
    (OmegaConf.create({"a": "???"}), "raises MissingMandatoryValue"),
    (BadMap(), "raises ZeroDivisionError"),
    (Breaks(), "raises OSError"),
]


@pytest.mark.parametrize(("value", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_json_cannot_hold_is_refused_in_a_sentence(tmp_path, value, named):
    with pytest.raises(SpecError, match=named) as refused:
        write_value(RunLayout(tmp_path), value)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 300 and said.isascii()
    assert list(tmp_path.iterdir()) == []


ANY_TEXT = some.text(some.characters(exclude_categories=()), max_size=5)
KEYS = some.sampled_from(["float", "map", "nan"]) | ANY_TEXT
LEAVES = (
    some.none() | some.booleans() | some.integers() | some.floats() | KEYS
    | some.integers(14_000, 17_000).map(lambda bits: -(2**bits))
)  # fmt: skip
VALUES = some.recursive(
    LEAVES, lambda inner: some.lists(inner) | some.dictionaries(KEYS, inner), max_leaves=12
)


def same(value):
    """Equal where the values are, NaN included."""
    if isinstance(value, dict):
        return {name: same(item) for name, item in value.items()}
    if isinstance(value, list):
        return [same(item) for item in value]
    return (type(value), repr(value))


@given(value=VALUES)
@settings(deadline=None)
def test_any_value_comes_back_as_it_was_or_is_refused(tmp_path_factory, value):
    layout = RunLayout(tmp_path_factory.mktemp("run"))
    layout.done.touch()
    try:
        write_value(layout, value)
    except SpecError:
        assert not value_json(layout).exists()
        assert "bits" in _refusal(value) or "surrogates" in _refusal(value)
        return
    assert same(read_value(layout)) == same(value)
    json.loads(value_json(layout).read_text(), parse_constant=pytest.fail)


def _refusal(value):
    with pytest.raises(SpecError) as refused:
        plain(value)
    return str(refused.value)


@pytest.mark.parametrize(
    "kept", [{"float": "fp16"}, {"float": 1}, {"map": [1]}, {"float": ["nan"]}]
)
def test_a_map_that_was_kept_before_maps_were_told_from_numbers_is_itself(tmp_path, kept):
    layout = RunLayout(tmp_path)
    layout.done.touch()
    value_json(layout).write_text(json.dumps({"schema_version": 1, "value": kept}))
    assert read_value(layout) == kept


def test_a_file_without_a_value_is_named(tmp_path):
    layout = RunLayout(tmp_path)
    layout.done.touch()
    value_json(layout).write_text('{"schema_version": 1}')
    with pytest.raises(FormatError, match=r"value\.json` has no key `value`"):
        read_value(layout)
