"""Frames between agents: only who has the job's key makes one, and none counts twice."""

import errno
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftslurm.agent import wire
from ftslurm.agent.ask import exchange
from ftslurm.agent.duty import Duty
from ftslurm.agent.ledger import Ledger
from ftslurm.agent.loop import Loop
from ftslurm.agent.member import Member
from ftslurm.agent.wire import MAX_FIRST_BYTES, Channel, WireError
from ftslurm.run.layout import RunLayout

KEY = b"k" * 32


def pair(client_key=KEY, server_key=KEY):
    client, server = Channel(client_key, is_server=False), Channel(server_key, is_server=True)
    client.feed(server.greeting)
    server.feed(client.greeting)
    return client, server


def test_messages_arrive_whole_in_order_and_both_ways():
    client, server = pair()
    sent = [{"n": n, "text": "x" * n} for n in range(50)]
    assert server.feed(b"".join(map(client.seal, sent))) == sent
    assert client.feed(server.seal({"t": "beat"})) == [{"t": "beat"}]


@given(st.lists(st.integers(1, 400), max_size=40))
def test_however_the_network_cuts_them(cuts):
    client, server = Channel(KEY, is_server=False), Channel(KEY, is_server=True)
    client.feed(server.greeting)
    sent = [{"n": n} for n in range(9)]
    data = client.greeting + b"".join(map(client.seal, sent))
    got, at = [], 0
    for size in [*cuts, len(data)]:
        got += server.feed(data[at : at + size])
        at += size
    assert got == sent


def test_a_stranger_without_the_key_is_refused():
    client, server = pair(client_key=b"other" * 6)
    with pytest.raises(WireError, match="key"):
        server.feed(client.seal({"t": "ask", "ask": "end"}))
    assert not server.is_trusted


def test_a_recorded_frame_is_refused_in_its_own_and_in_another_connection():
    client, server = pair()
    frame = client.seal({"t": "ask", "ask": "end"})
    assert server.feed(frame)
    with pytest.raises(WireError):
        server.feed(frame)
    _, later = pair()
    with pytest.raises(WireError):
        later.feed(frame)


def test_a_frame_is_not_taken_back_by_its_own_sender():
    client, server = pair()
    with pytest.raises(WireError):
        client.feed(client.seal({"t": "order"}))


def test_a_changed_or_dropped_byte_is_noticed():
    for place in range(0, 60, 7):
        client, server = pair()
        frame = bytearray(client.seal({"t": "report", "nodes": {"n1": [1, 2, 3]}}))
        frame[-1 - place] ^= 1
        with pytest.raises(WireError):
            server.feed(bytes(frame) + b"\0" * 70_000)
    client, server = pair()
    client.seal({"n": 1})
    with pytest.raises(WireError):
        server.feed(client.seal({"n": 2}))


def test_a_stranger_cannot_make_us_keep_much():
    _, server = pair()
    with pytest.raises(WireError, match="limit"):
        server.feed(wire._HEAD.pack(MAX_FIRST_BYTES + 1, b"\0" * 32))


def test_a_message_above_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BYTES", 100)
    client, _ = pair()
    with pytest.raises(WireError, match="limit"):
        client.seal({"text": "x" * 200})


class Echo:
    def received(self, link, message):
        link.send({"echo": message})

    def closed(self, link, why):
        pass


@pytest.fixture
def loop():
    loop = Loop(KEY)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.from_thread(loop.stop)
    thread.join()


@pytest.fixture
def port(loop):
    return loop.listen("127.0.0.1", Echo)


def test_the_loop_answers_who_has_the_key_and_drops_who_has_not(port):
    big = {"text": "x" * 3_000_000}
    assert exchange("127.0.0.1", port, KEY, {"n": 1}, 60) == {"echo": {"n": 1}}
    with pytest.raises((OSError, WireError)):
        exchange("127.0.0.1", port, b"o" * 32, {"n": 1}, 60)
    with pytest.raises((OSError, WireError)):
        exchange("127.0.0.1", port, KEY, big, 60)  # a first word of this size is no agent's
    with socket.create_connection(("127.0.0.1", port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\nHost: agents\r\n\r\n")
        scanner.settimeout(60)
        while scanner.recv(4096):
            pass
    assert exchange("127.0.0.1", port, KEY, {"n": 2}, 60) == {"echo": {"n": 2}}


def test_an_answer_that_does_not_come_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(TimeoutError):
        exchange("127.0.0.1", mute.getsockname()[1], KEY, {"n": 1}, 0.3)


def test_work_that_fails_is_answered_too(loop, capsys):
    answers, has_come = [], threading.Semaphore(0)

    def done(answer):
        answers.append(answer)
        has_come.release()

    def fail():
        raise RuntimeError("a mistake")

    for _ in range(2):
        loop.in_thread(fail, done, otherwise=7)
        assert has_come.acquire(timeout=60)
    assert answers == [7, 7]
    assert capsys.readouterr().err.count("RuntimeError: a mistake") == 1


def test_work_for_which_there_is_no_thread_is_answered_too(loop, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    answers, has_come = [], threading.Event()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    loop.in_thread(time.time, lambda answer: (answers.append(answer), has_come.set()), otherwise=7)
    assert has_come.wait(60) and answers == [7]


def test_the_pen_goes_on_after_what_it_cannot_write(tmp_path, capsys):
    ledger, is_durable = Ledger(), threading.Event()
    ledger.event(RunLayout(tmp_path).attempt(1), {"not": object()})
    ledger.flush(RunLayout(tmp_path).attempt(1), is_durable.set)
    assert is_durable.wait(60)
    assert "not on record: TypeError" in capsys.readouterr().err


def test_a_listener_that_has_no_room_waits_and_goes_on(monkeypatch, capsys, port):
    tries, real = [], socket.socket.accept

    def accept(listener):
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    began = time.monotonic()
    assert exchange("127.0.0.1", port, KEY, {"n": 1}, 60) == {"echo": {"n": 1}}
    assert tries[1] - began > 0.5, "what waits is not tried over and over"
    assert "Too many open files" in capsys.readouterr().err


def test_a_member_whose_connection_closes_at_once_connects_again(monkeypatch, loop):
    """As with a leader that has died in between: the first write finds it out."""
    hellos, closed = threading.Semaphore(0), []

    class Leader:
        def received(self, link, message):
            hellos.release()

        def closed(self, link, why):
            pass

    port = loop.listen("127.0.0.1", Leader)
    adopt = loop._adopt

    def lose_the_first(link):
        if not link._channel._is_server and not closed:
            closed.append(link)
            link.close("Connection reset by peer")
        else:
            adopt(link)

    monkeypatch.setattr(loop, "_adopt", lose_the_first)
    member = Member(
        loop,
        Duty(Path("/nowhere"), "n2", KEY, {}),
        ("n1", "127.0.0.1", port),
        "127.0.0.1",
        listen_on="127.0.0.1",
        lost=lambda silent_s: None,
    )
    loop.from_thread(member.begin)
    assert hellos.acquire(timeout=60) and closed
