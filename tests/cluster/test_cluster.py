"""The throwaway cluster itself: that it behaves as a real one."""

from __future__ import annotations

import pwd
import subprocess
from pathlib import Path

import pytest
from lab import Lab, cluster, wait_until

pytestmark = pytest.mark.cluster

# A task and a batch shell that log each signal and stay. Children of both get signals too.
# The shell looks every 0.1 s and does not `wait`: of two signals that come together (CONT, TERM)
# bash may handle the first, enter waitpid with the second pending, and run its trap only when srun
# ends (27 of 480 shells on bash 5.2; none when it sleeps).
LOGS_SIGNALS = """
log() { echo "$1 $2" >> "$FOLDER/signals"; }
for s in TERM USR1 CONT; do trap "log shell $s" "$s"; done
export -f log
srun --kill-on-bad-exit=0 bash -c '
  for s in TERM USR1 CONT; do trap "log task $s" "$s"; done
  log task ready
  while :; do sleep 0.1; done' &
while kill -0 $! 2>/dev/null; do sleep 0.1; done
"""

# Both nodes write their name where only they can see it, meet, then read it back.
WRITES_AND_READS_BACK = """
for place in /tmp /dev/shm "$LOCAL"; do hostname > "$place/who"; done
touch "$FOLDER/met.$(hostname)"
for i in $(seq 900); do [ -e "$FOLDER/met.n1" ] && [ -e "$FOLDER/met.n2" ] && break; sleep 0.1; done
echo "$(hostname) reads $(cat /tmp/who /dev/shm/who "$LOCAL/who" | tr '\\n' ' ')"
"""

# Task 0 listens on its own name; the other connects to it by that name and says its address.
MEETS_BY_NAME = """
import os, socket, time
if os.environ["SLURM_PROCID"] == "0":
    server = socket.create_server((socket.gethostname(), 29500))
    server.settimeout(120)
    peer, address = server.accept()
    print("heard", peer.recv(100).decode(), "from", address[0])
else:
    for attempt in range(1000):
        try:
            client = socket.create_connection(("n1", 29500), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    client.sendall(socket.gethostbyname(socket.gethostname()).encode())
"""


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """An empty folder of the user, on the file system all nodes share."""
    path = lab.home(lab.user) / str(request.node.name)
    lab.run_as(lab.user, ["mkdir", str(path)])
    return path


def run_job(lab: Lab, folder: Path, *arguments: str, script: str) -> str:
    """Run a job to its end; what it printed."""
    output = folder / "output"
    job = lab.sbatch_as(lab.user, f"--output={output}", *arguments, script=script)
    state = lab.wait_for_state(job, ["COMPLETED", "FAILED", "CANCELLED"], timeout_s=120)
    text = output.read_text()
    assert state == "COMPLETED", text
    return text


def test_the_cluster_answers(lab: Lab) -> None:
    assert set(lab.node_states()) == {"n1", "n2", "n3", "n4"}
    shown = lab.status()
    assert shown["up"]
    assert all(daemon["running"] for daemon in shown["daemons"])
    assert [p["name"] for p in shown["partitions"]] == ["low", "high"]
    assert "UP" in lab.run_as(lab.user, ["scontrol", "ping"]).stdout


def test_a_users_job_meets_its_peers_by_name_over_the_private_network(
    lab: Lab, folder: Path
) -> None:
    (folder / "meet.py").write_text(MEETS_BY_NAME)
    command = f"srun {lab.python} {folder}/meet.py"
    printed = run_job(lab, folder, "--nodes=2", "--nodelist=n[1-2]", script=command)
    address = lab.status()["nodes"][1]["address"]
    assert f"heard {address} from {address}" in printed


def test_accounting_knows_the_users_job(lab: Lab, folder: Path) -> None:
    job = lab.sbatch_as(lab.user, f"--output={folder}/output", script="exit 3")
    lab.wait_for_runs(job, ["FAILED"])
    argv = ["sacct", "-X", "-P", "-n", "-j", job, "--format=User,Account,ExitCode"]
    assert lab.run_as(lab.user, argv).stdout.strip() == f"{lab.user}|ftslurm|3:0"


def test_nodes_share_no_memory_and_no_disk_but_share_the_home(lab: Lab, folder: Path) -> None:
    environment = f"export FOLDER={folder} LOCAL={lab.status()['node_disk']}\n"
    script = folder / "share.sh"
    script.write_text(environment + WRITES_AND_READS_BACK)
    printed = run_job(lab, folder, "--nodes=2", "--nodelist=n[1-2]", script=f"srun bash {script}")
    assert "n1 reads n1 n1 n1" in printed
    assert "n2 reads n2 n2 n2" in printed
    assert not Path("/tmp/who").exists() and not Path("/dev/shm/who").exists()


