"""What may be asked for, and how what may not is answered."""

import dataclasses
from pathlib import Path

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.spec import RunSpec, from_dict, parse_time_s, to_dict
from ftslurm.run.spec_check import check


def with_value(key, value):
    """The default spec with one dotted key set."""
    spec = RunSpec()
    *groups, name = key.split(".")
    part = spec
    for group in groups:
        part = getattr(part, group)
    setattr(part, name, value)
    return spec


def test_the_defaults_are_in_order():
    check(RunSpec())


def test_a_spec_survives_the_way_over_json_and_unknown_keys_are_ignored():
    spec = with_value("user", {"width": 3})
    record = to_dict(spec)
    record["of_a_newer_version"] = 1
    record["cluster"]["colour"] = "red"
    assert from_dict(record) == spec


@pytest.mark.parametrize("value", [b"x", Path("/x"), (1, [2]), {3}, [{"a": (b"y",)}], None, 0.5])
def test_a_record_is_what_the_standard_library_makes_of_a_spec(value):
    spec = with_value("user", {"given": value})
    record = to_dict(spec)
    assert record == dataclasses.asdict(spec)
    record["user"]["given"] = record["cluster"]["setup"] = "another"
    assert spec.user == {"given": value} and spec.cluster.setup == []


@pytest.mark.parametrize(("key", "value", "said"), [
    ("cluster.scheduler", "pbs", "choose slurm or local"),
    ("cluster.signal", "KILL", "choose USR1 or USR2"),
    ("parallel.strategy", "zero", "choose ddp or fsdp"),
    ("optim.precision", "fp8", "choose fp32 or bf16 or fp16"),
    ("checkpoint.when_busy", "queue", "choose wait or skip"),
    ("cluster.nodes", 0, "at least 1"),
    ("checkpoint.keep_last", 0, "at least 1"),
    ("recovery.max_failures", -1, "at least 0"),
    ("recovery.max_node_faults", -1, "at least 0"),
    ("recovery.evict", "soon", "choose report or next or now"),
    ("recovery.on_nan", "ignore", "choose stop or rollback or skip"),
    ("recovery.elastic_lr", "halve", "choose keep or scale or refuse"),
    ("recovery.hang_factor", 1.0, "above 1, or 0 for never"),
    ("recovery.straggler_factor", float("nan"), "above 1"),
    ("recovery.straggler_window_steps", 0, "at least 1"),
    ("recovery.budgets", {"hangs": 2}, "has `hangs`; it takes hang"),
    ("recovery.budgets", {"preempted": 2}, "has `preempted`"),
    ("recovery.budgets", {"hang": -1}, "recovery.budgets.hang is -1"),
    ("recovery.phase_limit_s", {"saving": 5.0}, "lacks `compiling`"),
    ("recovery.on_event_url", "file:///etc/passwd", "give an http:// or https:// address"),
    ("recovery.min_nodes", 2, "from 1 to cluster.nodes (1)"),
    ("recovery.min_nodes", 0, "or null for all"),
    ("recovery.control_dir", "orders", "give an absolute path"),
    ("checkpoint.interval_s", -5.0, "at least 0"),
    ("checkpoint.emergency_deadline_s", 0.0, "null to derive it"),
    ("model.heads", 0, "at least 1"),
    ("model.heads", 5, "not a multiple"),
    ("entry", "train", "package.module:function"),
    ("cluster.time", "00:03:00", "the warn signal would come at start"),
    ("cluster.time", "tomorrow", "[DAYS-]HH:MM:SS"),
])  # fmt: skip
def test_a_value_that_cannot_be_right_is_named_with_its_key(key, value, said):
    with pytest.raises(SpecError) as caught:
        check(with_value(key, value))
    assert key in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [
    ("30:00", 1800), ("01:00:00", 3600), ("1-02:00:00", 93600), ("0-00:00:30", 30),
])  # fmt: skip
def test_a_time_limit_is_read_as_slurm_reads_it(text, seconds):
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", ["1-05:30", "90", "1:2:3:4", "01:00:00\n", "-1:00", "", "١:00"])
def test_a_time_that_slurm_reads_otherwise_is_refused(text):
    with pytest.raises(SpecError):
        parse_time_s(text)


def test_the_surface_of_a_run_is_what_it_was():
    """A key that comes or goes is a change for every user: make it on purpose."""
    fields = {item.name for item in dataclasses.fields(RunSpec)}
    assert fields == {
        "name", "runs_dir", "entry", "steps", "seed", "deterministic", "eval_interval_steps",
        "eval_batches", "log_interval_steps", "cluster", "parallel", "model", "data", "optim",
        "checkpoint", "recovery", "health", "user", "run_id", "program", "code",
    }  # fmt: skip
