"""Logs: the last lines, and what follows until the run has ended."""

from functools import partial

import pytest
from fakes.operated import CANCELLED, RUNNING, make_layout, make_run, train

from ftslurm.errors import RunError, UsageError
from ftslurm.operate import logs


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


@pytest.fixture
def given(layout):
    return partial(make_run, layout)


def logged(layout, capfd, *arguments):
    capfd.readouterr()
    assert logs.main([str(layout.root), *arguments]) == 0
    return capfd.readouterr().out


def test_the_last_lines_of_a_log_are_shown_whatever_its_length(layout, given, capfd):
    given(CANCELLED)
    paths = train(layout)
    lines = [f"step {i} " + "x" * 997 for i in range(200)]
    log = paths.logs / "rank-0.log"
    for end in ("", "\n"):
        log.write_text("\n".join(lines) + end)
        assert logged(layout, capfd, "--lines", "150") == "\n".join(lines[-150:]) + end
        assert logged(layout, capfd, "--lines", "0") == "\n".join(lines) + end
    assert logged(layout, capfd).count("\n") == logs.LINES


def test_what_is_not_there_to_be_logged_is_said(layout, given, capfd):
    given(CANCELLED)
    with pytest.raises(RunError, match="has not begun"):
        logs.main([str(layout.root)])
    train(layout)
    for arguments, error in [
        (["--rank", "1"], UsageError),
        (["--attempt", "2"], UsageError),
        (["--lines", "-1"], UsageError),
        ([], RunError),
    ]:
        with pytest.raises(error):
            logs.main([str(layout.root), *arguments])


def test_a_followed_log_goes_on_into_the_next_attempt_and_ends_with_the_run(layout, given, capfd):
    run = given(RUNNING)
    first = train(layout)
    (first.logs / "rank-0.log").write_text("a\nb\n")

    def later(seconds):
        (first.logs / "rank-0.log").write_text("a\nb\nc\n")
        (train(layout).logs / "rank-0.log").write_text("d\n")
        layout.done.touch()

    logs.follow(run, 0, 1, 1, only=False, sleep=later)
    assert capfd.readouterr().out == "b\nc\nd\n"
