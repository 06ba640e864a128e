"""A spare matches the node that it stands in for in GPU model, count and network, or is none."""

from functools import partial

import pytest
from fakes.batch_loop import allocated, be_hasty, begin, end
from fakes.nvml import nodes as nvml_nodes
from test_ask_agents import Leader

from ftslurm.agent.node_kind import Inquirer, OwnKind
from ftslurm.diagnosis import node_kind
from ftslurm.health.settings import HealthSettings
from ftslurm.recovery.actions import REQUEUED, RESTART
from ftslurm.recovery.exclusion import place
from ftslurm.recovery.likeness import GPUS, NETWORK, Kind, likeness
from ftslurm.run.attempts import read_attempt, read_events
from ftslurm.run.node_memory import EXCLUDED, note_node
from ftslurm.run.spec import ClusterSpec, ParallelSpec, RunSpec
from ftslurm.scheduler import accounting
from ftslurm.scheduler.accounting import NodeState
from ftslurm.scheduler.slurm_parse import gpus_by_type

H100, A100 = (("NVIDIA H100 80GB HBM3", 8),), (("NVIDIA A100-SXM4-80GB", 8),)
IB8 = (("InfiniBand 400 Gb/s", 8),)
A = Kind(gpus=H100, ports=IB8)
B = Kind(gpus=A100, ports=IB8)


def gres(text):
    return Kind(gres=tuple(sorted(gpus_by_type(text).items())))


@pytest.mark.parametrize(("one", "wanted", "gpus", "against"), [
    (A, A, 8, ""),
    (B, A, 8, "8 x NVIDIA A100-SXM4-80GB where 8 x NVIDIA H100 80GB HBM3 are needed"),
    (Kind(gpus=(("NVIDIA H100 80GB HBM3", 7),)), A, 8, "7 x"),
    (Kind(gpus=(("NVIDIA H100 80GB HBM3", 7),)), A, 4, ""),
    (Kind(gpus=(("NVIDIA H100 80GB HBM3", 7),)), A, 0, "7 x"),
    (Kind(gpus=A100), A, None, ""),  # ranks that use none
    (gres("gpu:a100:8(S:0-1)"), gres("gpu:h100:8,nic:2"), 8, "8 x a100 where 8 x h100"),
    (gres("gpu:h100:8"), gres("gpu:h100:8"), 8, ""),
    (gres("gpu:8"), gres("gpu:h100:8"), 8, ""),
    (gres("gpu:4"), gres("gpu:8"), 8, "it has 4 GPUs where 8 are needed"),
    # What the driver says counts before what is written in a file.
    (Kind(gpus=H100, gres=(("h100sxm", 8),)), Kind(gpus=H100, gres=(("h100", 8),)), 8, ""),
    (Kind(ports=(("InfiniBand 400 Gb/s", 7),)), A, 8, "7 x InfiniBand 400 Gb/s where 8 x"),
    (Kind(ports=(("InfiniBand 200 Gb/s", 8),)), A, 8, "8 x InfiniBand 200 Gb/s where 8 x Infini"),
    (Kind(ports=(("Ethernet 400 Gb/s", 8),)), A, 8, "8 x Ethernet 400 Gb/s"),
    (Kind(ports=()), A, 8, "none where 8 x InfiniBand"),
    (Kind(ports=(("InfiniBand 400 Gb/s", 9),)), A, 8, ""),
    (Kind(interface_mbps=10_000), Kind(interface_mbps=25_000), 8, "10000 Mb/s where 25000"),
    (Kind(interface_mbps=25_000), Kind(interface_mbps=10_000), 8, ""),
    (Kind(), A, 8, ""),
    # A port of the board's own, or for storage, is not what ranks talk over.
    (A, Kind(ports=(*IB8, ("Ethernet 25 Gb/s", 1))), 8, ""),
    (A, Kind(ports=(*IB8, ("Ethernet 200 Gb/s", 1))), 8, "where 8 x InfiniBand 400 Gb/s, 1 x Eth"),
    # One model, named by an older driver, or by another hand.
    (Kind(gpus=(("H100 80GB HBM3", 8),)), A, 8, ""),
    (gres("gpu:nvidia_h100_80gb_hbm3:8"), gres("gpu:H100_80GB_HBM3:8"), 8, ""),
    (gres("gpu:1g.10gb:56"), gres("gpu:a100:8"), 8, "56 x 1g.10gb where 8 x a100 are needed"),
])  # fmt: skip
def test_a_node_matches_in_model_count_and_network(one, wanted, gpus, against):
    found = likeness(one, wanted, gpus)
    assert against in found.against and bool(against) == bool(found.against)


