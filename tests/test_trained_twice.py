"""Steps that attempts have trained again: what differs is found, and only those steps are read."""

import json
import random
import tracemalloc

import pytest
from doctor_runs import OldRun

from ftslurm.cli import main
from ftslurm.run import trace_tail, trained_twice
from ftslurm.run.trace_tail import first_row, last_row, rows_between
from ftslurm.run.trained_twice import read_twice


@pytest.fixture
def run(tmp_path):
    return OldRun(tmp_path / "runs")


@pytest.fixture
def parsed(monkeypatch):
    """Lines of traces that were taken apart."""
    lines = []
    whole = trace_tail._row
    monkeypatch.setattr(trace_tail, "_row", lambda line: lines.append(line) or whole(line))
    return lines


def test_of_a_long_trace_only_what_was_trained_again_is_read(run, parsed):
    run.attempt(0, steps=range(1, 20_001))
    run.attempt(100, steps=range(19_981, 30_001), restored=19_980)
    run.attempt(200, steps=range(29_991, 30_101), restored=29_990)
    found = read_twice(run.layout)
    assert (found.steps, found.losses, found.equal, found.differ) == (30, 30, 30, 0)
    assert found.sentence == ""
    # Looking for a place takes apart what is near each that is looked at, and the end of a file.
    assert len(parsed) < 6_000


def test_what_differs_is_counted_once_and_named_from_where_on(run):
    run.attempt(0, steps=range(1, 26))
    run.attempt(100, steps=range(21, 31), restored=20)
    run.attempt(200, steps=range(29, 35), restored=28, loss=0.25, tokens=101)
    found = read_twice(run.layout)
    assert (found.steps, found.data, found.equal, found.differ) == (7, 7, 5, 2)
    assert found.first_differ == (3, 29)
    assert found.differed_at == found.at
    assert found.sentence == (
        "2 of 7 steps that were trained again had other samples or tokens than the first time, from"
        " step 29 in attempt 3 on"
    )


def test_other_losses_alone_are_called_losses(run):
    run.attempt(0, steps=range(1, 1_226))
    run.attempt(100, steps=range(1_221, 1_231), restored=1_220, loss=0.25)
    found = read_twice(run.layout)
    assert "5 of 5 steps that were trained again had other losses" in found.sentence
    assert "from step 1,221 in attempt 2" in found.sentence


@pytest.mark.parametrize("most", [0, 1, 999, 8_000, 8_001, 8_400, 9_999])
def test_of_no_more_rows_than_are_asked_for_the_newest_are_read_and_that_is_told(run, parsed, most):
    run.attempt(0, steps=range(1, 501))
    run.attempt(100, steps=range(301, 6_001), restored=300, loss=0.25)
    run.attempt(200, steps=range(1_201, 6_001), restored=1_200)
    newest = min(most, 2 * 4_800) // 2
    del parsed[:]
    found = read_twice(run.layout, most=most)
    assert len(parsed) < most + 6_000
    if most < 2:
        assert found is None
    elif most < 2 * 4_800:
        assert (found.steps, found.differ, found.from_step) == (newest, newest, 6_001 - newest)
        assert f"those before step {6_001 - newest:,} are compared by `ftslurm report`" in (
            found.sentence
        )
    else:
        assert (found.steps, found.from_step) == (4_800 + 199, 302)


def test_every_step_of_a_long_overlap_is_compared_in_little_memory(run):
    """The first half has other losses in the newest attempt alone, the second in none."""
    run.attempt(0, steps=range(1, 30_001))
    run.attempt(100, steps=range(1, 30_001))
    path = run.layout.trace_file(2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[6]["loss_hex"] = (0.25).hex()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    del rows
    tracemalloc.start()
    found = read_twice(run.layout)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"30,000 steps compared in {most_bytes / 1e6:.1f} MB")
    assert (found.steps, found.equal, found.first_differ) == (30_000, 29_999, (2, 7))
    assert found.from_step is None and "ftslurm report" not in found.sentence
    assert most_bytes < 5e6


def test_of_several_attempts_the_first_that_differs_is_named_wherever_its_steps_are(run):
    run.attempt(0, steps=range(1, 10_001))
    run.attempt(100, steps=range(9_001, 9_011), loss=0.25)
    run.attempt(200, steps=range(11, 21), loss=0.125)
    assert read_twice(run.layout).first_differ == (2, 9_001)


