"""The alert rules fire and stay silent as promtool's unit tests say, and each test can fail."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from promtool import find_promtool

from ftslurm.metrics.families import FAMILIES, PREFIX, TIER

RULES = Path(__file__).resolve().parent.parent / "slurm" / "site" / "alerts.yml"
FRESH, STUCK = "0+60x200", "0x150"
"""Time stamps of a file that is written each minute, and of one that was written once."""
HOLDS = {"run_active": "1x150", "run_training": "1x150"}


def node(name="n1", *, read_at=FRESH, parts=(), states=(), **series):
    """What is read of a run on one node; `parts`: of its node_seconds; `states`: steps trained
    again that were equal, and that were not."""
    told = {"metrics_timestamp_seconds": read_at, "run_info": "1x150", **HOLDS, **series}
    rows = [(family, values, {}) for family, values in told.items()]
    rows += [("node_seconds", values, {"part": part}) for part, values in dict(parts).items()]
    rows += [
        ("fingerprint_steps", f"{steps}x150", {"state": state})
        for state, steps in zip(("equal", "differ"), states)
    ]
    return [
        {"series": f"{PREFIX}{family}{{{_labels(family, name, more)}}}", "values": values}
        for family, values, more in rows
    ]


def _labels(family, name, more):
    labels = {"run_id": "r", "instance": name, "job": "node", **more}
    if FAMILIES[family].labels == TIER:
        labels["tier"] = "shared"
    if family == "run_info":
        labels |= {"user": "ada", "job_id": "7"}
    return ",".join(f'{key}="{value}"' for key, value in labels.items())


SINCE, PLANNED = (
    "checkpoint_uncommitted_since_timestamp_seconds",
    "checkpoint_planned_interval_seconds",
)
LAG, FELL_BACK = (
    "checkpoint_durability_lag_seconds",
    "checkpoint_last_fallback_timestamp_seconds",
)
FREE, FAILED_AT = "checkpoint_disk_free_bytes", "last_failure_timestamp_seconds"
RECOVERED_AT, DOWN_AT = "last_recovery_timestamp_seconds", "down_since_timestamp_seconds"
DIFFERED = "fingerprint_last_differ_timestamp_seconds"
OFF, ON = "0x150", "1x150"
OFTEN = "1 1 1 0 " * 40
"""It trains for three minutes, and a minute passes until it does again."""
POOR = {"trained": "0+40x180", "restart": "0+20x180", "queue": "0+60x180"}
GOOD = {"trained": "0+57x180", "restart": "0+3x180", "queue": "0+60x180"}

# Alert -> what is read, and by minute whether it fires; as near to its numbers as minutes are.
CASES = {
    "FtslurmNoCommit": [
        (node(**{SINCE: "0x150", PLANNED: "100x150"}), {3: False, 4: True}),
        (node(**{SINCE: "0+60x150", PLANNED: "100x150"}), {15: False}),
        (node(**{PLANNED: "100x150"}), {15: False}),  # it does not train
        (node(read_at=STUCK, **{SINCE: "-300x150", PLANNED: "100x150"}), {9: True, 11: False}),
        (  # the file is a minute old each time, and what it tells of was 20 s old then
            node(read_at="-60+60x150", **{SINCE: "-80+60x150", PLANNED: "25x150"}),
            {5: False, 15: False},
        ),
        (node(read_at="-60+60x150", **{SINCE: "-80x150", PLANNED: "25x150"}), {0: False, 1: True}),
        (  # the node of an earlier job has an old file
            node("n0", read_at=STUCK, **{SINCE: "0x150", PLANNED: "100x150"})
            + node("n1", **{SINCE: "0+60x150", PLANNED: "100x150"}),
            {5: False},
        ),
        (  # one file, read by two nodes, is one alert
            node("n0", **{SINCE: "0x150", PLANNED: "100x150"})
            + node("n1", **{SINCE: "0x150", PLANNED: "100x150"}),
            {5: True},
        ),
    ],
    "FtslurmRpoBeyondGoal": [(node(**{SINCE: "0x150"}), {29: False, 31: True})],
    "FtslurmSavesFail": [
        (node(checkpoint_saves_failed_in_a_row="0 0 1 1 0 0"), {1: False, 2: True, 4: False})
    ],
    "FtslurmSavesTooSlow": [
        (node(**{LAG: "250x150", PLANNED: "240x150"}), {9: False, 11: True}),
        (node(**{LAG: "230x150", PLANNED: "240x150"}), {15: False}),
    ],
    "FtslurmFellBack": [
        (node(**{FELL_BACK: "-3300x150"}), {1: True, 4: True, 6: False}),
        (node(read_at=STUCK, **{FELL_BACK: "0x150"}), {15: True}),  # over meanwhile
        (node(), {1: False}),
    ],
    "FtslurmTrainedOtherwise": [
        (node(states=(4, 1), **{DIFFERED: "-86100x150"}), {1: True, 4: True, 6: False}),
        (node(states=(5, 0)), {1: False}),
        (node(states=(5, 0), **{DIFFERED: "0x150"}), {1: False}),
        (node(read_at=STUCK, states=(0, 3), **{DIFFERED: "0x150"}), {15: True}),  # over meanwhile
    ],
    "FtslurmUnfinishedVersions": [
        (node(checkpoint_unfinished="3x150"), {29: False, 31: True}),
        (node(checkpoint_unfinished="2x150"), {35: False}),
    ],
    "FtslurmDiskAlmostFull": [
        (node(checkpoint_bytes="100x150", **{FREE: "180x150"}), {1: True}),
        (node(checkpoint_bytes="100x150", **{FREE: "220x150"}), {1: False}),
        (node(**{FREE: "0x150"}), {1: False}),  # nothing was saved yet
    ],
    "FtslurmGoodputLow": [
        (node(parts=POOR), {149: False, 151: True}),
        (node(parts=POOR, run_training=OFTEN), {149: False, 151: True, 153: True}),
        (node(parts=GOOD), {130: False}),
        (node(parts=POOR | {"trained": "0+40x89 3600+60x110", "restart": "0+20x89 1800x110"}),
         {151: True, 180: False}),  # it had a bad beginning
        (node(read_at=STUCK, parts=POOR), {160: False}),  # nobody knows what it does now
        (node(parts=dict.fromkeys(POOR, "0x180")), {130: False}),  # it has waited all the time
        (  # half the time on another node, whose file is left
            node("n0", read_at="0+60x60 3600x120", parts={
                "trained": "0+40x60 2400x120", "restart": "0+20x60 1200x120"})
            + node("n1", read_at="_x60 3660+60x120", run_info="_x60 1x120", parts={
                "trained": "_x60 2440+40x120", "restart": "_x60 1220+20x120"}),
            {149: False, 155: True},
        ),
        (  # nothing was read in the minutes that lie two hours back
            node(read_at="0+60x180", run_info="1x180", parts={
                "trained": "0+40x20 _x30 2000+40x130", "restart": "0+20x20 _x30 1000+20x130"}),
            {155: True, 165: True},
        ),
        (  # in the hour that lies two back it waited for its job
            node(read_at="0+60x10 600x99 6600+60x120", run_info="1x230", parts={
                "trained": "0+40x10 400x99 400+40x120", "restart": "0+20x10 200x99 200+20x120"}),
            {215: True},
        ),
        (  # of good goodput, and back from five hours in the queue: two minutes to start
            node(read_at="0+60x60 3600x299 21600+60x62", run_info="1x430", parts={
                "trained": "0+57x60 3420x302 3420+60x60", "restart": "0+3x60 180x299 240 300x61"}),
            {363: False, 375: False, 420: False},
        ),
    ],
    "FtslurmSlowDetection": [
        (node(mttd_seconds="150x150", **{FAILED_AT: "-3300x150"}), {4: True, 6: False}),
        (node(mttd_seconds="100x150", **{FAILED_AT: "0x150"}), {5: False}),
    ],
    "FtslurmSlowRecovery": [
        (node(rto_seconds="700x150", **{RECOVERED_AT: "-3300x150"}), {4: True, 6: False}),
        (node(rto_seconds="500x150", **{RECOVERED_AT: "0x150"}), {5: False}),
        (node(**{DOWN_AT: "0x150"}), {9: False, 11: True}),
        (node(run_active=OFF, **{DOWN_AT: "0x150"}), {11: False}),  # it waits for its job
    ],
    "FtslurmRunStopped": [
        (node(run_needs_person=ON), {1: True}),
        (node(read_at=STUCK, run_needs_person=ON), {30: True}),
        (node(run_needs_person=OFF), {1: False}),
        (  # it goes on elsewhere
            node("n0", read_at=STUCK, run_needs_person=ON) + node("n1", run_needs_person=OFF),
            {1: False},
        ),
    ],
    "FtslurmMetricsStale": [
        (node(read_at=STUCK), {9: False, 11: True}),
        (node(read_at="-86100x150"), {4: True, 6: False}),  # somebody has looked by now
        (node(read_at=STUCK, run_active=OFF), {11: False}),  # it waits, or is over
        (node(), {15: False}),
        (node(read_at="0x2", run_active="1x2", run_info="1x2"), {30: True}),  # the node is gone
        (node("n0", read_at=STUCK) + node("n1"), {15: False}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def promtool():
    return find_promtool()


def rules(alert=None):
    """Of `alert`: it and what it is made of."""
    given = yaml.safe_load(RULES.read_text())
    (group,) = given["groups"]
    if alert:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", alert) == alert]
    return given


def alerts():
    return {rule["alert"]: rule for rule in rules()["groups"][0]["rules"] if "alert" in rule}


def holds(promtool, folder, alert, given):
    """Whether promtool finds all cases of the alert as they are said to be, and what it prints."""
    (folder / "rules.yml").write_text(json.dumps(given))
    unit = {"rule_files": ["rules.yml"], "evaluation_interval": "1m",
            "tests": [unit_test(alert, *case) for case in CASES[alert]]}  # fmt: skip
    (folder / "unit.yml").write_text(json.dumps(unit))
    done = subprocess.run(
        [promtool, "test", "rules", "unit.yml"], cwd=folder, capture_output=True, text=True
    )
    return done.returncode == 0, done.stdout + done.stderr


def unit_test(alert, series, fires):
    labels = {"alertname": alert, "alertstate": "firing", "run_id": "r", "user": "ada",
              "severity": alerts()[alert]["labels"]["severity"]}  # fmt: skip
    told = "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
    return {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": told, "value": 1}] if is_on else [],
            }
            for minute, is_on in fires.items()
        ],
    }


def test_promtool_accepts_the_rules(promtool):
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_cases_that_fire_and_cases_that_do_not():
    assert set(CASES) == set(alerts())
    for alert, cases in CASES.items():
        assert {is_on for _, fires in cases for is_on in fires.values()} == {True, False}, alert


def test_rules_name_metrics_that_exist():
    named = set(re.findall(r"\bftslurm_\w+", RULES.read_text()))
    assert named and named <= {PREFIX + name for name in FAMILIES}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_and_stays_silent(alert, promtool, tmp_path):
    ok, said = holds(promtool, tmp_path, alert, rules(alert))
    assert ok, said


def mutants(alert):
    """The rules with one number, or one condition, of the alert's broken."""
    expr = alerts()[alert]["expr"]
    for found in re.finditer(r"(?<=[<>*] )\d+(\.\d+)?|(?<=\()2(?= \*)", expr):
        number = float(found[0])
        for other in (2 * number, number / 2) if number else (1,):
            yield f"{expr[: found.start()]}{other:g}{expr[found.end() :]}", None
    for found in re.finditer(r"and on \(run_id, instance, job\) [\w:()\[\]]+ == 1", expr):
        yield f"{expr[: found.start()]}{expr[found.end() :]}", None
    yield f"{expr} > Inf", None
    if "for" in alerts()[alert]:
        yield expr, "0s"
        yield expr, "10h"


