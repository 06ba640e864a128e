"""Orders whose connection breaks: given again, obeyed once."""

from types import SimpleNamespace

from ftslurm.agent.member import Member
from ftslurm.agent.orders import Orders


class Loop:
    """Whatever is given to a thread is done at once; nothing comes later."""

    def later(self, delay_s, act):
        pass

    every = later

    def in_thread(self, work, done, *, otherwise=None):
        done(work())

    def listen(self, host, owner):
        return 1

    def connect(self, host, port, owner, then):
        then(None, "nobody is there")


def orders():
    sent, answers = [], []
    made = Orders(Loop(), "n0", send=sent.append, obey=lambda order: {"from": "n0"})
    return made, sent, answers


def test_who_connects_anew_is_given_again_what_it_owes_an_answer_to():
    made, sent, answers = orders()
    made.give("stacks", ["n0", "n1", "n2"], within_s=10, then=answers.append)
    made.give("leave", ["n1"])
    (order, leave) = sent
    made.answered(order["id"], "n2", {"from": "n2"})
    made.joined("n2")
    made.joined("n1")
    assert sent == [order, leave, {**order, "to": ["n1"]}]
    made.answered(order["id"], "n1", {"from": "n1"})
    made.joined("n1")
    assert len(sent) == 3
    assert answers == [{node: {"from": node} for node in ("n0", "n1", "n2")}]


def test_of_a_node_that_was_given_up_no_answer_is_owed():
    made, sent, answers = orders()
    made.give("stacks", ["n1", "n2"], within_s=10, then=answers.append)
    made.left("n1")
    made.joined("n1")
    assert len(sent) == 1
    made.answered(1, "n2", {})
    assert answers == [{"n2": {}}]


def test_a_member_obeys_an_order_once():
    done = []

    def carry_out(order):
        done.append(order["id"])
        return {}

    duty = SimpleNamespace(node="n1", look=lambda attempt: [], carry_out=carry_out)
    leader = ("n0", "h", 1)
    member = Member(Loop(), duty, leader, "h", listen_on="h", lost=lambda silent_s: None)
    for number, to in ((1, "n1"), (1, "n1"), (2, "n1"), (1, "n1"), (3, "n2")):
        order = {"t": "order", "id": number, "do": "stacks", "to": [to]}
        member.received(SimpleNamespace(), order)
    assert done == [1, 2]
