"""When nodes are tried before an attempt, and what follows from a node that is named."""

import json

import pytest
from fakes.recovering import FakeScheduler, make_layout

from ftslurm.diagnosis.launcher_lines import launcher_lines
from ftslurm.errors import PREFLIGHT_NAMED
from ftslurm.files import read_json, write_json
from ftslurm.health.settings import HealthSettings
from ftslurm.recovery.claim import claim_attempt
from ftslurm.recovery.recover import recover
from ftslurm.recovery.suspicion import MOST_NAMED, ask_for_preflight, why_preflight
from ftslurm.run.attempts import Attempt, claim, read_attempt
from ftslurm.run.spec import ClusterSpec, RecoverySpec
from ftslurm.scheduler.launch import preflight_argv, ranks_argv

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}


UNEXPLAINED = [
    {"cause": "unknown", "action": "restart"},
    {"cause": "unknown", "action": "requeued"},
    {"cause": "failed", "action": "restart"},
]


def why(mode="on_suspicion", *, older=None, standby=False, strangers=(), named=0, **last):
    return why_preflight(
        mode, last, older=older or {}, standby=standby, strangers=strangers, named_in_a_row=named
    )


@pytest.mark.parametrize(
    "cause", ["gpu", "node", "straggler", "hang", "numeric", "network_transient"]
)
def test_an_end_that_may_be_a_nodes_doing_raises_suspicion(cause):
    assert cause in why(cause=cause, action="restart")
    assert cause in why(cause=cause, action="restart", standby=True)
    assert not why("never", cause=cause)


@pytest.mark.parametrize(
    "cause", ["code", "data", "oom_gpu", "preempted", "time_limit", "asked_to_leave", "storage", ""]
)
def test_other_ends_raise_none(cause):
    assert not why(cause=cause, action="restart")
    assert "always" in why("always", cause=cause)


@pytest.mark.parametrize("last", UNEXPLAINED)
def test_the_second_death_in_a_row_that_nobody_explains_is_suspicious(last):
    assert not why(**last)
    assert not why(**last, older={"cause": "code", "action": "restart"})
    for older in UNEXPLAINED:
        assert "the last two attempts" in why(**last, older=older)
        assert not why(**last, older=older, standby=True)


def test_a_save_that_was_too_slow_is_not_a_death_that_nobody_explains():
    too_slow = {"cause": "failed", "action": "requeued"}
    assert not why(**too_slow, older=UNEXPLAINED[0])
    assert not why(**UNEXPLAINED[0], older=too_slow)


def test_a_node_that_was_given_up_ends_the_suspicion_unless_another_came_from_outside():
    assert not why(cause="hang", exclude=["n3"])
    assert why(cause="hang", exclude=["n3"], strangers=["n9"]) == (
        "n3 was given up, and n9 came in its place"
    )
    assert not why(cause="preempted", strangers=["n9"])


@pytest.mark.parametrize("mode", ["on_suspicion", "always"])
def test_after_two_attempts_that_ended_there_the_ranks_start(mode):
    assert why(mode, cause="node", named=MOST_NAMED - 1)
    assert not why(mode, cause="node", named=MOST_NAMED)


def add_attempt(layout, nodes, *, spares=(), bad=None):
    numbered = claim(layout, Attempt(0, "12", 0, nodes, 1.0, [], spares=list(spares)))
    if bad is not None:
        path = layout.attempt(numbered.number).preflight_json
        write_json(path, {"schema_version": 1, "at": 5.0, "word": "named", "bad": bad})
    return numbered


def test_who_is_new_and_what_was_named_before_is_read_from_the_run(tmp_path):
    layout = make_layout(tmp_path)

    def ask(attempt, mode="on_suspicion"):
        last = {"cause": "node", "exclude": ["n2"]}
        return ask_for_preflight(layout, attempt, last, mode=mode, standby=False)

    add_attempt(layout, ["n1", "n2"], spares=["n3"], bad={})
    assert not ask(add_attempt(layout, ["n1", "n3"]))
    assert "n4" in ask(add_attempt(layout, ["n1", "n4"], bad={"n4": "it is slow"}))
    add_attempt(layout, ["n1", "n5"], bad={"n5": "it is slow"})
    assert not ask(add_attempt(layout, ["n1", "n6"]), mode="always")


def slurm_layout(tmp_path, mode, **spec):
    layout = make_layout(tmp_path)
    record = json.loads(layout.run_json.read_text())
    record["scheduler"] = "slurm"
    record["spec"]["health"]["preflight"] = mode
    record["spec"].update(spec)
    write_json(layout.run_json, record)
    return layout


