"""A bucket's settings, by what aws-cli 1.46.3 printed of buckets that a server (moto 5.2.5) plays:
each that is missing is named, and what may not be asked is not claimed."""

import copy
import errno
import json
from pathlib import Path

import pytest

from ftslurm.cli import main
from ftslurm.doctor.checklist_command import read_asked
from ftslurm.doctor.checklist_saves import object_store
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN
from ftslurm.doctor.object_store import check_bucket
from ftslurm.scheduler.protocol import CommandMissing
from ftslurm.scheduler.slurm import CommandHangs, Completed

DATA = Path(__file__).parent / "data" / "aws-cli-1.46.3.json"
RECORDED = json.loads(DATA.read_text())
AWS = "https://good.s3.amazonaws.com"


class Aws:
    """Prints what was recorded of the bucket; `endpoint`: in the address that it signs."""

    def __init__(self, endpoint=AWS, **changed):
        self.recorded = {**copy.deepcopy(RECORDED), **changed}
        self.endpoint, self.asked = endpoint, []

    def __call__(self, argv, timeout_s):
        assert argv[0] == "aws" and 0 < timeout_s <= 30
        self.asked.append(argv[2])
        if argv[1:3] == ["s3", "presign"]:
            return Completed(0, f"{self.endpoint}/x?AWSAccessKeyId=KEY&Signature=SIGNED\n", "")
        return Completed(*self.recorded[argv[argv.index("--bucket") + 1]][argv[2]])


def lines_of(bucket, **more):
    return {line.name: line for line in check_bucket(bucket, run=Aws(**more))}


def states(bucket, **more):
    return {name: line.state for name, line in lines_of(bucket, **more).items()}


ALL = ("s3.versions", "s3.encryption", "s3.tls", "s3.public", "s3.access_log")


def test_a_well_set_bucket_gets_no_complaint_and_a_bare_one_all_of_them():
    assert states("good") == dict.fromkeys(ALL, OK)
    found = lines_of("bare")
    assert {name: line.state for name, line in found.items()} == dict.fromkeys(ALL, WARN)
    assert all(line.todo for line in found.values())
    assert "never enabled" in found["s3.versions"].seen
    assert "was suspended" in lines_of("halted")["s3.versions"].seen


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("s3.versions", "get-bucket-versioning"),
        ("s3.encryption", "get-bucket-encryption"),
        ("s3.tls", "get-bucket-policy"),
        ("s3.public", "get-public-access-block"),
        ("s3.access_log", "get-bucket-logging"),
    ],
)
def test_each_setting_that_is_missing_or_may_not_be_asked_is_named_alone(name, question):
    for source, state in (("bare", WARN), ("shut", SKIPPED)):
        bucket = {**RECORDED["good"], question: RECORDED[source][question]}
        found = states("good", good=bucket)
        assert found == {**dict.fromkeys(ALL, OK), name: state}


def test_an_endpoint_without_tls_is_named_whatever_the_policy_says():
    line = lines_of("good", endpoint="http://minio:9000/good")["s3.tls"]
    assert (line.state, line.seen) == (WARN, "`aws` asks http://minio:9000, without TLS")


STATEMENT = json.loads(json.loads(RECORDED["good"]["get-bucket-policy"][1])["Policy"])["Statement"]


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, OK),
        ({"Action": ["s3:*"], "Condition": {"Bool": {"AWS:SecureTransport": ["false"]}}}, OK),
        ({"Effect": "Allow"}, WARN),
        ({"Principal": {"AWS": "*"}, "Resource": "*"}, OK),
        ({"Action": "s3:GetObject"}, WARN),
        ({"Principal": {"AWS": "arn:aws:iam::1:user/one"}}, WARN),
        ({"Resource": "arn:aws:s3:::good/some/*"}, WARN),
        ({"Resource": "arn:aws:s3:::another/*"}, WARN),
        ({"Condition": {**STATEMENT[0]["Condition"], "StringEquals": {"a": "b"}}}, WARN),
        ({"Condition": {"Bool": {"aws:SecureTransport": "true"}}}, WARN),
        ({"Condition": {"StringEquals": {"aws:SourceVpc": "v"}}}, WARN),
    ],
)
def test_a_policy_refuses_what_has_no_tls_or_it_does_not(changed, state):
    policy = json.dumps({"Statement": {**STATEMENT[0], **changed}})
    answer = [0, json.dumps({"Policy": policy}), ""]
    bucket = {**RECORDED["good"], "get-bucket-policy": answer}
    assert states("good", good=bucket)["s3.tls"] == state


