"""What runs have left on record answers the checklist; what they have not is said to be unknown."""

import json
import os
import time

import pytest
from checkpoints import damage
from doctor_runs import BEGAN, OldRun, practised

from ftslurm.cli import main
from ftslurm.doctor.checklist import answers
from ftslurm.doctor.checklist_command import read_asked, render
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line
from ftslurm.doctor.mounts import Mount
from ftslurm.doctor.run_facts import (
    check_emergency_saves,
    past_runs,
    percentile,
    saves_of,
)
from ftslurm.files import write_json
from ftslurm.run.skipped import note_skip
from ftslurm.run.spec import RecoverySpec, RunSpec

PROGRAMS = ("slurm.prolog", "slurm.epilog", "slurm.health_check")


def told(runs, slurm=None, *, mount=None, run=""):
    asked = read_asked(run, runs, slurm, now=lambda: BEGAN + 9000.0)
    if mount is not None:
        asked = type(asked)(asked.runs, mount, asked.free_bytes, asked.slurm)
    found = answers(asked)
    assert [one.number for one in found] == list(range(1, 18))
    assert "\n".join(render(found, asked)).count("->") == sum(bool(one.todo) for one in found)
    return {one.number: one for one in found}


def test_where_nothing_has_run_nothing_is_claimed_and_each_answer_says_what_would_tell(tmp_path):
    found = told(tmp_path)
    assert {one.state for number, one in found.items() if number != 6} == {SKIPPED}
    assert found[6].state in (SKIPPED, FAIL)  # by the disk of this machine
    assert all(one.todo for one in found.values())
    assert all(one.at is None for one in found.values())


def test_a_run_to_which_everything_has_happened_answers_with_what_and_when(tmp_path):
    practised(tmp_path)
    good = [Line(name, OK, "ours") for name in PROGRAMS]
    good.append(Line("slurm.preempt_mode", OK, "preempted jobs are requeued"))
    found = told(tmp_path, good, mount=Mount("/home", "lustre", "mds:/home", ""))
    states = {number: one.state for number, one in found.items()}
    in_part = {number: one.state for number, one in found.items() if one.state == WARN}
    # The parts that no record can tell: copies elsewhere, gates, alerts, quality.
    assert set(in_part) == {3, 6, 9, 10, 17}, found
    assert {number for number, state in states.items() if state == SKIPPED} == {8, 15}
    assert found[2].at == BEGAN + 170 and "ended with network_transient" in found[2].seen
    assert "manifest of 2 ranks and COMMITTED agree" in found[4].seen
    assert (found[5].at, "another digest" in found[5].seen) == (BEGAN + 131, True)
    assert "saved in 4.0 s in the middle" in found[7].seen and "loaded in 1.5 s" in found[7].seen
    assert "on 2 ranks, as many as had saved; 3 such" in found[9].seen
    assert "saved by 2 ranks, restored at step 20 on 1" in found[10].seen
    assert "kept off n2" in found[12].seen and "ValueError in the loop" in found[12].seen
    assert found[13].at == BEGAN + 30, "as old as what was practised first"
    assert "4 failures in 1 run: MTTD 5.0 s" in found[14].seen
    assert "3 of 3 failed attempts" in found[14].seen
    assert "time in the queue before the first attempt 30.0 s" in found[14].seen
    # Fifteen of them on one rank or after it: their losses are held against those before.
    assert "35 steps were trained again after a restore; 35 of 35 had the same" in found[17].seen
    assert "25 of 25 the same loss" in found[17].seen


