"""What a visit keeps and tells when something beside its look goes wrong."""

from pathlib import Path

import pytest

from ftslurm.health.drain import Action
from ftslurm.health.settings import SOURCES, HealthSettings
from ftslurm.health.visit import visit


@pytest.fixture
def settings(tmp_path: Path) -> HealthSettings:
    """Nothing is looked at."""
    return HealthSettings(
        skip=list(SOURCES),
        state_dir=str(tmp_path / "state"),
        verdict_dir=str(tmp_path / "verdicts"),
    )


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr("ftslurm.health.visit.settle", lambda *_: calls.append(1) or "")
    return calls


def acts(monkeypatch: pytest.MonkeyPatch, word: str, code: int = 0) -> None:
    monkeypatch.setattr("ftslurm.health.drain.act", lambda *_, **__: Action(word, exit_code=code))


def test_a_folder_of_verdicts_that_cannot_be_written_undoes_nothing(
    settings: HealthSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise BlockingIOError(11, "cannot fork")

    acts(monkeypatch, "drained", 1)
    monkeypatch.setattr("ftslurm.health.verdict_folder.write_verdicts", fails)
    made = visit("prolog", settings, environ={})
    assert made.takes_out
    assert any("no verdict is left in" in told for told in made.report.complaints)


def test_settings_that_cannot_be_read_for_one_look_settle_nothing(
    settings: HealthSettings, settled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    acts(monkeypatch, "shadow")
    visit("epilog", settings, "the settings are torn", environ={})
    assert settled == []
    visit("epilog", settings, environ={})
    assert settled == [1]


@pytest.mark.parametrize(("word", "times"), [("foreign", 0), ("failed", 0), ("undone", 1)])
def test_what_was_not_ours_to_do_comes_again(
    settings: HealthSettings, settled: list[int], monkeypatch: pytest.MonkeyPatch, word, times
) -> None:
    """An administrator who gives the node back need not know what its last job has found."""
    acts(monkeypatch, word)
    visit("epilog", settings, environ={})
    assert len(settled) == times
