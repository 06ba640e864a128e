"""A node that falls sick under a job is drained by its epilog, before that job, queued again, is
placed; good nodes stay. Real Slurm, and a probe that reads made-up hardware."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import spine
from fakes.project import slow
from health_site import SICK, HealthSite
from lab import Lab, wait_until
from sick_runs import PlacedRun

from ftslurm.run.attempts import read_attempt, read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BUSY_S = 60
"""What a machine takes that has ten times its work, or stands still; a hang has no end."""
SLURM_WAITS_S = 120
"""Before it places a job again that is not expedited."""
WAYS = ["dead NVLink", *(pytest.param(way, marks=pytest.mark.full) for way in list(SICK)[1:])]
RUN = ("cluster.gpus_per_node=2", "health.probe=never")
"""The run does not look itself: what the root-owned copy does is shown."""


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> PlacedRun:
    run = PlacedRun(lab, "undisturbed", *RUN)
    run.end_as("COMPLETED")
    return run


def goes_on_elsewhere(run: PlacedRun, undisturbed: PlacedRun, site: HealthSite, code: str) -> None:
    """n2 is drained for `code` in time, and the run has the bits it would have had anyway."""
    first, second = run.attempts
    assert first.nodes == ["n1", "n2"] and "n2" not in second.nodes, site.says()
    assert list(site.drained()) == ["n2"], site.says()
    assert site.drained()["n2"].startswith(f"ftslurm:{code} "), site.says()
    epilog = site.nodes["n2"].calls("epilog")[-1]
    assert epilog.ended < second.claimed_at, "the job was placed before the epilog had ended"
    saved, restored = [
        [event["step"] for event in read_events(run.run.layout.attempt(number))
         if event["kind"] == kind]
        for number, kind in ((1, "committed"), (2, "restored"))
    ]  # fmt: skip
    assert restored == saved[-1:], run.says()
    assert run.run.losses == undisturbed.run.losses
    assert run.run.digest == undisturbed.run.digest


@pytest.mark.parametrize("way", WAYS)
def test_a_sick_node_is_drained_before_the_job_is_placed_again(
    site: HealthSite, undisturbed: PlacedRun, way: str
) -> None:
    site.run_in_slurm("prolog", "epilog", kill_wait_s=15)
    run = PlacedRun(site.lab, "sick", *RUN, *slow())
    run.wait_for_training(1)
    site.nodes["n2"].fall_sick(way)
    for node in ("n1", "n2"):
        site.nodes[node].hold("epilog")
    starts_at = run.queue_again_at_once()
    site.wait_until_held(["n1", "n2"], "epilog")
    # It could be placed, but for the epilogs; Slurm looks for room each second or two.
    time.sleep(max(3.0, starts_at + 3 - time.time()))
    for node in ("n1", "n2"):
        site.nodes[node].release("epilog")
    # A start two minutes from the end of the epilogs has taken the place of the one asked for (seen
    # on 22.05, 24.11 and 26.05).
    site.lab.hasten(run.job_id, timeout_s=90)
    run.end_as("COMPLETED")
    goes_on_elsewhere(run, undisturbed, site, SICK[way].code)
    epilog = site.nodes["n2"].calls("epilog")[-1]
    print(f"{way}: {epilog.seconds:.2f} s of the epilog, held for {epilog.seen - epilog.began:.2f}")


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.timeout(500)
def test_torch_ranks_go_on_elsewhere_with_the_same_bits(site: HealthSite) -> None:
    lab = site.lab
    undisturbed = spine.submit(lab, "health.probe=never", name="torch-undisturbed")
    undisturbed.finish()
    site.run_in_slurm("prolog", "epilog", kill_wait_s=15)
    run = spine.submit(lab, "health.probe=never", name="torch-sick")
    run.wait_for_step(1, 15)
    site.nodes["n2"].fall_sick("dead NVLink")
    lab.run_as(lab.user, ["scontrol", "requeue", run.job_id])
    lab.hasten(run.job_id, timeout_s=90)
    run.finish()
    nodes = [read_attempt(run.layout, number).nodes for number in (1, 2)]
    assert nodes[0] == ["n1", "n2"] and "n2" not in nodes[1], site.says()
    assert run.losses == undisturbed.losses
    assert run.parameter_digest == undisturbed.parameter_digest


@pytest.mark.full
def test_expedited_the_run_is_placed_in_the_moment_in_which_the_drain_is_there(
    site: HealthSite, undisturbed: PlacedRun
) -> None:
    lab = site.lab
    require_expedited_requeue(lab)
    site.run_in_slurm("prolog", "epilog", expedited_requeue=True, kill_wait_s=15)
    run = PlacedRun(lab, "expedited", *RUN, *slow())
    run.wait_for_training(1)
    site.nodes["n2"].fall_sick("remap failure")
    lab.run_as(lab.user, ["scontrol", "requeue", run.job_id])
    run.end_as("COMPLETED")
    goes_on_elsewhere(run, undisturbed, site, "REMAP-FAIL")
    waited_s = run.attempts[1].claimed_at - site.nodes["n2"].calls("epilog")[-1].ended
    print(f"claimed {waited_s:.2f} s after the epilog")
    assert waited_s < SLURM_WAITS_S / 2, run.says()


@pytest.mark.full
def test_expedited_a_job_that_failed_on_a_sick_node_starts_again_elsewhere_by_the_exit_code(
    site: HealthSite,
) -> None:
    """Of the epilog: with 0 the job would stay, held."""
    lab = site.lab
    require_expedited_requeue(lab)
    site.run_in_slurm("prolog", "epilog", expedited_requeue=True)
    output = lab.home(lab.user) / "expedited.out"
    fell = lab.home(lab.user) / f"fell-{time.time_ns()}"
    script = (
        'echo "on $SLURM_JOB_NODELIST"; [ -z "$SLURM_RESTART_COUNT" ] || exit 0\n'
        f"until [ -e {fell} ]; do sleep 0.2; done; exit 3"
    )
    argv = ["--requeue=expedite", "--nodes=2", f"--output={output}", "--open-mode=append"]
    job = lab.sbatch_as(lab.user, *argv, script=script)
    lab.wait_for_text(output, "on n[1-2]\n", 30)
    site.nodes["n2"].fall_sick("remap failure")
    fell.touch()
    assert lab.wait_for_end(job, 60) == "COMPLETED"
    first, second = output.read_text().splitlines()
    assert "2" not in second, (first, second)


def require_expedited_requeue(lab: Lab) -> None:
    if lab.version < (25, 11):
        pytest.skip("Slurm before 25.11 has no --requeue=expedite")


@pytest.mark.full
def test_slurm_keeps_a_nodes_note_when_it_drains_it_by_our_exit_code(site: HealthSite) -> None:
    """slurm.conf alone can give a node in service a reason: scontrol drops one that comes without
    a drain, and a job's start takes it away, until slurm.conf is read again."""
    lab, note = site.lab, "noisy_fan_ticket_4711"
    site.run_in_slurm("prolog", "epilog")
    job = lab.sbatch_as(lab.user, "--nodelist=n2", "--output=/dev/null", script="sleep 300")
    lab.wait_for_state(job, ["RUNNING"], 40)
    conf = lab.folder / "etc/slurm.conf"
    conf.write_text(conf.read_text().replace(" State=UNKNOWN", f" State=UNKNOWN Reason={note}"))
    lab.run_as_root("scontrol", "reconfigure")
    assert not site.drained(), "a note alone drains nothing"
    site.nodes["n2"].fall_sick("Xid 48")
    lab.run_as(lab.user, ["scancel", job])
    assert site.wait_for_call("n2", "epilog", job).code == 1, site.says()
    drained = wait_until(lambda: site.drained() or None, timeout_s=40, seen=site.says)
    lab.run_as_root("scontrol", "update", "NodeName=n[1-4]", "Reason=none")
    assert list(drained) == ["n2"] and drained["n2"].startswith(note), site.says()