@pytest.mark.parametrize(
    ("bucket", "state", "word"),
    [
        ("none", FAIL, "there is no bucket `none`"),
        ("away", SKIPPED, "Could not connect"),
        ("nobody", SKIPPED, "Unable to locate credentials"),
    ],
)
def test_where_nobody_can_be_asked_that_is_said_once(bucket, state, word):
    aws = Aws()
    (line,) = check_bucket(bucket, run=aws)
    assert (line.name, line.state, word in line.seen) == ("s3", state, True)
    assert aws.asked == ["get-bucket-versioning"]


NO_AWS = [
    (CommandMissing("x"), "not on PATH"),
    (CommandHangs("`aws` gave no answer"), "no answer"),
    (OSError(errno.ENOEXEC, "Exec format error"), "Exec format error"),
]


@pytest.mark.parametrize(("error", "word"), NO_AWS)
def test_without_aws_or_its_answer_nothing_is_claimed(error, word):
    def run(argv, timeout_s):
        raise error

    (line,) = check_bucket("good", run=run)
    assert (line.state, word in line.seen) == (SKIPPED, True)


@pytest.mark.parametrize(("silent", "known"), [("get-bucket-policy", 2), ("presign", 5)])
def test_once_aws_is_silent_it_is_asked_no_more_and_what_it_said_stands(silent, known):
    aws = Aws()

    def run(argv, timeout_s):
        if argv[2] == silent:
            aws.asked.append(silent)
            raise CommandHangs("`aws` gave no answer for 30 s")
        return aws(argv, timeout_s)

    lines = check_bucket("good", run=run)
    assert aws.asked[-1] == silent
    assert [line.name for line in lines] == list(ALL)
    assert [line.state for line in lines] == [OK] * known + [SKIPPED] * (5 - known)
    told = lines[2].seen
    assert "gave no answer" in told or "endpoint `aws` asks is not known" in told


@pytest.mark.parametrize("printed", ["None\n", "[]\n"])
def test_what_is_no_json_is_not_taken_for_an_answer(printed):
    bucket = {**RECORDED["good"], "get-bucket-logging": [0, printed, ""]}
    assert states("good", good=bucket)["s3.access_log"] == SKIPPED


@pytest.mark.parametrize("policy", ["[1]", '{"Statement": [1]}', '{"Statement": {"Action": {}}}'])
def test_a_policy_of_another_make_refuses_nothing(policy):
    answer = [0, json.dumps({"Policy": policy}), ""]
    bucket = {**RECORDED["good"], "get-bucket-policy": answer}
    assert states("good", good=bucket)["s3.tls"] == WARN


@pytest.mark.parametrize(
    ("bucket", "state", "word"),
    [
        ("good", WARN, "only its policy tells"),
        ("bare", WARN, "enable versioning"),
        ("none", FAIL, "name one"),
        ("shut", SKIPPED, "the rights of whoever copies"),
        ("away", SKIPPED, "the rights of whoever copies"),
    ],
)
def test_the_checklist_answers_by_it_with_the_time_of_asking(tmp_path, bucket, state, word):
    asked = read_asked("", tmp_path, None, check_bucket(bucket, run=Aws()), now=lambda: 7.0)
    answer = object_store(asked)
    assert (answer.state, word in answer.todo) == (state, True)
    assert answer.at == (None if state == SKIPPED else 7.0)


def test_the_verb_asks_only_where_a_bucket_is_named(tmp_path, monkeypatch, capsys):
    aws = tmp_path / "bin" / "aws"
    aws.parent.mkdir()
    aws.write_text("#!/bin/sh\necho 'An error occurred (NoSuchBucket) when' >&2; exit 255\n")
    aws.chmod(0o700)
    monkeypatch.setenv("PATH", f"{aws.parent}:/usr/bin:/bin")
    argv = ["doctor", "--here", "--write-gb", "0", "--runs", str(tmp_path)]
    assert main(argv) == 0
    assert "--object-store s3://BUCKET asks" in capsys.readouterr().out
    assert main([*argv, "--object-store", "s3://gone/steps"]) == 1
    assert "there is no bucket `gone`" in capsys.readouterr().out
    assert main([*argv, "--object-store", "gone"]) == 2
    assert "name a bucket, e.g. s3://checkpoints" in capsys.readouterr().err
