"""A partition that is for some accounts or QOS only is judged as the recorded Slurm went about it.

What became of a job of account `childx` (below `parentx`) and QOS `normal` in a partition with each
of these lists was seen on each of the three versions.
"""

from pathlib import Path

import pytest
from doctor_inputs import DATA, VERSIONS, Slurm, lines_of

from ftslurm.doctor.command import slurm_lines
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN

RECORDED: Path = DATA / "slurm-22.05"
TREE = (RECORDED / "accounts.txt").read_text()
"""What sacctmgr prints of all accounts."""
USER = "childx|childx||normal|normal,qx\nchildx|ftslurm|||normal\n"
ENFORCED = "associations,limits,qos"


def let_in(version, lists, enforce="none", **more):
    told = {"user": USER, "tree": TREE, **more}
    found = lines_of(version, lists=lists, AccountingStorageEnforce=enforce, **told)
    return found["slurm.let_in"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("lists", "free", "enforced"),
    [  # waits for ever on: 22.05 whatever is enforced; later versions with `associations`
        ("AllowAccounts=childx", "", ""),
        ("AllowAccounts=otherx", "22.05", "22.05 24.11 26.05"),
        ("AllowAccounts=parentx", "22.05", "22.05"),
        ("DenyAccounts=childx", "22.05", "22.05 24.11 26.05"),
        ("DenyAccounts=parentx", "", "24.11 26.05"),
        ("DenyAccounts=otherx", "", ""),
        ("AllowQos=qx", "22.05 24.11 26.05", "22.05 24.11 26.05"),
        ("DenyQos=normal", "22.05 24.11 26.05", "22.05 24.11 26.05"),
        ("AllowAccounts=childx,otherx DenyQos=", "", ""),  # as 22.05 and 24.11 print no DenyQos
    ],
)
def test_whoever_waits_for_ever_is_told_and_nobody_else(version, lists, free, enforced):
    for enforce, waits in (("none", free), (ENFORCED, enforced)):
        line = let_in(version, lists, enforce)
        assert line.state == (FAIL if version in waits else OK), (enforce, line)
        assert lists.split()[0] in line.seen
        assert ("waits for ever" in line.todo) is (version in waits)


def test_the_account_and_the_qos_that_are_named_are_judged():
    assert let_in("22.05", "AllowAccounts=otherx", account="otherx").state == OK
    assert let_in("22.05", "AllowAccounts=childx", account="ftslurm").state == FAIL
    assert let_in("22.05", "AllowQos=qx", qos="qx").state == OK
    assert let_in("22.05", "DenyQos=qx", qos="qx").state == FAIL
    assert let_in("22.05", "AllowAccounts=ChildX DenyQos=QX").state == OK, "small letters count"
    of_both = let_in("26.05", "AllowAccounts=parentx AllowQos=qx", ENFORCED, qos="qx")
    assert (of_both.state, "AllowAccounts=parentx, AllowQos=qx" in of_both.seen) == (OK, True)


def test_what_accounting_does_not_tell_is_not_claimed():
    line = let_in("22.05", "AllowAccounts=childx", user="|\n")
    assert (line.state, "--account names it" in line.seen) == (SKIPPED, True)
    line = let_in("22.05", "AllowQos=normal", user="childx|childx|||normal,qx\n")
    assert (line.state, "--qos names it" in line.seen) == (SKIPPED, True)
    line = let_in("22.05", "AllowAccounts=otherx AllowQos=normal", user="childx|childx|||a,b\n")
    assert line.state == FAIL, "whatever the QOS is"
    # Which accounts are above one's own: hidden by PrivateData.
    assert let_in("26.05", "AllowAccounts=parentx", ENFORCED, tree="").state == WARN
    assert let_in("26.05", "AllowAccounts=parentx", "none", tree="").state == OK


@pytest.mark.parametrize("version", VERSIONS)
def test_an_account_that_the_list_names_is_judged_whatever_is_above_it(version):
    assert let_in(version, "AllowAccounts=otherx,childx", ENFORCED, tree="").state == OK
    assert let_in(version, "DenyAccounts=childx", ENFORCED, tree="").state == FAIL
    both = "AllowAccounts=childx DenyQos=qx"
    assert let_in(version, both, ENFORCED, tree="", account="ChildX", qos="normal").state == OK


def test_between_the_versions_that_were_seen_only_what_both_say_is_claimed():
    between = {"SLURM_VERSION": "23.02.7"}
    assert let_in("22.05", "AllowAccounts=parentx", ENFORCED, **between).state == WARN
    assert let_in("22.05", "AllowAccounts=otherx", ENFORCED, **between).state == FAIL
    assert let_in("22.05", "AllowAccounts=childx", ENFORCED, **between).state == OK


def test_accounting_is_asked_only_where_a_partition_is_not_for_all():
    assert "for all accounts and QOS" in lines_of("22.05")["slurm.let_in"].seen
    for lists, questions in (("", 0), ("AllowQos=normal", 1), ("AllowAccounts=own", 2)):
        run = Slurm("22.05", lists=lists)
        slurm_lines("low", run=run)
        assert run.asked.count("sacctmgr") == questions
