"""Who is told of what happened to a run, and that telling never changes or delays the run much."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ftslurm
from ftslurm.files import write_json
from ftslurm.recovery import on_event
from ftslurm.recovery.case import Decision
from ftslurm.recovery.on_event import events_of, redacted, tell, uncommitted_s
from ftslurm.run.attempts import Attempt, append_event, claim, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import CheckpointSpec, RunSpec, to_dict


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    claim(layout, Attempt(number=0, job_id="12", restart_count=0, nodes=["n1"], claimed_at=1.0))
    return layout


def record(layout, **rules):
    spec = RunSpec()
    for key, value in rules.items():
        setattr(spec.recovery, key, value)
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "gpt-1", "scheduler": "local", "spec": to_dict(spec),
    })  # fmt: skip
    return read_record(layout)


def script(folder, body):
    path = folder / "hook.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("changes", "uncommitted", "kinds"), [
    ({"action": "restart"}, (10.0, 5), []),
    ({"action": "stop"}, (None, 0), ["stop"]),
    ({"action": "restart", "failures_in_a_row": 3}, (None, 0), ["third_failure"]),
    ({"action": "restart", "failures_in_a_row": 4}, (None, 0), []),
    ({"action": "stop", "failures_in_a_row": 3}, (None, 0), ["stop", "third_failure"]),
    ({"action": "requeued", "exclude": ("n3",)}, (None, 0), ["excluded"]),
    ({"action": "requeued"}, (481.0, 5), ["no_commit"]),
    ({"action": "requeued"}, (479.0, 200), []),
    ({"action": "requeued"}, (479.0, 201), ["no_commit"]),
])  # fmt: skip
def test_an_event_follows_from_the_decision(changes, uncommitted, kinds):
    decision = Decision(**{"cause": "x", "reason": "y", **changes})
    seconds, steps = uncommitted
    every = CheckpointSpec(interval_s=240.0, interval_steps=100)
    assert events_of(decision, every, uncommitted_s=seconds, uncommitted_steps=steps) == kinds


def test_an_interval_that_is_switched_off_is_never_missed():
    off = CheckpointSpec(interval_s=0.0, interval_steps=0)
    decision = Decision("restart", "x", "y")
    assert events_of(decision, off, uncommitted_s=9999.0, uncommitted_steps=9999) == []


def test_time_without_a_commit_counts_from_the_first_step_not_from_the_start(layout):
    paths = layout.attempt(1)
    assert uncommitted_s(layout, 1, now_s=500.0) is None
    for at, kind in ((100.0, "claimed"), (150.0, "restored"), (200.0, "committed")):
        append_event(paths, kind, now=lambda at=at: at)
    assert uncommitted_s(layout, 1, now_s=500.0) == 300.0


def test_a_command_gets_the_event_once_and_its_kind_in_the_environment(layout, tmp_path):
    told = tmp_path / "told"
    hook = script(tmp_path, f'echo "$FTSLURM_EVENT $1" >> {told}; cat >> {told}; echo >> {told}')
    run = record(layout, on_event=[hook, "word with spaces"])
    for _ in range(2):
        tell(layout, run, 1, ["stop"], {"reason": "why"}, environ=dict(os.environ))
    first, second = told.read_text().splitlines()
    assert first == "stop word with spaces"
    message = json.loads(second)
    assert message["event"] == "stop" and message["reason"] == "why"
    assert (message["run_id"], message["job_id"], message["attempt"]) == ("gpt-1", "12", 1)
    assert [event["event"] for event in read_events(layout.attempt(1)) if event["kind"] == "told"]


def test_of_further_nodes_it_is_told_again_and_of_the_same_not(layout, tmp_path):
    told = tmp_path / "told"
    run = record(layout, on_event=[script(tmp_path, f"cat >> {told}; echo >> {told}")])
    for nodes in (["n3"], ["n3"], ["n4"]):
        tell(layout, run, 1, ["excluded"], {"excluded": nodes})
    messages = map(json.loads, told.read_text().splitlines())
    assert [message["excluded"] for message in messages] == [["n3"], ["n4"]]


def test_a_command_that_fails_is_a_warning(layout, tmp_path, capsys):
    run = record(layout, on_event=[script(tmp_path, "echo no network; exit 3")])
    tell(layout, run, 1, ["stop"], {})
    said = capsys.readouterr().err
    assert "ended with code 3 (no network)" in said and said.count("warning") == 1


def test_so_is_one_that_cannot_be_started(layout, capsys):
    tell(layout, record(layout, on_event=["/no/such/command"]), 1, ["stop"], {})
    assert "cannot be started" in capsys.readouterr().err


def test_a_command_that_hangs_is_killed_with_all_it_started(layout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_event, "DEADLINE_S", 8.0)
    pid_file = tmp_path / "pid"
    hook = script(tmp_path, f"trap '' TERM\nsleep 60 &\necho $! > {pid_file}\nwait\nsleep 200")
    tell(layout, record(layout, on_event=[hook]), 1, ["stop"], {})
    assert "did not end within" in capsys.readouterr().err
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline, "the command's own child lives on"
        time.sleep(0.02)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Receiver(http.server.BaseHTTPRequestHandler):
    bodies, sites, delay_s = [], [], 0.0

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sites, bodies = self.sites, self.bodies  # of this test, however late it goes on
        time.sleep(self.delay_s)
        sites.append(self.headers["Site"])
        bodies.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    Receiver.bodies, Receiver.sites = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


def test_an_address_gets_the_same_json(layout, address):
    tell(layout, record(layout, on_event_url=address), 1, ["excluded"], {"excluded": ["n3"]})
    ((kind, message),) = Receiver.bodies
    assert kind == "application/json"
    assert (message["event"], message["excluded"]) == ("excluded", ["n3"])


def test_what_the_site_adds_to_every_python_is_there_when_an_address_is_told(address, tmp_path):
    """Certificates, mostly; the job's Python is started without (-S)."""
    added = "import urllib.request as r; o = r.build_opener(); "
    added += "o.addheaders = [('Site', 'added')]; r.install_opener(o)"
    (tmp_path / "sitecustomize.py").write_text(added)
    code = "from ftslurm.recovery.on_event import RecoverySpec, _tell_all\n"
    code += f"print(_tell_all(RecoverySpec(on_event_url={address!r}), dict(stop='{{}}'), {{}}))"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(ftslurm.__file__).parents[1]}"}
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done
    assert Receiver.sites == ["added"]


