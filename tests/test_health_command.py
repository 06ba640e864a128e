"""`ftslurm health`: what is told, by which exit code, and what a broken file or folder changes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from fakes.nvml.nodes import STATE_VARIABLE
from health_probes import XID_13, ProbedNode

from ftslurm.cli import main as ftslurm
from ftslurm.errors import UsageError
from ftslurm.health import command, latch, node_log, settings_file
from ftslurm.health.command import SICK_NODE
from ftslurm.health.drain import Action
from ftslurm.health.report import parse_report
from ftslurm.health.settings import HealthSettings
from ftslurm.health.settings_file import to_record
from ftslurm.health.verdict_folder import read_verdicts

ROOT = Path(__file__).resolve().parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts on a node")


@pytest.fixture
def node(tmp_path, library, monkeypatch):
    """Eight healthy GPUs, now; Slurm's commands note that they were called, and fail."""
    node = ProbedNode(tmp_path, library, gpus=8)
    node.now = time.time()
    node.boot("boot-one")
    monkeypatch.setenv(STATE_VARIABLE, str(node.gpus.path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "sinfo"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/calls\nexit 1\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    # pytest's own time limit is that timer.
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(node_log, "SOCKET", str(tmp_path / "no-log"))
    return node


@pytest.fixture
def health(node, capsys):
    """Calls the command with the node's settings: (exit code, stdout, stderr)."""

    def call(*argv, content=None):
        path = node.folder / "health.json"
        if content is None:
            content = json.dumps(to_record(node.settings))
        path.write_text(content)
        code = ftslurm(["health", *argv, "--settings", str(path)])
        return code, *capsys.readouterr()

    return call


def calls(node):
    path = node.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


# probe


def test_a_healthy_node_is_one_line_and_zero(node, health):
    code, said, errors = health("probe")
    assert code == 0 and errors == ""
    assert said.startswith("OK - 8 GPUs, nothing found (") and said.count("\n") == 1
    assert calls(node) == []


@pytest.mark.parametrize(("change", "code", "begins"), [
    (lambda node: node.gpus.set(3, "persistence", 0), 1, "WARNING - warn PERSIST"),
    (lambda node: node.gpus.set(3, "remap_failure", 1), 2,
     "CRITICAL - drain REMAP-FAIL gpu3 0000:4b:00: "),
    (lambda node: node.gpus.set(3, "remap_pending", 1), 2, "CRITICAL - reset REMAP-WAIT gpu3"),
    (lambda node: node.gpus.set("*", "crash:nvmlInit_v2", 1), 3, "UNKNOWN - unknown UNREAD: "),
], ids=["warn", "drain", "reset", "unknown"])  # fmt: skip
def test_nagios_is_given_its_codes(node, health, change, code, begins):
    change(node)
    found, said, _ = health("probe")
    assert said.startswith(begins), said
    assert found == code
    assert calls(node) == []  # a probe tells, and changes nothing


def test_explain_tells_what_was_read_each_rule_and_its_source(node, health):
    node.gpus.set(3, "remap_failure", 1).set(5, "temperature", 61)
    node.settings.skip = ["cooling"]
    said = health("probe", "--explain")[1]
    for text in (
        "node       n7, boot boot-one",
        "look       probe at 20",
        "; skip=['cooling']",
        "baseline   none: counters say nothing of this look",
        "GPUs       8\n  gpu0   0000:1b:00  GPU-",
        "  remap_failure            False (gpu0, gpu1, gpu2, gpu4, gpu5, gpu6, gpu7); True (gpu3)",
        "  temperature_margin       55 (all GPUs)",
        "; 61 (gpu5)",
        "not read   0",
        "rules      1 fired\n  drain REMAP-FAIL gpu3 0000:4b:00: a row that could not be remapped",
        "    rule remap-failure; source DCGM DcgmHealthWatch.cpp 1893; gpud",
        "; never resumed but by a person",
        "  ignored: recovery-action (ACTION0), 8 times",
        "result     drain",
    ):
        assert text in said, f"{text!r} is not in\n{said}"


def test_json_is_the_schema_that_runs_read(node, health):
    node.gpus.set(3, "remap_failure", 1)
    code, said, _ = health("probe", "--json")
    report = parse_report(json.loads(said), where="stdout")
    assert (code, report.node, report.word, report.context) == (2, "n7", "drain", "probe")
    told = report.verdicts[0]
    assert (told.code, told.gpu, told.bus, told.sticky) == ("REMAP-FAIL", 3, "0000:4b:00", True)


def test_what_a_user_has_named_reaches_no_terminal_as_it_is(node, health):
    node.log(XID_13.replace("python3", "py\x1b]0;owned\x07thon"))
    code, said, _ = health("probe", "--explain")
    assert "XID13" in said and "\x1b" not in said and "\x07" not in said
    assert "py?]0;owned?thon" in said
    assert code == 1, said


# in Slurm's contexts


@as_root
def test_a_healthy_node_costs_no_call_of_slurm_and_leaves_its_verdicts(node, health):
    folder = node.folder / "verdicts"
    node.settings.verdict_dir = str(folder)
    for word in ("prolog", "epilog", "periodic"):
        code, said, errors = health(word)
        assert (code, errors) == (0, "") and said.startswith("OK - 8 GPUs")
        reports, notes = read_verdicts(folder, ["n7"])
        assert [report.context for report in reports] == [word] and notes == []
    assert calls(node) == []


@as_root
def test_a_sick_node_is_acted_on_and_slurm_told(node, health, monkeypatch):
    """Slurm does not answer here, so nothing is drained, and the next look tries it again."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    node.settings.verdict_dir = str(node.folder / "verdicts")
    node.gpus.set(3, "remap_failure", 1)
    code, said, _ = health("epilog")
    assert code == 0 and calls(node)[0].startswith("scontrol show node n7")
    assert said.startswith("CRITICAL - drain REMAP-FAIL") and "; failed: " in said
    (report,), _ = read_verdicts(node.folder / "verdicts", ["n7"], job="77")
    assert (report.job, report.action, report.word) == ("77", "failed", "drain")
    assert health("periodic")[0] == 0


@as_root
@pytest.mark.parametrize(
    ("word", "settled"), [("drained", 1), ("already", 1), ("failed", 0), ("foreign", 0)]
)
def test_what_was_dealt_with_is_settled_and_what_failed_comes_again(
    node, health, monkeypatch, word, settled
):
    calls = []
    monkeypatch.setattr("ftslurm.health.drain.act", lambda *_, **__: Action(word, exit_code=1))
    monkeypatch.setattr("ftslurm.health.visit.settle", lambda *_: calls.append(1) or "not kept")
    code, _, errors = health("epilog")
    assert (code, len(calls)) == (SICK_NODE, settled)
    assert ("not kept" in errors) == bool(settled)


@as_root
@pytest.mark.parametrize("word", ["epilog", "periodic", "probe"])
def test_a_node_whose_breaker_has_tripped_says_so_at_each_look(node, health, word):
    with node.state() as state:
        latch.trip(state, latch.Latch("3 nodes show DRIVER", time.time()))
    node.settings.verdict_dir = str(node.folder / "verdicts")
    code, said, errors = health(word)
    told = said + errors
    assert "the breaker has tripped on this node (3 nodes show DRIVER): for 24 h more" in told
    assert said.startswith("WARNING - 8 GPUs, nothing found")
    assert code == (1 if word == "probe" else 0)
    for report in read_verdicts(node.folder / "verdicts", ["n7"])[0]:
        assert "the breaker has tripped" in report.complaints[0]


@as_root
def test_an_epilog_beside_another_look_leaves_the_verdicts_of_its_own_job(
    node, health, monkeypatch
):
    """What the other one has found stands in for a look of its own."""
    node.settings.verdict_dir = str(node.folder / "verdicts")
    node.settings.epilog_s = 1.0
    assert health("periodic")[0] == 0
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with node.state() as state, state.lock(0.0):
        assert health("epilog")[0] == 0
    (report,), _ = read_verdicts(node.folder / "verdicts", ["n7"], job="78")
    assert (report.job, report.context, report.gpus) == ("78", "epilog", 8)
    assert any("another look is under way" in note for note in report.notes)


BROKEN = [
    ("", "is not JSON"),
    ('{"schema_version": 1, "mode":', "is not JSON"),
    ("[]", "is no JSON object"),
    ('{"schema_version": 1, "mode": 3}', "mode is 3; give a text"),
    ('{"schema_version": 1, "colour": "red"}', "there is no key `colour`"),
    ('{"schema_version": 1, "skip": ["nvlnk-down"]}', "names `nvlnk-down`, which is no rule"),
]


@as_root
@pytest.mark.parametrize(
    ("word", "content", "said"),
    [("epilog", *broken) for broken in BROKEN]
    + [(word, *BROKEN[0]) for word in ("prolog", "periodic")],
)
def test_a_broken_file_drains_nothing_and_says_so_in_every_place(
    node, health, monkeypatch, word, content, said
):
    node.gpus.set(3, "remap_failure", 1)
    # The defaults that hold then are this node's, not those of the machine that runs the test.
    monkeypatch.setattr(
        settings_file, "HealthSettings", partial(HealthSettings, **vars(node.settings))
    )
    lines = []
    monkeypatch.setattr(command, "log_line", lines.append)
    code, out, errors = health(word, content=content)
    assert code == 0 and calls(node) == []
    assert said in errors and "no node is drained (shadow mode)" in errors
    assert (
        errors.startswith("ftslurm: warning: ")
        and errors.strip() in f"ftslurm: warning: {lines[0]}"
    )
    assert out.startswith("CRITICAL - drain REMAP-FAIL") and "; shadow" in out
    assert "; shadow" in lines[1]


@as_root
def test_a_missing_file_is_one_more_broken_one(node, capsys, monkeypatch):
    monkeypatch.setattr(
        settings_file, "HealthSettings", partial(HealthSettings, **vars(node.settings))
    )
    node.gpus.set(3, "remap_failure", 1)
    assert ftslurm(["health", "prolog", "--settings", str(node.folder / "none.json")]) == 0
    assert "none.json` cannot be read (No such file or directory)" in capsys.readouterr().err
    assert calls(node) == []


def test_a_complaint_is_a_warning_to_nagios_and_in_the_record(node, health):
    content = json.dumps({**to_record(node.settings), "colour": "red"})
    code, said, _ = health("probe", content=content)
    assert code == 1 and said.startswith("WARNING - 8 GPUs, nothing found")
    assert "there is no key `colour`" in said
    record = json.loads(health("probe", "--json", content=content)[1])
    assert "there is no key `colour`" in record["complaints"][0]


@as_root
def test_a_folder_of_state_that_others_can_write_is_not_used_and_nothing_drained(node, health):
    node.gpus.set(3, "remap_failure", 1)
    (node.folder / "state").mkdir()
    (node.folder / "state").chmod(0o777)
    code, said, errors = health("epilog")
    assert code == 0 and calls(node) == []
    assert "can be written by others" in errors and "nothing is remembered, or drained" in errors
    assert said.startswith("CRITICAL - drain REMAP-FAIL")


@as_root
def test_verdicts_that_cannot_be_left_are_a_complaint_and_no_more(node, health):
    node.settings.verdict_dir = str(node.folder / "missing" / "verdicts")
    code, _, errors = health("epilog")
    assert code == 0 and "verdicts are not in `" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), UsageError("of ours")])
def test_a_probe_that_breaks_takes_no_node_out_of_service(node, health, monkeypatch, error):
    def breaks(*_, **__):
        raise error

    monkeypatch.setattr("ftslurm.health.visit.look_at", breaks)
    for word in ("prolog", "epilog", "periodic"):
        code, _, errors = health(word)
        assert code == 0 and f"this {word} could not look at the node" in errors


def test_a_look_of_slurms_wants_its_settings_named(capsys):
    assert ftslurm(["health", "prolog"]) == 2
    assert "give --settings FILE" in capsys.readouterr().err


STUCK = """
import sys, time
from ftslurm.health import command, visit
command._SLACK_S = 0.3
visit.look_at = lambda *_, **__: time.sleep(60)
sys.exit(command.main(sys.argv[1:]))
"""


@as_root
def test_a_look_that_does_not_end_is_ended(node):
    path = node.folder / "health.json"
    path.write_text(json.dumps({**to_record(node.settings), "prolog_s": 0.1, "slurm_call_s": 0.1}))
    argv = [sys.executable, "-c", STUCK, "prolog", "--settings", path]
    done = subprocess.run([*map(str, argv)], cwd=ROOT, timeout=50, capture_output=True)
    assert done.returncode == -signal.SIGALRM, done.stderr


# the rest


@as_root
def test_the_breaker_is_reset_by_hand(node, health):
    code, said, _ = health("breaker", "--reset")
    assert code == 0 and "has not tripped on this node" in said
    with node.state() as state:
        state.write_json(
            "breaker.json", {"schema_version": 1, "because": "3 nodes", "at": time.time()}
        )
    assert "3 nodes" in health("breaker", "--reset")[1]
    assert "has not tripped" in health("breaker", "--reset")[1]
    code, _, errors = health("breaker", "--reset", content="{")
    assert code == 2 and "is not JSON" in errors


def test_help_has_examples_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    for text in ("examples:", "ftslurm health probe --explain", "exit codes of probe: 0 ok",
                 "breaker --reset", "health=shadow"):  # fmt: skip
        assert text in said


def test_the_nodes_log_gets_one_line_and_is_never_waited_for(tmp_path):
    path = str(tmp_path / "log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(path)
        node_log.log_line("sick:\n  very", path=path)
        line = log.recv(4096).decode()
        assert line.startswith("<28>ftslurm-health[") and line.endswith("]: sick: very")
        began = time.monotonic()
        for _ in range(3000):  # until nobody has room for more
            node_log.log_line("x" * 1900, path=path)
        assert time.monotonic() - began < 30
    node_log.log_line("nobody listens", path=str(tmp_path / "none"))


COLD = """
import resource, sys
sys.path.insert(0, {root!r})
def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime
before = used()
import ftslurm.health.command, ftslurm.health.visit
print(used() - before, *sorted(sys.modules))
"""


def test_a_cold_start_is_cheap(capsys):
    """CPU seconds of all that `probe` imports beyond bare Python; the best of ten, since other
    processes share the caches. The bound is for a busy machine."""
    argv = [sys.executable, "-I", "-S", "-c", COLD.format(root=str(ROOT))]
    runs = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
            for _ in range(10)]  # fmt: skip
    best_s = min(float(run[0]) for run in runs)
    with capsys.disabled():
        print(f"\nhealth probe: {best_s * 1000:.0f} ms of CPU for its imports")
    assert best_s < 0.15
    heavy = {"subprocess", "socket", "asyncio", "hydra", "difflib", "xml", "tempfile", "logging",
             "ftslurm.health.drain", "ftslurm.health.verdict_folder"}  # fmt: skip
    assert not heavy & set(runs[0])