@pytest.mark.full
def test_four_epilogs_with_one_false_signature_leave_nodes_to_work_with(site: HealthSite) -> None:
    lab = site.lab
    site.run_in_slurm("prolog", "epilog")
    job = lab.sbatch_as(lab.user, "--nodes=4", "--output=/dev/null", script="sleep 300")
    lab.wait_for_state(job, ["RUNNING"], 40)
    for machine in site.nodes.values():
        machine.fall_sick("remap failure")
        machine.hold("epilog")
    lab.run_as(lab.user, ["scancel", job])
    site.wait_until_held(lab.nodes, "epilog")
    site.release("epilog")
    for node in lab.nodes:
        site.wait_for_call(node, "epilog", job)
    left = [node for node in lab.nodes if node not in site.drained()]
    assert len(left) in (2, 3), site.says()
    # What was undone stays so: no job after this one takes another node.
    job = lab.sbatch_as(lab.user, f"--nodes={len(left)}", "--output=/dev/null", script="true")
    for node in left:
        site.wait_for_call(node, "epilog", job)
    assert [node for node in lab.nodes if node not in site.drained()] == left, site.says()


def test_an_epilog_takes_no_second_of_work_and_a_dead_driver_does_not_hold_it(
    site: HealthSite,
) -> None:
    lab = site.lab
    site.run_in_slurm("prolog", "epilog")
    argv = ["--gres=gpu:2", "--nodes=4", "--output=/dev/null"]
    job = lab.sbatch_as(lab.user, *argv, script="true")
    healthy = [site.wait_for_call(node, "epilog", job) for node in lab.nodes]
    prologs = [call for node in lab.nodes for call in site.nodes[node].calls("prolog")]
    site.nodes["n2"].fall_sick("driver hang")
    job = lab.sbatch_as(lab.user, *argv, script="true")
    hanging = [site.wait_for_call("n2", name, job) for name in ("prolog", "epilog")]
    for name, calls in (("prolog", prologs), ("epilog", healthy), ("with a hang", hanging)):
        print(name, *(f"{call.seconds:.2f} s ({call.cpu_s:.2f} of CPU)" for call in calls))
    assert [call.code for call in (*healthy, *prologs)] == [0] * 8, site.says()
    # The least: what a machine that stands still has lost may be counted as work.
    assert min(call.cpu_s for call in healthy) < 1.0, site.says()
    assert hanging[0].seconds < 5 + BUSY_S and hanging[1].seconds < 30 + BUSY_S, site.says()