def test_without_two_attempts_at_a_step_there_is_nothing_to_tell(run):
    assert read_twice(run.layout) is None
    run.attempt(0, steps=range(1, 21))
    run.attempt(100, steps=range(21, 31), restored=20)
    assert read_twice(run.layout) is None
    run.layout.trace_file(2).write_text('{"st')
    assert read_twice(run.layout) is None


def test_runs_that_nobody_can_read_are_left_out(run):
    run.attempt(0, steps=range(1, 21))
    run.attempt(100, steps=range(11, 31), restored=10)
    assert read_twice(run.layout).steps == 10
    run.layout.run_json.write_text("{}")
    assert read_twice(run.layout) is None


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_reading_every_row_would_find(tmp_path, seed, monkeypatch):
    source = random.Random(seed)
    monkeypatch.setattr(trained_twice, "_BLOCK_STEPS", source.choice([1, 7, 4_000]))
    run = OldRun(tmp_path)
    tellings, expected, differ, first_differ = {}, 0, 0, None
    for number in range(source.randint(2, 6)):
        first = source.randint(1, 200)
        steps = range(first, first + source.randint(1, 300))
        loss = source.choice([0.5, 0.5, 0.25])
        run.attempt(100 * number, steps=steps, loss=loss)
        for step in steps:
            if step in tellings:
                expected += 1
                differ += tellings[step] != loss
                if tellings[step] != loss:
                    first_differ = first_differ or (number + 1, step)
            tellings[step] = loss
    found = read_twice(run.layout)
    if found is None:
        assert expected == 0
    else:
        assert (found.steps, found.differ) == (expected, differ)
        assert (found.first_differ, found.from_step) == (first_differ, None)


@pytest.mark.parametrize("begin", [1, 2, 500, 999, 1_000])
def test_rows_are_found_by_their_step(run, begin):
    run.attempt(0, steps=range(1, 1_001))
    path = run.layout.trace_file(1)
    assert [row["step"] for row in rows_between(path, begin, 1_001)] == list(range(begin, 1_001))
    assert [row["step"] for row in rows_between(path, begin, begin)] == [begin]
    assert (first_row(path)["step"], last_row(path)["step"]) == (1, 1_000)


def test_torn_rows_are_passed_over(run):
    run.attempt(0, steps=range(1, 101))
    path = run.layout.trace_file(1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0], lines[49], lines[-1] = b'{"step": \n', lines[49][:20] + b"\n", lines[-1][:30]
    path.write_bytes(b"".join(lines))
    assert [row["step"] for row in rows_between(path, 48, 53)] == [48, 49, 51, 52, 53]
    assert (first_row(path)["step"], last_row(path)["step"]) == (2, 99)
    assert list(rows_between(path.with_name("none"), 1, 2)) == []
    assert first_row(path.with_name("none")) is None


def told(capsys, *words):
    capsys.readouterr()
    main([*map(str, words)])
    return capsys.readouterr().out


@pytest.mark.parametrize("loss", [0.5, 0.25])
def test_status_and_report_name_it_where_it_differs_and_only_there(run, capsys, monkeypatch, loss):
    monkeypatch.setenv("PATH", str(run.layout.root))
    run.attempt(0, steps=range(1, 26))
    run.save(1, 20, 26)
    run.decide(1, 30, "code")
    run.attempt(100, steps=range(21, 31), restored=20, loss=loss)
    differs = loss != 0.5
    sentence = "5 of 5 steps that were trained again had other losses than the first time, from"
    assert (sentence in told(capsys, "status", run.layout.root)) is differs
    status = json.loads(told(capsys, "status", run.layout.root, "--json"))
    assert (status["twice"]["losses"], status["twice"]["differ"]) == (5, 5 if differs else 0)
    text = " ".join(told(capsys, "report", run.layout.root).split())
    assert ("1 run did not train again what had been trained before" in text) is differs
    assert (sentence in text) is differs
    report = json.loads(told(capsys, "report", run.layout.root, "--json"))
    assert report["jobs"][0]["twice"] == status["twice"]
    assert report["fleet"]["differing"] == int(differs)
    assert ("did not train again" in report["fleet"]["findings"][0]["what"]) is differs
