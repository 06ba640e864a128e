"""Outputs of real Slurm commands become values; what is odd about them is kept from misleading."""

import time
from pathlib import Path

import pytest

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import STATE_WORDS, JobState, NodeNeed, Site
from ftslurm.scheduler.slurm_parse import (
    parse_end_time,
    parse_job,
    parse_serving,
    parse_site,
    parse_version,
)

RECORDED = Path(__file__).resolve().parent / "data"
DATA = RECORDED / "slurm-22.05"
CONFIG = (DATA / "config.txt").read_text()
PARTITIONS = (DATA / "partitions.txt").read_text()


def config(**changes):
    """The recorded `scontrol show config` with other values."""
    lines = []
    for line in CONFIG.splitlines():
        key = line.partition("=")[0].strip()
        lines.append(f"{key} = {changes.pop(key)}" if key in changes else line)
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in changes.items())])


@pytest.mark.parametrize(("text", "version"), [
    ("slurm 23.11.8", (23, 11, 8)),
    ("slurm-wlm 22.05.8\n", (22, 5, 8)),
    ("22.05.7-Atos.1.1", (22, 5, 7)),
    ("slurm 24.11.5-1~bpo", (24, 11, 5)),
    ("slurm 26.05", (26, 5, 0)),
    ("slurm 25.11.0-0rc1", (25, 11, 0)),
])  # fmt: skip
def test_a_version_is_read_whatever_a_vendor_adds(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "command not found", "version 5"])
def test_a_text_without_a_version_is_refused(text):
    with pytest.raises(SchedulerError, match="no Slurm version"):
        parse_version(text)


@pytest.mark.parametrize(("folder", "version", "changed", "cluster"), [
    ("slurm-22.05", "22.05.8", False, "ftslurm"),
    ("slurm-24.11", "24.11.5", False, "ftslurm180"),
    # Recorded with send_user_signal and enable_expedited_requeue.
    ("slurm-26.05", "26.05.5", True, "ftslurm118"),
])  # fmt: skip
def test_the_recorded_site_is_read(folder, version, changed, cluster):
    data = RECORDED / folder
    site = parse_site((data / "config.txt").read_text(), (data / "partitions.txt").read_text())
    assert site == Site(
        scheduler="slurm",
        version=version,
        kill_wait_s=5,
        job_requeue=True,
        send_user_signal=changed,
        expedited_requeue=changed,
        default_partition="low",
        grace_s={"low": 15, "high": 0},
        preempt_mode={"low": "REQUEUE", "high": "OFF"},
        max_time_s={"low": None, "high": None},
        cluster=cluster,
        array_size=1001,
    )


@pytest.mark.parametrize(("version", "place", "word", "sends"), [
    ("22.05.8", "SlurmctldParameters", "preempt_send_user_signal", True),
    ("22.05.8", "PreemptParameters", "send_user_signal", False),
    ("22.05.8", "SchedulerParameters", "preempt_send_user_signal", False),
    ("23.02.1", "PreemptParameters", "send_user_signal", True),
    ("24.11.5", "PreemptParameters", "send_user_signal", True),
    ("24.11.5", "SlurmctldParameters", "preempt_send_user_signal", False),
])  # fmt: skip
def test_the_user_signal_counts_only_in_the_spelling_of_its_version(version, place, word, sends):
    changes = {"SLURM_VERSION": version, place: f"one,{word},two=3"}
    site = parse_site(config(**changes), PARTITIONS)
    assert site.send_user_signal is sends
    ignored = [text for text in site.findings if "accepted and ignored" in text]
    assert len(ignored) == (0 if sends else 1)
    assert all(f"{place}={word}" in text for text in ignored)


def test_settings_that_work_against_a_run_are_findings():
    site = parse_site(config(JobRequeue="0", RequeueExit="1,140-141"), PARTITIONS)
    assert site.requeue_exit == [1, 140, 141]
    assert not site.job_requeue
    assert len(site.findings) == 2


def test_a_partitions_limits_are_seconds():
    text = PARTITIONS.replace("MaxTime=UNLIMITED", "MaxTime=2-12:30:00", 1)
    assert parse_site(CONFIG, text).max_time_s == {"low": 217800, "high": None}


def test_a_site_survives_the_way_through_run_json():
    site = parse_site(CONFIG, PARTITIONS)
    assert Site.from_dict({**site.to_dict(), "later": 1}) == site


def test_what_is_no_slurm_output_is_refused():
    with pytest.raises(SchedulerError, match="SLURM_VERSION"):
        parse_site("command not found", "")