@pytest.mark.full
def test_what_a_user_has_put_in_roots_way_is_not_followed(site: HealthSite) -> None:
    """A site that has its state and its verdicts where users can write."""
    lab = site.lab
    disk, shared = Path(lab.status()["node_disk"]), lab.home(lab.user) / "verdicts"
    victim = site.folder / "victim"
    victim.mkdir(exist_ok=True)
    before = sorted(victim.iterdir())
    traps = [
        "set -e",
        f"mkdir -p {disk}/own {shared}",
        f"ln -sfn {victim} {disk}/trap",
        f"ln -sfn {victim} {shared}/n1",
    ]
    for name in ("lock", "memory.json", "drain.json", "breaker.json"):
        traps.append(f"ln -sfn {victim}/{name} {disk}/own/{name}")
    on_n1 = ["--nodelist=n1", "--output=/dev/null"]
    job = lab.sbatch_as(lab.user, *on_n1, script="\n".join(traps))
    assert lab.wait_for_end(job, 30) == "COMPLETED"
    site.run_in_slurm("prolog", "epilog")
    for key, place in (
        ("state_dir", disk / "trap"),
        ("state_dir", disk / "own"),
        ("verdict_dir", shared),
    ):
        site.configure(**{key: str(place)})
        job = lab.sbatch_as(lab.user, *on_n1, script="true")
        site.wait_for_call("n1", "epilog", job)
        assert sorted(victim.iterdir()) == before, site.says()
        assert str(place) in site.nodes["n1"].says(), "nobody is told"