def test_a_gpu_job_sees_two_gpus(lab: Lab, folder: Path) -> None:
    script = 'echo "gpus $CUDA_VISIBLE_DEVICES"; srun bash -c \'echo "step $CUDA_VISIBLE_DEVICES"\''
    printed = run_job(lab, folder, "--gres=gpu:2", script=script)
    assert printed.splitlines() == ["gpus 0,1", "step 0,1"]


@pytest.mark.parametrize(
    ("settings", "option", "requeue"),
    [
        ({}, "--requeue", "1"),
        ({}, "--no-requeue", "0"),
        ({"job_requeue": False}, "--comment=none", "0"),
        ({"job_requeue": False}, "--requeue", "1"),
        ({"strip_requeue": True}, "--requeue", "0"),
    ],
)
def test_whether_a_job_may_be_requeued_is_the_jobs_or_the_sites_word(
    lab: Lab, settings: dict[str, bool], option: str, requeue: str
) -> None:
    lab.change_settings(**settings)
    job = lab.sbatch_as(lab.user, option, "--output=/dev/null", script="exit 0")
    assert lab.show_job(job)["Requeue"] == requeue


def test_nodes_may_lack_scontrol_and_nothing_else(lab: Lab, folder: Path) -> None:
    script = "srun sh -c 'command -v scontrol; command -v squeue'; scontrol ping; echo code $?"
    lab.change_settings(scontrol=False)
    before = slurmd_start(lab, "n1")
    lab.kill("n1")
    lab.start("n1")
    # Until slurmctld hears of the new one, the node is what it was.
    wait_until(
        lambda: slurmd_start(lab, "n1") != before or None,
        timeout_s=120,
        seen=lambda: lab.run_as_root("scontrol", "show", "node", "n1"),
    )
    lab.wait_for_nodes("idle", ["n1"], timeout_s=120)
    for node in ("n1", "n2"):
        printed = run_job(lab, folder, f"--nodelist={node}", script=script)
        assert [line for line in printed.splitlines() if "not found" not in line] == [
            "/usr/bin/squeue",
            "code 127",
        ]
    assert "UP" in lab.run_as(lab.user, ["scontrol", "ping"]).stdout
    lab.change_settings(scontrol=True)
    printed = run_job(lab, folder, "--nodelist=n2", script=script)
    assert printed.splitlines()[0] == "/usr/bin/scontrol"


def slurmd_start(lab: Lab, node: str) -> str:
    """When the slurmd started that has registered last."""
    shown = lab.run_as_root("scontrol", "show", "node", node)
    return shown.partition("SlurmdStartTime=")[2].split()[0]


def test_expedited_requeue_is_had_where_slurm_has_it(lab: Lab, folder: Path) -> None:
    settings = ["--expedited-requeue", "on", "--requeue-delay-s", "3"]
    if lab.version < (25, 11):
        refused = cluster("set", *settings, folder=lab.folder)
        assert refused.returncode == 1
        assert "25.11 and later have" in refused.stderr
        return
    lab.change_settings(expedited_requeue=True, requeue_delay_s=3)
    output = folder / "output"
    script = 'echo "restarts ${SLURM_RESTART_COUNT:-0}"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    argv = [f"--output={output}", "--open-mode=append"]
    for option in ("--requeue", "--requeue=expedite"):
        job = lab.sbatch_as(lab.user, option, *argv, script=script)
        lab.wait_for_text(output, "restarts 0", 100)
        lab.run_as(lab.user, ["scontrol", "requeue", job])
        lab.wait_for_text(output, "restarts 1", 100)
        output.unlink()


def start_signal_logger(lab: Lab, folder: Path) -> str:
    job = lab.sbatch_as(
        lab.user,
        "--nodes=2",
        "--nodelist=n[1-2]",
        "--ntasks-per-node=2",
        "--signal=USR1@30",
        f"--output={folder}/output",
        script=f"export FOLDER={folder}\n{LOGS_SIGNALS}",
    )
    wait_until(
        lambda: count(folder, "task ready") == 4 or None,
        timeout_s=120,
        seen=lambda: f"{count(folder, 'task ready')} of 4 tasks ready",
    )
    return job


def signals(folder: Path) -> list[str]:
    """What has been logged, in the order in which it was."""
    log = folder / "signals"
    return log.read_text().splitlines() if log.exists() else []


