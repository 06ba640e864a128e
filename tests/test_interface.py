"""Where rank 0 is met: the address of an interface, and the first of the ranks' nodes."""

import os

import pytest

from ftslurm.errors import RunError
from ftslurm.files import write_json
from ftslurm.node import interface
from ftslurm.recovery.claim import claim_attempt
from ftslurm.run.attempts import numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec, RunSpec, to_dict

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}


def claimed(folder, **cluster):
    layout = RunLayout(folder)
    spec = to_dict(RunSpec(cluster=ClusterSpec(**cluster)))
    record = {"schema_version": 1, "run_id": "r", "scheduler": "slurm", "spec": spec}
    write_json(layout.run_json, record)
    return layout, lambda: claim_attempt(layout, JOB).split()


@pytest.fixture(autouse=True)
def no_controller(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_the_address_of_rank_0_is_that_of_the_interface(tmp_path):
    _, claim = claimed(tmp_path, nodes=3, interface="lo")
    assert claim()[2] == "127.0.0.1"


def test_an_interface_that_is_not_there_costs_no_attempt_and_names_those_that_are(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    layout, claim = claimed(tmp_path, nodes=3, interface="ib0")
    with pytest.raises(RunError, match=r"`ib0` has no address on node `n7`, which has .*lo"):
        claim()
    assert not layout.attempts.exists() or not numbers(layout)


def test_an_ipv6_address_is_taken_where_there_is_no_ipv4_one(tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 03 40 20 80      ib0\n"
        "fd000000000000000000000000000005 03 40 00 80      ib0\n"
        "fd000000000000000000000000000006 04 40 00 80      ib1\n"
    )
    assert interface._ipv6("ib0", table) == "fd00::5"
    assert interface._ipv6("ib2", table) is None
    assert interface._ipv6("ib0", tmp_path / "none") is None
    assert interface.ipv4_of("no-such") is None


def test_spares_are_the_nodes_behind_those_that_ranks_run_on(tmp_path):
    layout, claim = claimed(tmp_path, nodes=2, spares=1)
    word, _, address, _, _, nodes, count = claim()
    assert (word, address, nodes, count) == ("go", "n1", "n1,n2", "2")
    assert read_attempt(layout, 1).nodes == ["n1", "n2"]


def test_the_name_of_every_interface_here_is_one_that_may_be_asked_for():
    names = [name for _, name in interface.socket.if_nameindex()]
    assert names and all(interface.NAME.fullmatch(name) for name in names), os.uname()