@pytest.mark.parametrize(("line", "state", "what"), [
    ("RUNNING|None|NONE", JobState("RUNNING"), "is_running"),
    ("COMPLETING|None|NONE", JobState("COMPLETING"), "is_ending"),
    ("PENDING|BeginTime|NONE", JobState("PENDING", "BeginTime"), "is_waiting"),
    ("PENDING|JobHeldUser|N/A", JobState("PENDING", "JobHeldUser"), "is_held"),
    ("PENDING|launch failed requeued held|N/A",
     JobState("PENDING", "launch failed requeued held"), "is_held"),
    ("REQUEUE_HOLD|launch failure limit exceeded requeued held|N/A",
     JobState("REQUEUE_HOLD", "launch failure limit exceeded requeued held"), "is_held"),
    ("FAILED|NonZeroExitCode|2026-11-29T15:16:38", JobState("FAILED", "NonZeroExitCode"),
     "is_ended"),
    ("TIMEOUT|TimeLimit|2026-11-29T15:16:38", JobState("TIMEOUT", "TimeLimit"), "is_ended"),
])  # fmt: skip
def test_a_recorded_line_is_a_state(line, state, what):
    assert parse_job(f"{line}\n") == state
    assert getattr(state, what)


def test_a_word_that_a_newer_slurm_invented_is_unknown_and_no_end():
    state = parse_job("DREAMING|None|NONE\n")
    assert not state.is_known and not state.is_ended and "DREAMING" in state.reason
    assert not parse_job("").is_known


def test_each_word_is_in_one_class():
    for word in STATE_WORDS:
        state = JobState(word)
        classes = [state.is_waiting, state.is_running, state.is_ending, state.is_ended]
        assert sum(classes) == 1, word


def test_an_end_time_is_utc_seconds_and_absent_without_a_limit():
    end = parse_end_time("RUNNING|None|2026-11-29T15:16:38\n")
    assert time.localtime(end)[:6] == (2026, 11, 29, 15, 16, 38)
    for line in ("RUNNING|None|NONE", "PENDING|JobHeldUser|N/A", ""):
        assert parse_end_time(line) is None


@pytest.mark.parametrize(("features", "serving"), [
    ("", ["n1", "n2", "n3", "n4", "n12"]),
    ("h100", ["n1", "n2", "n12"]),
    ("h100&ib", ["n2"]),
    ("[a*2&b*1]", ["n1", "n2", "n3", "n4", "n12"]),
])  # fmt: skip
def test_nodes_that_no_job_comes_to_do_not_count_as_serving(features, serving):
    text = """n1|idle|h100|gpu:h100:8(S:0-1)|515000
n1|idle|h100|gpu:8,nic:2|515000
n2|mixed|ib,h100|gpu:8,nic:2|515000
n3|allocated+|(null)|(null)|64000
n4|idle~|(null)|(null)|64000
n5|down*|h100|gpu:8,nic:2|515000
n6|idle*|h100|gpu:8,nic:2|515000
n7|drained|h100|gpu:8,nic:2|515000
n8|draining|h100|gpu:8,nic:2|515000
n9|maint|h100|gpu:8,nic:2|515000
n10|allocated$|h100|gpu:8,nic:2|515000
n11|down|h100|gpu:8,nic:2|515000
n12|completing|h100|gpu:8,nic:2|515000
"""
    assert parse_serving(text, NodeNeed(features)) == serving


@pytest.mark.parametrize(("need", "serving"), [
    (NodeNeed(gpus=4), ["n1", "n2", "n3", "n4"]),
    (NodeNeed(gpus=8), ["n1", "n2"]),
    (NodeNeed(gpus=9), []),
    (NodeNeed(memory="500G"), ["n2", "n4", "n6"]),
    (NodeNeed(memory="257000M"), ["n1", "n2", "n4", "n6"]),
    (NodeNeed(memory="1T"), ["n6"]),
    (NodeNeed(memory="0"), ["n1", "n2", "n3", "n4", "n5", "n6"]),
    (NodeNeed("b", 4, "100G"), ["n4"]),
])  # fmt: skip
def test_a_node_serves_that_has_the_gpus_and_the_memory(need, serving):
    text = """n1|idle|a|gpu:h100:8(S:0-1)|257000
n2|idle|a|gpu:a100:4(S:0),gpu:h100:4(S:1),nic:2|515000
n3|idle|a|nic:9,gpu:4|64000
n4|idle|a,b|gpu:tesla_v100:no_consume:4|515000
n5|idle|a|shard:16|64000
n6|idle|a|(null)|1048576
"""
    assert parse_serving(text, need) == serving


@pytest.mark.parametrize(("gres", "gpus"), [
    ("gpu:1g.10gb:7", 7), ("gpu:2g.20gb:4(S:0-1)", 4), ("gpu:4090:8(S:0,1)", 8),
    ("gpu:a100:2(S:0),gpu:1g.5gb:14(S:1),nic:2", 16),
])  # fmt: skip
def test_the_type_of_a_gpu_may_begin_with_a_number(gres, gpus):
    text = f"n1|idle|a|{gres}|257000\n"
    assert parse_serving(text, NodeNeed(gpus=gpus)) == ["n1"]
    assert parse_serving(text, NodeNeed(gpus=gpus + 1)) == []
