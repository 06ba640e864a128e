"""`ftslurm metrics`: the figures of a run, equal to those of `report` and `status`."""

import json
import re
import subprocess
import sys

import pytest
from metrics_runs import MadeRun, eventful, only, read_samples, shown
from promtool import find_promtool

from ftslurm.cli import main
from ftslurm.files import write_json
from ftslurm.metrics.families import FAMILIES, SUMMARY
from ftslurm.metrics.saves import quantile, read_saves
from ftslurm.run.acts import note_act


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return eventful(tmp_path_factory.mktemp("made"))


@pytest.fixture
def samples(made, capsys):
    return read_samples(shown(capsys, made.layout.root))


def as_json(capsys, verb, run):
    capsys.readouterr()
    main([verb, str(run.layout.root), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_those_of_the_report(made, samples, capsys):
    report = as_json(capsys, "report", made)
    (job,) = report["jobs"]
    first = job["attempts"][0]
    assert first["cause"] == "code" and first["rto_s"] and first["mttd_s"]
    assert only(samples, "rto_seconds") == first["rto_s"]
    assert only(samples, "mttd_seconds") == first["mttd_s"]
    assert only(samples, "last_failure_lost_steps") == first["steps_lost"] == 5
    assert only(samples, "last_failure_lost_tokens") == first["tokens_lost"] == 500
    assert only(samples, "lost_steps_total") == sum(one["steps_lost"] for one in job["attempts"])
    assert only(samples, "lost_tokens_total") == sum(one["tokens_lost"] for one in job["attempts"])
    assert samples["attempts_ended"] == [({"cause": "code"}, 1.0)] and job["causes"] == {"code": 1}
    assert only(samples, "attempts_total") == len(job["attempts"]) == 2
    goodput = report["fleet"]["goodput"]
    # What runs grows between the two looks.
    assert only(samples, "goodput_ratio") == pytest.approx(goodput["share"], rel=0.01)
    told = {labels["part"]: value for labels, value in samples["node_seconds"]}
    for part in ("trained", "lost", "stall", "restart", "other", "queue"):
        assert told.pop(part) == pytest.approx(goodput[f"{part}_s"], rel=0.01), part
    assert not told and goodput["trained_s"] > 0 and goodput["lost_s"] > 0


def test_the_figures_are_those_of_status(made, samples, capsys):
    status = as_json(capsys, "status", made)
    assert only(samples, "step") == status["last_step"] == 40
    assert only(samples, "steps_planned") == status["steps"] == 60
    assert only(samples, "checkpoint_last_success_step") == status["committed_step"] == 20
    assert only(samples, "lost_steps_total") == status["steps_lost"] == 5
    assert only(samples, "lost_tokens_total") == status["tokens_lost"]
    assert only(samples, "restored_step") == status["attempts"][-1]["restored_step"] == 20
    assert only(samples, "last_sign_timestamp_seconds") == status["last_sign_at"]
    assert only(samples, "tokens_per_second") == status["tokens_per_s"]


def test_saves_and_what_a_failure_would_cost(made, samples):
    assert only(samples, "checkpoint_last_success_timestamp_seconds") == pytest.approx(
        made.begun_at + 48
    )
    assert only(samples, "checkpoint_uncommitted_since_timestamp_seconds") == pytest.approx(
        made.begun_at + 77, abs=0.1
    )
    assert only(samples, "checkpoint_planned_interval_seconds") == 240.0
    assert only(samples, "checkpoint_durability_lag_seconds") == 5.0
    assert only(samples, "checkpoint_bytes") == 2000
    assert samples["checkpoint_save_seconds"] == [
        ({"tier": "shared", "quantile": q}, value)
        for q, value in (("0.5", 3.0), ("0.95", 5.0), ("0.99", 5.0))
    ]
    assert only(samples, "checkpoint_save_seconds_sum") == 8.0
    assert only(samples, "checkpoint_save_seconds_count") == 2
    assert {value for _, value in samples["checkpoint_load_seconds"]} == {4.0}
    assert only(samples, "checkpoint_queue_depth") == 1
    assert only(samples, "checkpoint_unfinished") == 2
    assert only(samples, "checkpoint_saves_failed_total") == 1
    assert only(samples, "checkpoint_saves_failed_in_a_row") == 1
    assert only(samples, "checkpoint_saves_skipped_total") == 1
    assert only(samples, "checkpoint_fallbacks_total") == 1
    assert only(samples, "checkpoint_last_fallback_timestamp_seconds") == pytest.approx(
        made.begun_at + 75
    )
    assert only(samples, "checkpoint_disk_free_bytes") > 0
    assert only(samples, "rpo_steps") == 20
    assert only(samples, "rpo_tokens") == 2000
    assert only(samples, "run_training") == 1
    assert only(samples, "down_since_timestamp_seconds") is None


def test_every_family_is_shown_by_some_run_and_none_without_its_labels(made, samples, tmp_path,
                                                                       capsys):  # fmt: skip
    down = read_samples(shown(capsys, down_run(tmp_path / "down").layout.root))
    other = read_samples(shown(capsys, differing_run(tmp_path / "other").layout.root))
    for name, family in FAMILIES.items():
        series = samples.get(name) or down.get(name) or other[name]
        extra = {"quantile"} if family.kind == SUMMARY else set()
        for labels, _ in series:
            assert set(labels) - extra <= {*family.labels}, name
    ((info, _),) = samples["run_info"]
    assert info == {"user": made.layout.root.owner(), "job_id": "12"}


def differing_run(folder):
    """Steps 21 to 25 have another loss the second time."""
    run = MadeRun(folder)
    run.attempt(0, trained_to=25)
    run.commit(1, 20, 48, seconds=5.0)
    run.decide(1, 61)
    run.attempt(70, restored=20, trained_to=40, loss=0.25)
    return run


def test_steps_trained_again_are_told_equal_from_different(made, samples, tmp_path, capsys):
    assert samples["fingerprint_steps"] == [({"state": "equal"}, 5.0), ({"state": "differ"}, 0.0)]
    assert only(samples, "fingerprint_last_differ_timestamp_seconds") is None
    run = differing_run(tmp_path)
    told = read_samples(shown(capsys, run.layout.root))
    assert told["fingerprint_steps"] == [({"state": "equal"}, 0.0), ({"state": "differ"}, 5.0)]
    assert only(told, "fingerprint_last_differ_timestamp_seconds") == run.begun_at + 70
    twice = as_json(capsys, "status", run)["twice"]
    assert (twice["losses"], twice["same_loss"], twice["differ"]) == (5, 0, 5)


def test_where_no_step_was_trained_again_there_is_no_fingerprint(tmp_path, capsys):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)
    assert "fingerprint" not in shown(capsys, run.layout.root)


def test_the_cluster_is_named_where_slurm_says_it(made, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    ((info, _),) = read_samples(shown(capsys, made.layout.root))["run_info"]
    assert info["cluster"] == "alps"


def test_a_run_has_few_series_however_long_it_is(made, samples):
    assert sum(len(series) for series in samples.values()) < 75


def test_promtool_finds_nothing_wrong(made, capsys):
    promtool = find_promtool()
    text = shown(capsys, made.layout.root)
    done = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    bad = text.replace("checkpoint_saves_failed_total", "checkpoint_saves_failed")
    done = subprocess.run([promtool, "check", "metrics"], input=bad.encode(), capture_output=True)
    assert b"_total" in done.stdout + done.stderr


def test_several_runs_are_one_text_with_each_family_once(made, tmp_path, capsys):
    other = MadeRun(tmp_path)
    write_json(other.layout.run_json, {**json.loads(other.layout.run_json.read_text()),
                                       "run_id": "r2"})  # fmt: skip
    text = shown(capsys, made.layout.root, other.layout.root)
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    assert set(re.findall(r'ftslurm_run_training\{run_id="(\w+)"\}', text)) == {"r1", "r2"}


# What is not on record is absent.


def test_a_run_that_has_not_begun_has_no_figures_of_saves_or_failures(tmp_path, capsys):
    told = read_samples(shown(capsys, MadeRun(tmp_path).layout.root))
    assert only(told, "run_waiting") == 1 and only(told, "run_active") == 0
    states = {name for name in FAMILIES if name.startswith("run_")}
    always = {"metrics_timestamp_seconds", "steps_planned", "checkpoint_planned_interval_seconds"}
    assert set(told) == states | always


def test_a_program_has_no_figures_of_what_nobody_sees(tmp_path, capsys):
    run = MadeRun(tmp_path, program=["sleep", "1"], entry="rank:ftslurm.program.rank:main")
    run.attempt(0, trained_to=0)
    run.layout.attempt(1).progress_json.unlink()
    told = read_samples(shown(capsys, run.layout.root))
    assert only(told, "attempts_total") == 1 and only(told, "run_finished") == 0
    hidden = ("checkpoint_", "rpo_", "lost_", "step", "goodput", "node_s", "run_training")
    assert not [name for name in told if name.startswith(hidden)]


def test_quantiles_are_values_that_were_measured():
    values = [float(value) for value in range(100, 0, -1)]
    assert [quantile(values, q) for q in (0.5, 0.95, 0.99)] == [50.0, 95.0, 99.0]
    assert quantile([7.0], 0.5) == quantile([7.0], 0.99) == 7.0


def test_a_save_whose_record_does_not_say_how_long_it_took_is_no_zero():
    saves = read_saves([{"kind": "committed", "at": 5.0, "step": 10}])
    assert (saves.took_s, saves.last_took_s, saves.last_bytes) == ([], None, None)
    assert (saves.committed_at, saves.committed_step) == (5.0, 10)


def test_a_commit_ends_a_row_of_failed_saves():
    failed = {"kind": "save_failed", "at": 1.0, "step": 1}
    saves = read_saves([failed, failed, {"kind": "committed", "at": 2.0, "step": 3}, failed])
    assert (saves.failed, saves.failed_in_a_row) == (3, 1)


# Where it stands.


def down_run(folder):
    """Failed at 55 s, and again before it trained a step; about to try once more."""
    run = MadeRun(folder)
    run.attempt(0, trained_to=25)
    run.commit(1, 20, 48, seconds=5.0)
    run.decide(1, 61)
    run.attempt(70, restored=20, trained_to=20)
    run.decide(2, 80)
    run.attempt(90, trained_to=0, stopped_at=3599)
    return run


def test_a_run_is_down_since_the_first_failure_after_its_last_new_step(tmp_path, capsys):
    run = down_run(tmp_path)
    told = read_samples(shown(capsys, run.layout.root))
    assert only(told, "down_since_timestamp_seconds") == pytest.approx(run.begun_at + 55)
    assert (only(told, "run_active"), only(told, "run_training")) == (1, 0)
    assert only(told, "checkpoint_uncommitted_since_timestamp_seconds") is None
    assert only(told, "rpo_steps") is None


@pytest.mark.parametrize(
    ("action", "state"),
    [("stop", "run_needs_person"), ("requeued", "run_waiting"), ("paused", "run_waiting"),
     ("ended", None)],
)  # fmt: skip
def test_the_last_decision_is_where_the_run_stands(tmp_path, capsys, action, state):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)
    run.decide(1, 60, action=action)
    told = read_samples(shown(capsys, run.layout.root))
    on = {name for name in FAMILIES if name.startswith("run_") and only(told, name) == 1}
    assert on == {"run_info", state} - {None}


def test_what_is_done_or_cancelled_needs_nobody(tmp_path, capsys):
    run = MadeRun(tmp_path)
    run.attempt(0, trained_to=25)
    run.decide(1, 60, action="stop")
    note_act(run.layout, "cancel", "cancelled", "7")
    told = read_samples(shown(capsys, run.layout.root))
    assert only(told, "run_needs_person") == 0
    write_json(run.layout.done, {"schema_version": 1})
    told = read_samples(shown(capsys, run.layout.root))
    assert (only(told, "run_finished"), only(told, "run_needs_person")) == (1, 0)


def test_without_prometheus_client_it_says_what_to_install(made, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["metrics", str(made.layout.root)]) == 1
    assert "pip install prometheus-client" in capsys.readouterr().err


def test_a_run_is_named_by_its_id_under_runs_too(made, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    made.layout.root.rename(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["metrics", "mine"]) == 0
    assert "ftslurm_run_info" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["metrics", str(tmp_path)]) == 1
    assert "run.json" in capsys.readouterr().err
