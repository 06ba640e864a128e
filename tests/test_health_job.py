"""What Slurm's environment says of a job, and what of a look's findings is that job's."""

import pytest

from ftslurm.health.job import JobFacts, of_job
from ftslurm.health.signals import Gpu
from ftslurm.health.verdict import Verdict

EPILOG = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_USER": "alice", "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GPUS": "0,2,4-6", "SLURMD_NODENAME": "n2", "SLURM_JOB_PARTITION": "low",
}  # fmt: skip
GPUS = [Gpu(index, f"GPU-{index}", f"0000:{index}b:00") for index in range(4)]


def test_an_epilog_is_told_all_of_it() -> None:
    facts = JobFacts.from_environ(EPILOG)
    assert facts == JobFacts("4711", "alice", 1000, (0, 2, 4, 5, 6), "n2", "low")


def test_a_periodic_check_is_told_its_node_alone() -> None:
    assert JobFacts.from_environ({"SLURMD_NODENAME": "n2"}) == JobFacts(node="n2")
    assert JobFacts.from_environ({}).node


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", "../../etc"), ("SLURM_JOB_ID", "7\n"), ("SLURM_JOB_USER", "a b"),
        ("SLURM_JOB_USER", "../x"), ("SLURM_JOB_UID", "-1"), ("SLURM_JOB_PARTITION", "x" * 200),
        ("SLURM_JOB_GPUS", "MIG-5,1"), ("SLURM_JOB_GPUS", "1;2"),
    ],
)  # fmt: skip
def test_a_value_without_the_form_of_one_is_left_out(name: str, value: str) -> None:
    facts = JobFacts.from_environ({**EPILOG, name: value})
    without = JobFacts.from_environ({key: one for key, one in EPILOG.items() if key != name})
    assert facts == without


def test_a_list_of_gpus_has_an_end() -> None:
    facts = JobFacts.from_environ({"SLURM_JOB_GPUS": "0-9999"})
    assert len(facts.gpus) < 300


def handed(gpu: int) -> Verdict:
    return Verdict("warn", "XID13", GPUS[gpu], "", "xid-13", "", hands_to_run=True)


@pytest.mark.parametrize(
    ("job_gpus", "seen", "of_gpu", "is_own"),
    [
        ((1, 2), GPUS, 2, True),
        ((1, 2), GPUS, 3, False),
        ((), GPUS, 3, True),  # a job that has the whole node
        ((1, 2), GPUS[:2], 0, True),  # its cgroup: NVML numbers what it shows from 0
        ((1, 2), GPUS[:2], 3, False),
        ((1, 2), [], 3, True),  # nobody knows
    ],
)
def test_a_fault_of_a_program_is_told_to_the_job_that_had_the_gpu(
    job_gpus: tuple[int, ...], seen: list[Gpu], of_gpu: int, is_own: bool
) -> None:
    (verdict,) = of_job([handed(of_gpu)], JobFacts("7", gpus=job_gpus), seen)
    assert verdict.hands_to_run is is_own and verdict.word == "warn"
