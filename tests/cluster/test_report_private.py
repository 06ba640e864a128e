"""`ftslurm report` where a site shows users their own jobs alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_runs import daemon_away
from lab import Lab, wait_until
from report_told import ask, new_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def private(lab: Lab) -> Iterator[Path]:
    """slurmdbd tells users of their own jobs only; its setting, as slurm.conf's is of slurmctld."""
    conf = lab.folder / "etc/slurmdbd.conf"
    before = conf.read_text()
    with daemon_away(lab, "slurmdbd", verb="stop"):
        conf.write_text(f"{before}PrivateData=jobs\n")
    yield conf
    with daemon_away(lab, "slurmdbd", verb="stop"):
        conf.write_text(before)


NOTE, MAYBE = "no jobs of others (PrivateData=jobs)", "it may be that slurmdbd hides them"


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> dict[str, str]:
    """One of each user, by user."""
    found = {}
    for user in (lab.user, lab.other_user):
        found[user] = lab.sbatch_as(user, "--output=/dev/null", script="true")
    for job_id in found.values():
        assert lab.wait_for_end(job_id, 120) == "COMPLETED"
        lab.wait_for_runs(job_id, ["COMPLETED"])
    # A table up to `now` has a job two seconds after one by its number has (22.05: seen).
    wait_until(
        lambda: {*found.values()} <= told(lab, "--all-users")[0] or None,
        timeout_s=120,
        seen=lambda: f"{found}, of which not all are told",
    )
    return found


def told(lab: Lab, *words: str, user: str = "") -> tuple[set[str], str]:
    """The jobs it tells of, and its notes."""
    folder = new_folder(lab)
    done = ask(lab, folder, "--json", "--since=1h", *words, user=user)
    record = json.loads(done.stdout)
    return {job["job_id"] for job in record["jobs"]}, " ".join(record["source"]["notes"])


def test_where_all_are_shown_nothing_is_said(lab: Lab, jobs: dict[str, str]) -> None:
    seen, notes = told(lab, "--all-users")
    assert {*jobs.values()} <= seen and "PrivateData" not in notes, notes
    seen, _ = told(lab, f"--user={lab.other_user}")
    assert jobs[lab.other_user] in seen and jobs[lab.user] not in seen


def test_where_others_are_hidden_that_is_said_to_whom_it_matters(
    lab: Lab, jobs: dict[str, str], private: Path
) -> None:
    own, other = jobs[lab.user], jobs[lab.other_user]
    note = NOTE if lab.version <= (24, 11) else MAYBE
    for words in (["--all-users"], [f"--user={lab.other_user}"]):
        seen, notes = told(lab, *words)
        assert other not in seen and note in notes, words
    seen, notes = told(lab)
    assert own in seen and "PrivateData" not in notes
    seen, notes = told(lab, "--all-users", user="root")
    assert {own, other} <= seen and "PrivateData" not in notes
    done = ask(lab, new_folder(lab), other)
    assert done.returncode == 3
    assert f"nothing is known of job {other}" in done.stderr and note in done.stderr