@pytest.mark.parametrize("alert", CASES)
def test_a_broken_alert_is_found_out(alert, promtool, tmp_path):
    broken = list(mutants(alert))
    assert broken
    for expr, for_ in broken:
        given = rules(alert)
        (rule,) = [one for one in given["groups"][0]["rules"] if "alert" in one]
        rule["expr"] = expr
        if for_:
            rule["for"] = for_
        ok, said = holds(promtool, tmp_path, alert, given)
        assert not ok, f"{expr} (for {for_}) passes"
        assert "FAILED" in said and "parse error" not in said, said


@pytest.mark.parametrize(
    ("record", "alert", "old", "new"),
    [
        ("ftslurm:fresh", "FtslurmNoCommit", "< 600", "< 1200"),
        ("ftslurm:fresh", "FtslurmNoCommit", "< 600", "< 300"),
        ("ftslurm:node_seconds", "FtslurmGoodputLow", "ftslurm:newest", "ftslurm:fresh"),
        ("ftslurm:node_seconds:2h", "FtslurmGoodputLow", "offset 2h", "offset 1h"),
        ("ftslurm:node_seconds:2h", "FtslurmGoodputLow", "offset 2h", "offset 3h"),
        ("ftslurm:node_seconds:2h", "FtslurmGoodputLow", "[1h]", "[10m]"),
    ],
)
def test_a_broken_record_is_found_out(record, alert, old, new, promtool, tmp_path):
    given = rules(alert)
    (rule,) = [one for one in given["groups"][0]["rules"] if one.get("record") == record]
    assert old in rule["expr"]
    rule["expr"] = rule["expr"].replace(old, new)
    ok, said = holds(promtool, tmp_path, alert, given)
    assert not ok and "FAILED" in said, said
