"""The verb `ftslurm verify`: what it prints, what it exits with, what it loads."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import damage, make_layout, make_step, tree, two_steps, write_ranks

from ftslurm import cli
from ftslurm.checkpoint.choose import Rejected
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.checkpoint.verify import ProgressMeter, format_bytes, verify_run
from ftslurm.run.attempts import AdoptedStep, Attempt, claim
from ftslurm.run.layout import RunLayout

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    return two_steps(tmp_path / "run", monkeypatch)


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the verb through the command line's door."""
    code = cli.main(["verify", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out, err = verify(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_a_good_run_is_safe_to_restore(layout: RunLayout, capsys: Any) -> None:
    code, out, err = verify(capsys, layout.root)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "safe to restore"
    assert "a restore would take step 20" in out
    code, found = report(capsys, layout.root)
    assert (code, found["ok"], found["findings"], found["schema_version"]) == (0, True, [], 1)
    assert found["restore"]["step"] == 20
    assert [(step["step"], step["ok"]) for step in found["steps"]] == [(20, True), (10, True)]
    size = sum(path.stat().st_size for path in Path(found["restore"]["path"]).iterdir())
    commit_bytes = (Path(found["restore"]["path"]) / "COMMITTED").stat().st_size
    assert found["steps"][0]["bytes_read"] == size - commit_bytes


def test_a_run_is_named_by_its_id_under_runs_too(
    layout: RunLayout, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.run_json.write_text('{"schema_version": 1}')
    (layout.root.parent / "runs").mkdir()
    layout.root.rename(layout.root.parent / "runs" / "mine")
    monkeypatch.chdir(layout.root.parent)
    assert verify(capsys, "mine")[0] == 0


def test_a_bad_newest_step_names_the_step_a_restore_would_take(
    layout: RunLayout, capsys: Any
) -> None:
    damage(layout.steps / "step-000000000020")
    code, found = report(capsys, layout.root)
    assert (code, found["ok"], found["restore"]["step"]) == (1, False, 10)
    assert any("model/weight" in finding for finding in found["findings"])
    code, out, _ = verify(capsys, layout.root)
    assert code == 1
    assert out.splitlines()[-1] == "NOT safe to restore"
    assert "finding: step-000000000020: " in out


def test_an_expected_step_has_to_be_the_one(layout: RunLayout, capsys: Any) -> None:
    assert verify(capsys, layout.root, "--expect-step", 20)[0] == 0
    code, found = report(capsys, layout.root, "--expect-step", 10)
    assert (code, found["findings"]) == (1, ["a restore would take step 20, not 10"])
    step = layout.steps / "step-000000000010"
    assert verify(capsys, step, "--expect-step", 10)[0] == 0
    assert verify(capsys, step, "--expect-step", 20)[0] == 1


def test_a_step_folder_is_checked_alone_also_as_a_copy_under_another_name(
    layout: RunLayout, capsys: Any, tmp_path: Path
) -> None:
    step = layout.steps / "step-000000000010"
    damage(layout.steps / "step-000000000020")
    assert verify(capsys, step)[0] == 0
    shutil.copytree(step, tmp_path / "backup")
    assert report(capsys, tmp_path / "backup")[1]["restore"]["step"] == 10
    damage(tmp_path / "backup")
    assert verify(capsys, tmp_path / "backup")[0] == 1
    (tmp_path / "backup").rename(tmp_path / "step-000000000011")
    assert verify(capsys, tmp_path / "step-000000000011")[0] == 1


def test_unfinished_saves_and_quarantined_steps_are_shown_and_are_no_failure(
    layout: RunLayout, capsys: Any
) -> None:
    make_step(layout, 30)
    write_ranks(layout, 40)
    step = layout.steps / "step-000000000030"
    CheckpointStore(layout).quarantine(Rejected(30, step, "for the test"))
    code, found = report(capsys, layout.root)
    assert code == 0
    assert found["temporaries"] == ["step-000000000040.tmp-0001"]
    assert found["quarantined"] == ["step-000000000030-001"]
    assert "unfinished, not a step: step-000000000040.tmp-0001" in verify(capsys, layout.root)[1]
    assert verify(capsys, layout.steps / "step-000000000040.tmp-0001")[0] == 1


def test_a_step_behind_the_fence_of_the_newest_attempt_is_a_finding(
    layout: RunLayout, capsys: Any
) -> None:
    steps = CheckpointStore(layout).published()
    known = [AdoptedStep(step.step, step.committed_digest) for step in steps]
    for adopted in ([], known):
        attempt = Attempt(0, "7", 0, ["n1"], claimed_at=1.0, adopted=adopted)
        assert claim(layout, attempt).number == (1 if adopted == [] else 2)
    assert verify(capsys, layout.root)[0] == 0
    make_step(layout, 30, attempt=1)
    code, found = report(capsys, layout.root)
    assert (code, found["restore"]["step"]) == (1, 20)
    assert "published by attempt 1 after attempt 2 was claimed" in found["findings"][0]


def test_a_step_that_a_running_job_retires_meanwhile_is_no_finding(layout: RunLayout) -> None:
    old = layout.steps / "step-000000000010"
    found = verify_run(layout, None, on_bytes=lambda count: shutil.rmtree(old, ignore_errors=True))
    assert found.findings == []
    assert [path.name for path, _ in found.steps] == ["step-000000000020"]


def test_a_run_without_a_step_cannot_be_restored(tmp_path: Path, capsys: Any) -> None:
    layout = make_layout(tmp_path / "new")
    layout.checkpoints.mkdir()
    code, found = report(capsys, layout.root)
    assert (code, found["restore"]) == (1, None)
    assert found["findings"] == ["there is no step from which a restore could continue"]


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_what_is_no_run_is_a_usage_error(tmp_path: Path, capsys: Any, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_text("x")
    code, out, err = verify(capsys, path)
    assert (code, out) == (2, "")
    assert "is neither a run" in err


def test_of_a_programs_run_nothing_is_said_to_be_safe_or_not(
    layout: RunLayout, capsys: Any
) -> None:
    layout.run_json.write_text('{"schema_version": 1, "spec": {"program": ["./prog"]}}')
    code, out, err = verify(capsys, layout.root)
    assert (code, out) == (2, "") and f"`{layout.resume}`" in err


def test_nothing_is_changed_by_looking(layout: RunLayout, capsys: Any) -> None:
    damage(layout.steps / "step-000000000020")
    before = tree(layout.root)
    verify(capsys, layout.root)
    assert tree(layout.root) == before


def test_what_a_damaged_record_says_cannot_upset_the_terminal(
    layout: RunLayout, capsys: Any
) -> None:
    (layout.steps / "step-000000000020" / "\x1b[2J\udcff.bin").write_text("x")
    _, out, _ = verify(capsys, layout.root)
    assert "\x1b" not in out
    assert "belongs to no index" in out


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "early"), [(io.StringIO(), False), (Terminal(), True)])
def test_progress_is_shown_at_once_on_a_terminal_and_else_only_when_it_takes_long(
    tmp_path: Path, stream: io.StringIO, early: bool
) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    clock = Clock()
    meter = ProgressMeter([tmp_path], stream=stream, now=clock)
    clock.now = 1.0
    meter.add(1024)
    assert bool(stream.getvalue()) == early
    clock.now = 2.5
    meter.add(1024)
    assert stream.getvalue().endswith("verify: 2.0 KiB of 4.0 KiB (50 %)" + "\n" * (not early))
    meter.close()
    assert stream.getvalue().endswith("\n")


def test_bytes_are_written_for_people() -> None:
    shown = [format_bytes(count) for count in (0, 1023, 1024, 5 * 2**30, 3 * 2**50)]
    assert shown == ["0.0 B", "1023.0 B", "1.0 KiB", "5.0 GiB", "3072.0 TiB"]


def test_help_needs_the_standard_library_only() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ftslurm.checkpoint.verify import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert "examples:" in done.stdout
    loaded = set(done.stderr.split())
    assert not loaded & {"xxhash", "numpy", "torch", "ctypes", "hydra"}