def count(folder: Path, line: str) -> int:
    return signals(folder).count(line)


def wait_for_count(folder: Path, line: str, number: int, *, timeout_s: float) -> None:
    wait_until(
        lambda: count(folder, line) >= number or None,
        timeout_s=timeout_s,
        seen=lambda: f"`{line}` {count(folder, line)} times in\n{(folder / 'signals').read_text()}",
    )


def test_preemption_sends_term_to_the_tasks_first(lab: Lab, folder: Path) -> None:
    # The second round comes some 15 s later whatever a shorter GraceTime says (seen on 22.05).
    lab.change_settings(grace_s=15)
    job = start_signal_logger(lab, folder)
    lab.preempt(2, seconds=20, nodelist="n[1-2]")
    wait_for_count(folder, "shell TERM", 1, timeout_s=120)
    logged = signals(folder)
    assert logged[: logged.index("shell TERM")].count("task TERM") >= 4, logged
    assert "task USR1" not in logged
    lab.wait_for_runs(job, ["PREEMPTED", "PENDING"])


def test_preemption_sends_a_jobs_own_signal_first_where_the_site_says_so(
    lab: Lab, folder: Path
) -> None:
    lab.set_send_user_signal(True)
    start_signal_logger(lab, folder)
    lab.preempt(2, seconds=20, nodelist="n[1-2]")
    wait_for_count(folder, "task USR1", 4, timeout_s=120)
    logged = signals(folder)
    ends = [at for at, line in enumerate(logged) if line.endswith("TERM")]  # when grace is over
    first = logged[: min(ends, default=len(logged))]
    assert first.count("task USR1") >= 4 and "shell USR1" not in first, logged


def test_a_requeued_job_waits_two_minutes_unless_its_owner_hastens_it(
    lab: Lab, folder: Path
) -> None:
    output = folder / "output"
    script = 'echo "restarts ${SLURM_RESTART_COUNT:-0}"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    argv = [f"--output={output}", "--open-mode=append"]
    job = lab.sbatch_as(lab.user, *argv, script=script)
    lab.wait_for_text(output, "restarts 0", 100)
    lab.run_as(lab.user, ["scontrol", "requeue", job])
    lab.wait_for_state(job, ["PENDING"], timeout_s=100)
    # The reason comes with the scheduler's next look.
    wait_until(
        lambda: lab.show_job(job)["Reason"] == "BeginTime" or None,
        timeout_s=60,
        seen=lambda: str(lab.show_job(job)),
    )
    lab.hasten(job)
    lab.wait_for_text(output, "restarts 1", 100)
    lab.wait_for_runs(job, ["REQUEUED", "COMPLETED"])


def test_a_killed_node_loses_processes_and_memory_but_not_its_disk(lab: Lab, folder: Path) -> None:
    disk = lab.status()["node_disk"]
    script = f"touch /tmp/memory /dev/shm/memory {disk}/kept; echo $$ > {folder}/pid; sleep 600"
    lab.sbatch_as(lab.user, "--nodelist=n3", f"--output={folder}/output", script=script)
    lab.wait_for_text(folder / "pid", "\n", 120)
    user_id = pwd.getpwnam(lab.user).pw_uid
    assert processes_of(user_id)
    lab.kill("n3")
    assert not processes_of(user_id)
    lab.start("n3")
    lab.cancel_all()
    lab.wait_for_nodes("idle", ["n3"], timeout_s=120)
    left = lab.run_inside("n3", "ls", "/tmp", "/dev/shm", disk)
    assert "memory" not in left and "kept" in left


def processes_of(user_id: int) -> list[str]:
    shown = subprocess.run(
        ["ps", "-o", "args=", "-u", str(user_id)], capture_output=True, text=True, check=False
    )
    return shown.stdout.splitlines()


@pytest.mark.full
def test_a_cut_node_goes_down_and_comes_back(lab: Lab, folder: Path) -> None:
    job = lab.sbatch_as(lab.user, "--nodelist=n4", f"--output={folder}/output", script="sleep 900")
    lab.wait_for_state(job, ["RUNNING"], timeout_s=100)
    lab.cut("n4")
    lab.wait_for_nodes("down*", ["n4"], timeout_s=100)
    assert processes_of(pwd.getpwnam(lab.user).pw_uid), "the cut node runs on by itself"
    lab.wait_for_runs(job, ["NODE_FAIL", "PENDING"])
    lab.join("n4")
    lab.wait_for_nodes("idle", ["n4"], timeout_s=120)