def test_what_is_not_known_is_no_mismatch_and_is_said():
    assert likeness(Kind(), A, 8).unknown == (NETWORK, GPUS)
    assert likeness(Kind(ports=IB8), A, 8).unknown == (GPUS,)
    assert likeness(gres("gpu:8"), gres("gpu:h100:8"), 8).unknown == (NETWORK, GPUS)
    assert likeness(A, A, 8).unknown == ()


def test_a_kind_is_the_same_when_it_is_read_back():
    whole = Kind(gpus=H100, gres=(("h100", 8),), ports=(), interface_mbps=10_000)
    for kind in (whole, Kind(), A):
        assert Kind.from_record(kind.to_record()) == kind
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Kind.from_record({"gpus": 3})


def placed(kinds, *, wanted=2, least=None, unusable=(), faults=None, gpus=8):
    """`kinds`: of n1, n2, ...; None: nothing is known of it."""
    names = [f"n{i}" for i in range(1, len(kinds) + 1)]
    known = {name: kind for name, kind in zip(names, kinds) if kind is not None}
    return place(
        names, wanted=wanted, least=least or wanted, unusable=dict.fromkeys(unusable, "is out"),
        faults=faults or {}, kinds=known, gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize(("kinds", "more", "ranks_on"), [
    ([A, A, A], {"unusable": ["n2"]}, ["n1", "n3"]),
    ([A, A, B, A], {"unusable": ["n2"]}, ["n1", "n4"]),
    # At the start the nodes that are alike are taken, and the odd one is left.
    ([A, B, A], {}, ["n1", "n3"]),
    ([A, B, A, A], {"wanted": 3}, ["n1", "n3", "n4"]),
    # The batch script's node is there whatever it is; the others are of one kind.
    ([B, A, A, A], {"wanted": 3}, ["n1", "n2", "n3"]),
    ([B, A, A, A], {"wanted": 3, "unusable": ["n2"]}, ["n1", "n3", "n4"]),
    ([B, A, B, A], {"wanted": 3}, ["n1", "n2", "n3"]),
    # Not alike in any choice: each is replaced by one that is like it.
    ([A, B, B], {}, ["n1", "n2"]),
    ([A, B, B], {"unusable": ["n2"]}, ["n1", "n3"]),
    # One that is known to match before one of which it is not known; a fault counts before.
    ([A, A, None, A], {"unusable": ["n2"]}, ["n1", "n4"]),
    ([A, A, None, A], {"unusable": ["n2"], "faults": {"n4": 1}}, ["n1", "n3"]),
    ([A, A, B, A], {"faults": {"n2": 1}}, ["n1", "n4"]),
    ([A, A, B], {"faults": {"n2": 1}}, ["n1", "n2"]),
    # What a lost node had not told is taken to be as with those it was chosen with.
    ([A, None, B, A], {"unusable": ["n2"]}, ["n1", "n4"]),
    ([None, A, A, B], {"wanted": 3}, ["n1", "n2", "n3"]),
    ([gres("gpu:h100:8"), gres("gpu:h100:8"), Kind(gpus=A100, gres=(("a100", 8),)), None],
     {"unusable": ["n2"]}, ["n1", "n4"]),
    ([None, A, B], {"wanted": 3}, ["n1", "n2", "n3"]),
    ([A, A, B], {"unusable": ["n2"], "gpus": None}, ["n1", "n3"]),
    # One that has less than most is the odd one, though all could stand in for it.
    ([A, Kind(gpus=H100, ports=(("InfiniBand 400 Gb/s", 7),)), A], {}, ["n1", "n3"]),
    ([A, Kind(gpus=H100, ports=(("InfiniBand 400 Gb/s", 7),)), A], {"wanted": 3},
     ["n1", "n2", "n3"]),
    # What is known of one of the many is taken to be so of all.
    ([Kind(gpus=H100), A, Kind(gpus=H100, ports=(("InfiniBand 200 Gb/s", 8),))],
     {"unusable": ["n2"]}, []),
    # One that would do in two places is left where no other would.
    ([A, A, Kind(gpus=(("NVIDIA L4", 4),)), Kind(gpus=(("NVIDIA L4", 8),))],
     {"wanted": 4, "faults": {"n3": 1}, "gpus": 0}, ["n1", "n2", "n3", "n4"]),
])  # fmt: skip
def test_ranks_run_on_nodes_that_match_as_far_as_there_are_such(kinds, more, ranks_on):
    assert placed(kinds, **more).ranks_on == ranks_on


def test_a_spare_that_does_not_match_is_as_good_as_none():
    here = placed([A, A, B], unusable=["n2"])
    assert not here.serves
    assert "1 of its nodes can be used, 2 are needed" in here.why_not
    assert "n3 can stand in for none of the others: its GPUs are 8 x NVIDIA A100" in here.why_not
    fewer = placed([A, A, B, A], wanted=3, least=1, unusable=["n2"])
    assert fewer.ranks_on == ["n1", "n4"] and "n3" in fewer.left_out


def test_an_odd_node_is_told_of_whether_it_is_left_out_or_has_to_serve():
    here = placed([A, B, A])
    assert here.spares == [] and "NVIDIA A100" in here.left_out["n2"] and here.doubts == []
    mixed = placed([A, B, B, A], wanted=4)
    assert mixed.spares == [] and mixed.left_out == {}
    assert [doubt.partition(" is unlike")[0] for doubt in mixed.doubts] == ["node n2", "node n3"]


def test_that_it_is_not_known_whether_a_spare_matches_is_told_when_it_serves():
    assert placed([A, A, None]).doubts == []
    assert placed([A, A, None], unusable=["n2"]).doubts == [
        "node n3 stands in for another, and whether its network and GPU model is the same is not "
        "known"
    ]
    assert placed([A, A, A], unusable=["n2"]).doubts == []


def test_a_thousand_nodes_are_placed_in_no_time(record_property):
    kinds = [A if i % 7 else B for i in range(1250)]
    here = placed(kinds, wanted=1000, unusable=["n3"])
    assert len(here.ranks_on) == 1000 and "n3" not in here.ranks_on


# What a node tells.


def make_port(root, device, port, *, rate="400 Gb/sec (4X NDR)", layer="InfiniBand", state=4):
    folder = root / "sys/class/infiniband" / device / "ports" / str(port)
    folder.mkdir(parents=True)
    told = {"state": f"{state}: {'ACTIVE' if state == 4 else 'DOWN'}", "rate": rate}
    for name, text in {**told, "link_layer": layer}.items():
        (folder / name).write_text(f"{text}\n")


def test_ports_that_are_up_and_the_interfaces_rate_are_read(tmp_path):
    assert node_kind.ports(tmp_path) == {}
    for number in range(3):
        make_port(tmp_path, f"mlx5_{number}", 1, state=4 if number else 1)
    make_port(tmp_path, "mlx5_9", 1, rate="25 Gb/sec (1X EDR)", layer="Ethernet")
    assert node_kind.ports(tmp_path) == {"InfiniBand 400 Gb/s": 2, "Ethernet 25 Gb/s": 1}
    net = tmp_path / "sys/class/net/ib0"
    net.mkdir(parents=True)
    for text, told in (("200000\n", 200_000), ("-1\n", None), ("", None)):
        (net / "speed").write_text(text)
        assert node_kind.interface_mbps("ib0", tmp_path) == told
    assert node_kind.interface_mbps("lo9", tmp_path) is None


def test_an_agent_tells_its_gpus_and_a_driver_that_hangs_costs_only_these(
    library, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv(nvml_nodes.STATE_VARIABLE, str(tmp_path / "state"))
    node = nvml_nodes.Node(tmp_path / "state", "A100", gpus=2)
    own = OwnKind(interface=None, library=library)
    assert own.look() == {"ports": node_kind.ports(), "gpus": {"NVIDIA A100-SXM4-80GB": 2}}
    assert "gpus" not in OwnKind(None, None).look()
    node.set(1, "mig", 1)  # its name stays that of the whole
    assert own.look() == {"ports": node_kind.ports()}
    node.set(1, "stuck:nvmlDeviceGetName", 1)
    monkeypatch.setattr("ftslurm.agent.node_kind.DEADLINE_S", 8.0)
    assert own.look() == {"ports": node_kind.ports()}
    assert "not all known: no end within 8 s" in capfd.readouterr().err
    node.set("*", "gpus", 0)  # a step to which none is shown
    assert "gpus" not in OwnKind(None, library).look()


def asked_in(seconds, ports_at, monkeypatch):
    """What agents are asked, and what is known at last. `ports_at`: node -> ports, by the second;
    None: a look at them hangs."""
    now, given, known = [0], [], {}
    monkeypatch.setattr("ftslurm.agent.node_kind.time.monotonic", lambda: float(now[0]))

    class Orders:
        def give(self, do, nodes, *, within_s, then, gpus):
            given.append((do, sorted(nodes), gpus))
            ports = {node: ports_at(node, now[0]) for node in nodes}
            told = {"gpus": dict(H100)} if gpus else {}
            then({
                node: {"kind": told if ports[node] is None else {"ports": ports[node], **told}}
                for node in nodes
            })  # fmt: skip

    inquirer = Inquirer(Orders(), lambda: ["n1", "n2", "n3"], known)
    for now[0] in range(seconds):
        inquirer.look()
    return given, known


def test_a_node_whose_network_is_not_as_most_nodes_is_looked_at_again(monkeypatch):
    up, down = {"InfiniBand 400 Gb/s": 8}, {"InfiniBand 400 Gb/s": 7}
    at_first = ("kind", ["n1", "n2", "n3"], True)

    def flaps(node, at):
        return down if node == "n3" and at < 450 else up

    given, known = asked_in(1000, flaps, monkeypatch)
    assert given == [at_first, ("kind", ["n3"], False), ("kind", ["n3"], False)]
    assert known["n3"] == {"ports": up, "gpus": dict(H100)}
    # Of two that differ nobody knows which is as it should be; one whose look hangs is left alone.
    given, _ = asked_in(400, lambda node, _: {"n1": up, "n2": down, "n3": None}[node], monkeypatch)
    assert given == [at_first, ("kind", ["n1", "n2"], False)]


def test_nobody_is_asked_where_there_is_no_spare():
    with_spare = ClusterSpec(nodes=2, spares=1, gpus_per_node=8)
    assert OwnKind.of(RunSpec(cluster=ClusterSpec(nodes=2, gpus_per_node=8))) is None
    health = HealthSettings(nvml_library="/x")
    assert OwnKind.of(RunSpec(cluster=with_spare, health=health)) == OwnKind(None, "/x")
    on_cpus = RunSpec(cluster=with_spare, parallel=ParallelSpec(backend="gloo"))
    assert OwnKind.of(on_cpus) == OwnKind(None, None)


# What a batch loop does with it.


class TellingLeader(Leader):
    """`kinds`: what nodes have told of themselves."""

    kinds = {}

    def answer(self, job, question, timeout_s):
        said = super().answer(job, question, timeout_s)
        if question["ask"] == "nodes":
            for node, kind in self.kinds.items():
                said["nodes"][node]["kind"] = kind.to_record()
        return said


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A run on nodes with GPUs, its queue, and what Slurm says of the nodes, by name."""
    be_hasty(monkeypatch)
    asked = []

    def make(types, **recovery):
        given = list(types)
        cluster = {"spares": len(given) - 2, "gpus_per_node": 8}
        layout, slurm = allocated(tmp_path, given=given, cluster=cluster, **recovery)

        def read_nodes(names, *, run=None, timeout_s=0.0):
            if run is None:  # else for evidence of a failure
                asked.append(list(names))
            if None in types.values():
                return None
            return {name: NodeState(name, "IDLE", "", None, types[name]) for name in names}

        monkeypatch.setattr(accounting, "read_nodes", read_nodes)
        return layout, partial(begin, layout, slurm, monkeypatch), partial(end, layout, slurm)

    make.asked = asked
    return make


def test_at_the_start_slurm_tells_the_odd_node_and_is_asked_once(make):
    layout, claim, _ = make({"n1": "gpu:h100:8", "n2": "gpu:a100:8", "n3": "gpu:h100:8(S:0-1)"})
    assert claim().endswith(" n1,n3 2")
    first = read_attempt(layout, 1)
    assert first.spares == [] and "8 x a100 where 8 x h100 are needed" in first.excluded["n2"]
    assert first.kinds == [
        {"nodes": ["n1", "n3"], "gres": {"h100": 8}},
        {"nodes": ["n2"], "gres": {"a100": 8}},
    ]
    claim()
    assert make.asked == [["n1", "n2", "n3"]]


def test_a_lost_node_is_not_replaced_by_one_with_other_gpus(make):
    layout, claim, end = make({"n1": "gpu:h100:8", "n2": "gpu:h100:8", "n3": "gpu:a100:8"})
    assert claim().endswith(" n1,n2 2")
    note_node(layout, EXCLUDED, "n2", attempt=1)
    decision = end(rc=1)
    assert decision.action == REQUEUED
    assert "n3 can stand in for none of the others: its GPUs are 8 x a100" in decision.reason
    assert claim() == "requeued"


def test_with_fewer_nodes_allowed_the_run_goes_on_without_a_spare_that_does_not_match(make):
    layout, claim, end = make(
        {"n1": "gpu:h100:8", "n2": "gpu:h100:8", "n3": "gpu:a100:8"}, min_nodes=1
    )
    claim()
    note_node(layout, EXCLUDED, "n2", attempt=1)
    assert end(rc=1).action == RESTART
    assert claim().endswith(" n1 1")


def test_what_agents_have_told_is_kept_with_the_attempt_also_of_a_node_that_is_lost(
    make, monkeypatch, capsys
):
    layout, claim, _ = make(dict.fromkeys(["n1", "n2", "n3", "n4"], "gpu:8"))
    states = dict.fromkeys(["n1", "n2", "n3", "n4"], "live")
    leader = TellingLeader(monkeypatch, states=states)
    assert claim().endswith(" n1,n2 2")  # no agent has told yet
    leader.kinds = {"n1": A, "n2": A, "n3": B}
    assert claim().endswith(" n1,n2 2")
    told = {node: row for row in read_attempt(layout, 2).kinds for node in row["nodes"]}
    assert told["n3"]["gpus"] == dict(A100) and told["n1"] is told["n2"]
    leader.kinds, states["n2"] = {}, "lost"  # another leader has begun
    assert claim().endswith(" n1,n4 2")
    doubt = "node n4 stands in for another, and whether its network and GPU model is the same"
    assert doubt in capsys.readouterr().err
    claimed = [event for event in read_events(layout.attempt(3)) if event["kind"] == "claimed"]
    assert claimed[0]["doubts"][0].startswith(doubt)
    assert "NVIDIA A100" in read_attempt(layout, 3).excluded["n3"]


def test_where_slurm_does_not_answer_no_spare_is_refused(make):
    layout, claim, _ = make({"n1": "gpu:h100:8", "n2": "gpu:h100:8", "n3": None})
    assert claim().endswith(" n1,n2 2")
    note_node(layout, EXCLUDED, "n2", attempt=1)
    assert claim().endswith(" n1,n3 2")
    assert len(make.asked) == 2