@pytest.fixture
def no_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_it_is_placed_as_the_ranks_would_be_and_one_that_ends_ends_no_other(tmp_path):
    cluster = ClusterSpec(nodes=2, tasks_per_node=8, gpus_per_task=1, srun=["--x"], spares=1)
    ranks = ranks_argv(cluster, RecoverySpec(), python="p", run_dir=tmp_path)
    tried = preflight_argv(cluster, RecoverySpec(), HealthSettings(), run_dir=tmp_path)
    own = ["--kill-on-bad-exit=0", "--wait=0"]
    theirs = ["--kill-on-bad-exit=1", "--wait=0", "--output=@LOGS@/rank-%t.log"]
    assert [word for word in tried if word not in own] == [
        word for word in ranks if word not in theirs
    ]
    assert set(own) <= set(tried)
    never = HealthSettings(preflight="never")
    assert not preflight_argv(cluster, RecoverySpec(), never, run_dir=tmp_path)
    here = ClusterSpec(scheduler="local")
    assert not preflight_argv(here, RecoverySpec(), HealthSettings(), run_dir=tmp_path)


@pytest.mark.parametrize("mode, word", [("always", ["preflight"]), ("on_suspicion", [])])
def test_a_claim_asks_for_it_by_its_last_word(tmp_path, no_slurm, mode, word):
    layout = slurm_layout(tmp_path, mode)
    assert claim_attempt(layout, JOB).split()[7:] == word


def decided(layout, number, cause):
    decision = {"schema_version": 1, "action": "restart", "cause": cause, "reason": "so it was"}
    write_json(layout.attempt(number).decision_json, decision)


def test_a_claim_after_a_hang_asks_for_it_and_says_why(tmp_path, no_slurm, capsys):
    layout = slurm_layout(tmp_path, "on_suspicion")
    claim_attempt(layout, JOB)
    decided(layout, 1, "hang")
    assert claim_attempt(layout, JOB).split()[7:] == ["preflight"]
    assert "preflight of attempt 2, as the last attempt ended of hang" in capsys.readouterr().err


def test_a_claim_asks_for_it_at_the_second_end_that_nobody_explains(tmp_path, no_slurm):
    layout = slurm_layout(tmp_path, "on_suspicion")
    asked = []
    for number in (1, 2, 3):
        asked.append(claim_attempt(layout, JOB).split()[7:])
        decided(layout, number, "unknown")
    assert asked == [[], [], ["preflight"]]


@pytest.mark.parametrize("mode, word", [("always", ["preflight"]), ("on_suspicion", [])])
def test_a_program_has_one_only_where_it_is_asked_for(tmp_path, no_slurm, mode, word):
    layout = slurm_layout(tmp_path, mode, program=["torchrun", "train.py"])
    claim_attempt(layout, JOB)
    decided(layout, 1, "hang")
    assert claim_attempt(layout, JOB).split()[7:] == word


def test_without_agents_what_srun_says_after_a_preflight_is_still_heard(tmp_path, no_slurm, capsys):
    """All of it is in the batch script's own log then."""
    layout = slurm_layout(tmp_path, "on_suspicion")
    claim_attempt(layout, JOB)
    decided(layout, 1, "hang")
    capsys.readouterr()
    claim_attempt(layout, JOB)
    lost = "srun: error: Node failure on n2"
    said = f"ftslurm: attempt 1: so it was\n{capsys.readouterr().err}{lost}\n"
    layout.submit.mkdir(parents=True, exist_ok=True)
    (layout.submit / "12.out").write_text(said)
    _, lines = launcher_lines(layout, 2, read_attempt(layout, 2))
    assert "preflight" in said and lost in [text for _, text, _ in lines]


def test_a_named_node_is_a_fault_of_that_node_and_all_of_them_are_kept_out(tmp_path):
    layout = make_layout(tmp_path)
    bad = {"n1": "it takes 400 ms at best", "n2": "rank 3 on it read 1 words of memory"}
    add_attempt(layout, ["n1", "n2"], bad=bad)
    decision = recover(layout, FakeScheduler(), JOB, attempt=1, rc=PREFLIGHT_NAMED, term=False)
    # No others are in this allocation.
    assert (decision.action, decision.cause) == ("requeued", "node"), decision.reason
    assert set(decision.exclude) == {"n1", "n2"} and not decision.is_failure
    told = read_json(layout.attempt(1).decision_json)["reason"]
    assert "it takes 400 ms at best" in told and "read 1 words of memory" in told