def test_an_address_that_does_not_answer_costs_its_deadline(layout, address, monkeypatch, capsys):
    monkeypatch.setattr(on_event, "DEADLINE_S", 0.3)
    monkeypatch.setattr(Receiver, "delay_s", 100.0)
    begun = time.monotonic()
    tell(layout, record(layout, on_event_url=address), 1, ["stop"], {})
    assert time.monotonic() - begun < 20
    assert "nobody may have been told of `stop`" in capsys.readouterr().err


def test_all_that_is_told_costs_one_deadline_together(
    layout, address, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(on_event, "DEADLINE_S", 10.0)
    monkeypatch.setattr(Receiver, "delay_s", 100.0)
    kinds = ["stop", "third_failure", "no_commit", "excluded"]
    hook = script(tmp_path, f"[ $FTSLURM_EVENT = stop ] || sleep 100; cat > {tmp_path}/told")
    begun = time.monotonic()
    tell(layout, record(layout, on_event=[hook], on_event_url=address), 1, kinds, {})
    assert time.monotonic() - begun < 40  # one after the other: 70 s
    assert json.loads((tmp_path / "told").read_text())["event"] == "stop"
    assert capsys.readouterr().err.count("nobody may have been told") == 7


def test_no_secret_leaves_with_an_event(layout, tmp_path):
    told = tmp_path / "told"
    run = record(layout, on_event=[script(tmp_path, f"cat > {told}")])
    environ = {**os.environ, "WANDB_API_KEY": 'abc"def\\0123'}
    facts = {"reason": f"login with {environ['WANDB_API_KEY']} failed"}
    tell(layout, run, 1, ["stop"], facts, environ=environ)
    message = json.loads(told.read_text())
    assert message["reason"] == "login with ${oc.env:WANDB_API_KEY} failed"


def test_what_is_no_secret_stays():
    environ = {"HOME": "/home/someone", "AUTH": "yes"}
    assert redacted("yes, /home/someone", environ) == "yes, /home/someone"
