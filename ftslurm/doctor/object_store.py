"""The settings of a bucket that checkpoints are copied to, asked through AWS's command line.

Reads settings only, with whatever rights and endpoint `aws` has here; no object is read, written or
listed. Nothing of ftslurm writes to an object store. Commands and words as of aws-cli 1.46.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from ftslurm.doctor.bucket_lines import (
    ENCRYPTION,
    LOG,
    POLICY,
    PUBLIC,
    STORE,
    VERSIONS,
    Answered,
    judge_bucket,
    no_bucket,
    read_answer,
)
from ftslurm.doctor.line import Line, skipped
from ftslurm.errors import SchedulerError, UsageError
from ftslurm.scheduler.protocol import CommandMissing
from ftslurm.scheduler.slurm import Runner, run_command

ASK_S = 30.0
_QUESTIONS = (VERSIONS, ENCRYPTION, POLICY, PUBLIC, LOG)
_PLACE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/.*)?")
_PATIENCE = ["--cli-connect-timeout", "5", "--cli-read-timeout", "10", "--output", "json"]


def bucket_of(place: str) -> str:
    match = _PLACE.fullmatch(place)
    if match is None:
        raise UsageError(f"--object-store is `{place}`; name a bucket, e.g. s3://checkpoints")
    return match[1]


def check_bucket(bucket: str, *, run: Runner = run_command) -> list[Line]:
    """Once `aws` gives no answer, it is asked no more; what it has said before stands."""
    answers: dict[str, Answered] = {}
    endpoint = ""
    try:
        for question in _QUESTIONS:
            done = run(["aws", "s3api", question, "--bucket", bucket, *_PATIENCE], ASK_S)
            answers[question] = read_answer(done.rc, done.stdout, done.stderr)
            nobody = no_bucket(bucket, answers[question]) if question == VERSIONS else None
            if nobody is not None:
                return [nobody]
        endpoint = _endpoint(bucket, run)
    except CommandMissing:
        return [skipped(STORE, f"`{bucket}` was not asked: `aws` is not on PATH")]
    except (SchedulerError, OSError) as error:  # e.g. of another CPU's `aws`
        if not answers:
            return [skipped(STORE, f"`{bucket}` was not asked: {error}")]
        answers = {**dict.fromkeys(_QUESTIONS, Answered(None, str(error))), **answers}
    return judge_bucket(bucket, endpoint, answers)


def _endpoint(bucket: str, run: Runner) -> str:
    """By an address that `aws` signs without asking anybody; its signature is dropped."""
    done = run(["aws", "s3", "presign", f"s3://{bucket}/x", "--expires-in", "1"], ASK_S)
    found = urlsplit(done.stdout.strip())
    return f"{found.scheme}://{found.netloc}" if done.rc == 0 and found.netloc else ""