def test_a_bad_newest_step_fails_and_is_told(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.save(1, 20, 56)
    (run.layout.steps / "step-000000000020" / "shard-00001-000.bin").unlink()
    assert told(tmp_path)[4].state == FAIL


def test_damage_that_only_reading_every_byte_finds_is_not_claimed_to_be_absent(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.save(1, 20, 56)
    damage(run.layout.steps / "step-000000000020")
    assert "not every byte (`ftslurm verify RUN` does that)" in told(tmp_path)[4].seen


@pytest.mark.parametrize(
    ("more", "state", "word"),
    [
        ({"loss": 0.25}, FAIL, "0 of 5 the same loss"),
        ({"tokens": 101}, FAIL, "0 of 5 had the same samples and tokens"),
        ({}, WARN, "5 of 5 had the same samples and tokens, 5 of 5 the same loss to the last bit"),
        ({"loss": 0.25, "ranks": 1}, WARN, "5 of 5 had the same samples and tokens, no loss had"),
        ({"tokens": 101, "ranks": 1}, FAIL, "0 of 5 had the same samples and tokens"),
    ],
)
def test_steps_trained_twice_are_compared_to_the_last_bit(tmp_path, more, state, word):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.save(1, 20, 56)
    run.decide(1, 60, "unknown")
    run.attempt(100, steps=range(21, 31), restored=20, **more)
    assert (told(tmp_path)[17].state, word in told(tmp_path)[17].seen) == (state, True)


def other_losses(tmp_path, *, spec=None):
    """A run whose steps 21 to 25 have another loss and other data the second time."""
    run = OldRun(tmp_path, spec=spec)
    run.attempt(30, steps=range(1, 26))
    run.decide(1, 60, "numeric")
    run.attempt(100, steps=range(21, 31), restored=20, loss=0.25, tokens=101)
    return run


def test_a_run_that_may_differ_is_not_blamed_for_it(tmp_path):
    run = OldRun(tmp_path, spec=RunSpec(deterministic=False))
    run.attempt(30, steps=range(1, 26))
    run.attempt(100, steps=range(21, 31), restored=20, loss=0.25)
    found = told(tmp_path)[17]
    assert (found.state, "deterministic=false" in found.seen) == (WARN, True)
    assert "5 of 5 had the same samples" in found.seen


def test_steps_from_which_batches_were_passed_over_need_not_be_the_same(tmp_path):
    run = other_losses(tmp_path)
    assert told(tmp_path)[17].state == FAIL
    note_skip(run.layout, (21, 25), attempt=1)
    found = told(tmp_path)[17]
    assert (found.state, "0 of 0 had the same samples" in found.seen) == (WARN, True)


def test_steps_before_those_that_were_passed_over_do_have_to_be_the_same(tmp_path):
    run = other_losses(tmp_path)
    note_skip(run.layout, (24, 25), attempt=1)
    found = told(tmp_path)[17]
    assert (found.state, "0 of 3 had the same samples" in found.seen) == (FAIL, True)


def test_other_code_may_have_another_loss_and_not_other_data(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.attempt(100, steps=range(21, 31), restored=20, loss=0.25)
    assert told(tmp_path)[17].state == FAIL
    run.event(2, "code_changed", 101, modules=["loop"])
    found = told(tmp_path)[17]
    assert (found.state, "5 of 5 had the same samples" in found.seen) == (WARN, True)


def test_a_late_step_of_an_attempt_thought_dead_is_no_step_that_was_passed_over(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.attempt(100, steps=range(21, 31), restored=20)
    run.event(2, "rejected", 101, step=25, reason="attempt 1 published it after attempt 2 began")
    assert told(tmp_path)[5].state == SKIPPED
    run.event(2, "fell_back", 102, step=20, adopted=24, vanished=[24])
    found = told(tmp_path)[5]
    assert (found.state, "step 24: it could not be used" in found.seen) == (OK, True)


@pytest.mark.parametrize(
    ("kind", "state"),
    [("tmpfs", FAIL), ("ext4", SKIPPED), ("nfs4", WARN), ("lustre", WARN)],
)
def test_where_checkpoints_lie_is_told_and_a_second_copy_is_not_made_up(tmp_path, kind, state):
    OldRun(tmp_path)
    mount = Mount("/home", kind, "x", "")
    assert told(tmp_path, mount=mount)[6].state == state


def test_a_drill_by_signal_is_no_preemption_and_is_told_beside(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.save(1, 20, 56)
    run.decide(1, 60, "asked_to_leave", action="requeued")
    run.attempt(100, steps=range(21, 31), restored=20)
    seen = told(tmp_path)[13].seen
    assert "preemption: never on record, but run old was asked by signal to leave" in seen


def test_a_failure_after_which_nothing_trained_is_no_practice(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(30, steps=range(1, 26))
    run.decide(1, 60, "node")
    found = told(tmp_path)
    assert (found[2].state, found[13].state) == (SKIPPED, SKIPPED)
    assert "lost node: never on record" in found[13].seen


def test_metrics_count_when_their_file_is_there(tmp_path):
    runs, metrics = tmp_path / "runs", tmp_path / "metrics"
    spec = RunSpec(recovery=RecoverySpec(metrics_dir=str(metrics)))
    OldRun(runs, spec=spec)
    assert told(runs)[15].state == SKIPPED
    metrics.mkdir()
    (metrics / "old.prom").write_text("x 1\n")
    assert told(runs)[15].state == WARN
    assert abs(told(runs)[15].at - time.time()) < 60


def test_what_slurm_says_of_the_nodes_programs_is_part_of_the_answer(tmp_path):
    practised(tmp_path)
    bad = [Line(name, WARN, "none", "have the site install it") for name in PROGRAMS]
    found = told(tmp_path, bad)
    assert found[12].state == WARN
    assert "0 run ours" in found[12].seen and "have the site install it" in found[12].todo
    gang = [Line("slurm.preempt_mode", WARN, "a preempted job is suspended", "ask for REQUEUE")]
    assert told(tmp_path, gang)[11].state == WARN


def test_tasks_of_sweeps_are_among_the_runs_and_torn_ones_are_left_out(tmp_path):
    sweep = tmp_path / "sweep"
    practised(sweep)
    (sweep / "sweep.json").write_text("{}")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"run_id":')
    asked = read_asked("", tmp_path, None)
    assert [run.name for run in asked.runs] == ["old"]


def test_a_run_whose_records_are_torn_is_told_as_not_read(tmp_path):
    run = practised(tmp_path)
    run.event(1, "restored", 131, step="twenty")
    asked = read_asked("", tmp_path, None)
    assert asked.runs == []
    why = "its records cannot be read as a whole"
    assert asked.not_read == {str(run.layout.root): why}
    assert render(answers(asked), asked)[-1] == f"not read: {run.layout.root} ({why})"


@pytest.mark.parametrize(("name", "key"), [
    ("run.json", "site"), ("run.json", "spec"),
    ("attempts/0001/attempt.json", "claimed_at"), ("attempts/0002/decision.json", "first_failure"),
])  # fmt: skip
def test_a_record_with_something_else_in_it_costs_the_answers_of_no_other_run(tmp_path, name, key):
    practised(tmp_path / "good")
    file = practised(tmp_path / "bad").layout.root / name
    for folder in ("good", "bad"):
        (tmp_path / folder / "sweep.json").write_text("{}")
    file.write_text(json.dumps({**json.loads(file.read_text()), key: "x"}))
    asked = read_asked("", tmp_path, None)
    assert len(asked.runs) == len(asked.not_read) == 1
    assert f"{tmp_path}/bad/" in str(asked.not_read)


def test_a_run_json_with_something_else_in_it_is_passed_over(tmp_path):
    file = practised(tmp_path).layout.run_json
    file.write_text(json.dumps({**json.loads(file.read_text()), "emergency_deadline_s": "x"}))
    assert read_asked("", tmp_path, None).runs == []


def test_the_verb_answers_for_people_and_for_programs(tmp_path, monkeypatch, capsys):
    run = practised(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--checklist", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["answers"]) == 17 and record["runs"] == ["old"]
    eighth = record["answers"][7]
    assert (eighth["number"], eighth["state"], eighth["date"]) == (8, "unknown", "")
    assert record["answers"][3]["date"].startswith("20")
    assert main(["doctor", "--checklist", str(run.layout.root)]) == 0
    text = capsys.readouterr().out
    assert "17  after a restore" in text and "not known, by 1 run, the newest" in text
    assert main(["doctor", "--checklist", str(tmp_path / "none")]) == 1
    assert "name a run directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["doctor", "--checklist", str(tmp_path / "file")]) == 1
    assert "name a run directory" in capsys.readouterr().err
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    for name in ("file", "dangling", "file/runs"):
        assert main(["doctor", "--checklist", "--runs", str(tmp_path / name)]) == 1
        told = f"{tmp_path / name.partition('/')[0]}` is no folder that you may look into"
        assert told in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["doctor", "--checklist"]) == 1
    assert "may look into; name another with --runs" in capsys.readouterr().err


def saves(tmp_path, *seconds, deadline_s=60.0):
    run = OldRun(tmp_path, deadline_s=deadline_s)
    run.attempt(0, steps=range(1, 3))
    for number, took_s in enumerate(seconds):
        at = 1000.0 * (number + 1)
        run.event(1, "signal", at, signal="USR1", step=5)
        run.event(1, "committed", at + took_s, step=5, seconds=took_s, bytes=10)
    return check_emergency_saves(list(past_runs(tmp_path)))


def test_the_slowest_emergency_saves_are_held_against_what_there_was_for_them(tmp_path):
    line = saves(tmp_path / "a", 3.0, 5.0, 9.0)
    assert (line.state, "p99 of 3 saves" in line.seen) == (OK, True)
    assert "9.0 s (the slowest" in line.seen and "60 s or more" in line.seen
    assert saves(tmp_path / "b", 3.0, 61.0).state == WARN
    assert saves(tmp_path / "d").state == SKIPPED
    assert percentile(list(range(1, 201)), 0.99) == 198


@pytest.mark.parametrize(("left_s", "took_s", "state"), [(89.0, 80.0, OK), (9.0, 20.0, WARN)])
def test_a_save_is_held_against_the_time_that_slurm_gave_it(tmp_path, left_s, took_s, state):
    """60 s were frozen at submit; the site's settings have changed since."""
    run = OldRun(tmp_path)
    run.attempt(0, steps=range(1, 3))
    run.event(1, "signal", 1000.0, signal="SIGTERM", step=9)
    run.event(1, "deadline", 1000.5, left_s=left_s, by="preempted")
    run.event(1, "committed", 1000.0 + took_s, step=9, seconds=5.0, bytes=10)
    line = check_emergency_saves(list(past_runs(tmp_path)))
    assert line.state == state
    assert state == WARN or "there were 90 s or more for it" in line.seen, line


def test_a_periodic_save_that_was_under_way_is_not_taken_for_the_one_that_was_asked_for(tmp_path):
    run = OldRun(tmp_path)
    run.attempt(0, steps=range(1, 3))
    run.event(1, "signal", 1000.0, signal="USR1", step=9)
    run.event(1, "committed", 1001.0, step=8, seconds=30.0, bytes=10)
    run.event(1, "committed", 1007.0, step=9, seconds=5.0, bytes=10)
    assert saves_of(run.layout).emergency_s == [7.0]
    assert saves_of(run.layout).seconds == [30.0, 5.0]
    run.leave(1, 19, 2000.0, committed=18)
    run.event(1, "committed", 2001.0, step=18, seconds=30.0, bytes=10)
    found = saves_of(run.layout)
    assert (found.emergency_s, found.missed) == ([7.0], 1)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ({"step": 9, "committed_step": 0, "signal": "USR1"}, WARN),
        ({"step": 9, "committed_step": None, "signal": "USR1"}, WARN),
        ({"step": 9, "committed_step": 9, "signal": "USR1"}, SKIPPED),
        ({"step": 9, "committed_step": 0, "order": "stop"}, SKIPPED),  # it had all the time
        ({"step": 9, "committed_step": 0, "signal": "USR1", "result": "failed"}, SKIPPED),
        ({"step": 9}, SKIPPED),  # torn
    ],
)
def test_a_run_that_left_without_its_last_step_could_not_save_in_time(tmp_path, outcome, state):
    """Its journal says nothing of it."""
    run = OldRun(tmp_path)
    run.attempt(0, steps=range(1, 9))
    run.event(1, "signal", 1000.0, signal="USR1", step=9)
    write_json(
        run.layout.attempt(1).outcome_json, {"schema_version": 1, "result": "stopped", **outcome}
    )
    assert check_emergency_saves(list(past_runs(tmp_path))).state == state
