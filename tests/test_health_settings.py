"""One set of keys for conf/, a run and the nodes' copy; a broken file never drains and never stops
a look."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from health_nodes import of_case
from hypothesis import given
from hypothesis import strategies as st

from ftslurm.errors import FormatError, SpecError, UsageError
from ftslurm.health.decision_table import DECISION_TABLE
from ftslurm.health.root_only import check_root_only
from ftslurm.health.settings import (
    SOURCES,
    HealthSettings,
    check_settings,
    thresholds_of,
    wrong_values,
)
from ftslurm.health.settings_file import read_settings, settings_of, to_record
from ftslurm.health.verdict import Thresholds
from ftslurm.run.spec import RunSpec, from_dict, to_dict
from ftslurm.submit.assets import conf_folder
from ftslurm.submit.compose import compose
from ftslurm.submit.node_settings import write_settings

KEYS = [item.name for item in dataclasses.fields(HealthSettings)]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has what others may not write")


@pytest.fixture
def file(tmp_path):
    """A settings file that only its owner can write; returns a writer of it."""

    def write(content):
        path = tmp_path / "health.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        path.chmod(0o644)
        return path

    return write


def changed(**values):
    return {**to_record(HealthSettings()), **values}


# conf/ and the dataclass


def test_the_default_file_names_every_key_and_says_what_the_dataclass_says():
    text = (conf_folder() / "health" / "default.yaml").read_text()
    named = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert sorted(named) == sorted(KEYS)
    assert compose([])[0].health == HealthSettings()


def test_shadow_differs_from_the_default_by_its_mode_alone():
    shadow = compose(["health=shadow"])[0].health
    assert shadow == dataclasses.replace(HealthSettings(), mode="shadow")


def test_overrides_reach_every_kind_of_value():
    given_ = ["health.skip=[nvml,xid-79]", "health.limits.retired-pages=15", "health.resume=false",
              "health.prolog_s=4", "health.gpus_per_node=8"]  # fmt: skip
    health = compose(given_)[0].health
    assert health.skip == ["nvml", "xid-79"] and health.limits == {"retired-pages": 15.0}
    assert (health.resume, health.prolog_s, health.gpus_per_node) == (False, 4.0, 8)


def test_a_run_keeps_its_settings_over_json():
    spec = RunSpec()
    spec.health.skip.append("rdma")
    assert from_dict(to_dict(spec)).health.skip == ["rdma"]
    assert HealthSettings().skip == []


# what cannot be right

WRONG = [
    ({"mode": "off"}, "mode is `off`; choose drain or shadow"),
    ({"probe": "maybe"}, "probe is `maybe`; choose on_failure or always or never"),
    ({"preflight": ""}, "preflight is ``; choose on_suspicion or always or never"),
    ({"skip": ["nvm"]}, "skip names `nvm`, which is no rule, did you mean `nvml`"),
    ({"skip": ["xid-"]}, "skip names `xid-`, which is no rule"),
    ({"shadow": ["nvml"]}, "shadow names `nvml`, which is no rule"),
    ({"limits": {"retired-page": 3}}, "has no bound, did you mean `retired-pages`"),
    ({"limits": {"remap-failure": 3}}, "limits names `remap-failure`, which has no bound"),
    ({"limits": {"retired-pages": float("nan")}}, "the bound nan; give a number"),
    ({"limits": {"nvlink-replay": 0}}, "the bound 0, which any look would reach"),
    ({"unknown_probes": 0}, "unknown_probes is 0; it has to be at least 1"),
    ({"breaker_same": 0}, "breaker_same is 0; it has to be at least 1"),
    ({"prolog_s": 0.0}, "prolog_s is 0.0; it has to be above 0"),
    ({"epilog_s": float("inf")}, "epilog_s is inf"),
    ({"breaker_nodes": -1}, "breaker_nodes is -1; it has to be at least 0"),
    ({"breaker_share": 5.0}, "breaker_share is 5.0; it is a share, from 0 to 1"),
    ({"state_dir": "state"}, "state_dir is `state`; give an absolute path"),
    ({"kernel_log": ""}, "kernel_log is ``; give an absolute path"),
    ({"verdict_dir": "verdicts"}, "verdict_dir is `verdicts`; give an absolute path, or nothing"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_value_that_cannot_be_right_is_refused_by_its_key(values, said):
    settings = dataclasses.replace(HealthSettings(), **values)
    with pytest.raises(SpecError) as caught:
        check_settings(settings)
    assert said in str(caught.value) and str(caught.value).startswith("health.")


def test_a_run_with_such_a_value_is_not_submitted():
    with pytest.raises(SpecError, match=r"health\.mode is `loud`; choose drain or shadow"):
        compose(["health.mode=loud"])


def test_every_rule_that_a_verdict_can_name_may_be_skipped():
    """Those of the corpus, of the decision table, and each source that cannot be read."""
    cases = (Path(__file__).parent / "data" / "health" / "cases.jsonl").read_text().splitlines()
    rules = {verdict.rule for case in cases for verdict in of_case(json.loads(case))}
    rules -= {"unread-dcgm"}  # a case about somebody else's tool
    rules |= {row.rule for row in DECISION_TABLE} | {f"unread-{source}" for source in SOURCES}
    assert len(rules) > 80
    settings = HealthSettings(skip=sorted(rules), shadow=sorted(rules))
    assert list(wrong_values(settings)) == []


def test_the_judging_is_given_what_the_settings_say():
    assert thresholds_of(HealthSettings()) == Thresholds()
    settings = HealthSettings(skip=["cooling"], limits={"retired-pages": 9.0}, unknown_probes=5)
    thresholds = thresholds_of(settings)
    assert "cooling" in thresholds.off and thresholds.unknown_probes == 5
    assert thresholds.limits == {"retired-pages": 9.0}


# the file


def test_what_is_written_is_read_again(file):
    settings = dataclasses.replace(HealthSettings(), gpus_per_node=8, skip=["rdma"])
    assert read_settings(file(to_record(settings))) == (settings, "")


BROKEN = [
    (b"", "is not JSON; it is torn or not ours"),
    (json.dumps(changed()).encode()[:200], "is not JSON; it is torn or not ours"),
    (b"\xff\xfe{}", "is not JSON"),
    (b"[" * 200_000, "is not JSON"),
    (b"[1, 2]", "is no JSON object"),
    (b"{}", "has schema_version None, not 1"),
    (changed(schema_version=2), "has schema_version 2, not 1"),
    (changed(unknown_probes="three"), 'unknown_probes is "three"; give a whole number'),
    (changed(unknown_probes=True), "unknown_probes is true; give a whole number"),
    (changed(resume=1), "resume is 1; give true or false"),
    (changed(prolog_s=None), "prolog_s is null; give a number"),
    (changed(skip="nvml"), 'skip is "nvml"; give a list of texts'),
    (changed(skip=[1]), "skip is [1]; give a list of texts"),
    (changed(limits={"retired-pages": "9"}), "give a number for each rule"),
    (changed(mode=["drain"]), "give a text"),
    (changed(drain_mode="drain"), "there is no key `drain_mode`"),
    (changed(unknown_probe=3), "there is no key `unknown_probe`, did you mean `unknown_probes`"),
    (changed(mode="Drain"), "mode is `Drain`; choose drain or shadow"),
    (changed(skip=["nvlink-dwn"]), "which is no rule, did you mean `nvlink-down`"),
    (b'{"schema_version": 1, "prolog_s": NaN}', "prolog_s is nan"),
    (b" " * ((1 << 20) + 1), "has more than 1048576 bytes"),
]


@pytest.mark.parametrize(("content", "said"), BROKEN, ids=[said[:40] for _, said in BROKEN])
def test_a_file_that_is_not_right_means_shadow_mode_and_says_so(file, content, said):
    settings, complaint = read_settings(file(content))
    assert settings.mode == "shadow"
    assert said in complaint and "\n" not in complaint
    assert "no node is drained (shadow mode) until that file is right" in complaint


def test_a_file_that_is_missing_or_is_none_means_shadow_mode(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, said in (("none.json", "No such file"), ("fifo", "is no regular file"),
                       ("folder", "Is a directory")):  # fmt: skip
        settings, complaint = read_settings(tmp_path / name)
        assert settings.mode == "shadow" and said in complaint, complaint


def test_what_is_right_in_a_broken_file_holds(file):
    """Not to look elsewhere, or with other limits, because of one misspelt key."""
    content = changed(state_dir="/srv/health", verdict_dir="here", nonsense=1)
    settings, _ = read_settings(file(content))
    assert (settings.state_dir, settings.verdict_dir) == ("/srv/health", "")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from([*KEYS, "schema_version", "x"]), inner, max_size=6)
        ),
        max_leaves=20,
    )
)
def test_no_record_crashes_the_reader_and_only_a_right_one_drains(record):
    settings, complaint = settings_of(record, where="here")
    assert bool(complaint) == bool(list(wrong_values(settings))) or settings.mode == "shadow"
    assert not list(wrong_values(settings))


@as_root
def test_root_believes_no_file_that_somebody_else_can_write(tmp_path):
    """It names a command and a library that root will run."""
    own = tmp_path / "own"
    own.mkdir()
    path = own / "health.json"
    path.write_text(json.dumps(changed(nvidia_smi="/home/mallory/nvidia-smi")))

    def complaint():
        settings, said = read_settings(path)
        assert (settings.mode == "shadow") == bool(said)
        assert settings.nvidia_smi == ("nvidia-smi" if said else "/home/mallory/nvidia-smi")
        return said

    assert complaint() == ""
    path.chmod(0o666)
    assert "may be written by others than root (mode 0666)" in complaint()
    path.chmod(0o644)
    os.chown(path, 12345, 0)
    assert "belongs to user 12345" in complaint()
    os.chown(path, 0, 0)
    own.chmod(0o777)
    assert f"`{own}` may be written by others" in complaint()
    own.chmod(0o755)
    os.chown(own, 12345, 0)
    assert f"`{own}` belongs to user 12345" in complaint()


@as_root
def test_a_way_through_links_is_checked_link_by_link(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    (ours / "file").write_text("x")
    (ours / "link").symlink_to("file")
    check_root_only(ours / "link")
    (ours / "away").symlink_to(theirs)
    (theirs / "file").write_text("x")
    theirs.chmod(0o777)
    with pytest.raises(FormatError, match="may be written by others"):
        check_root_only(ours / "away" / "file")
    theirs.chmod(0o1777)  # root's own entries of a sticky folder are safe
    check_root_only(ours / "away" / "file")
    (theirs / "back").symlink_to(ours)
    os.lchown(theirs / "back", 12345, 0)
    with pytest.raises(FormatError, match="back` belongs to user 12345"):
        check_root_only(theirs / "back" / "file")
    (ours / "loop").symlink_to("loop")
    with pytest.raises(FormatError, match="leads through too many others"):
        check_root_only(ours / "loop")


# `ftslurm health settings`


def test_the_command_writes_what_a_node_reads(tmp_path):
    out = tmp_path / "health.json"
    write_settings(out, ["health=shadow", "health.gpus_per_node=8"])
    expected = dataclasses.replace(HealthSettings(), mode="shadow", gpus_per_node=8)
    assert read_settings(out) == (expected, "")


@pytest.mark.parametrize(("override", "kind", "said"), [
    ("steps=3", UsageError, "`steps=3` has no effect on a node"),
    ("health.modus=drain", SpecError, "no key `health.modus`, did you mean `health.mode`"),
    ("health=silent", SpecError, "health has no option `silent`"),
    ("health.prolog_s=soon", SpecError, "prolog_s"),
    ("health.skip=[nvlnk-down]", SpecError, "did you mean `nvlink-down`"),
])  # fmt: skip
def test_the_command_refuses_what_cannot_be_right_and_writes_nothing(
    tmp_path, override, kind, said
):
    out = tmp_path / "health.json"
    with pytest.raises(kind) as caught:
        write_settings(out, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not out.exists()
