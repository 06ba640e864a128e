"""Batches: the same with and without workers, equal in number on all ranks, and nothing lingers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftslurm
from ftslurm.train.build import build
from ftslurm.train.cursor import Cursor
from ftslurm.train.token_store import TokenStore

pytestmark = pytest.mark.torch

LENGTH = 8
BATCH = 7
STEPS = 12
ROOT = Path(ftslurm.__file__).parent.parent

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    for name, start in (("store.h5", 0), ("kept.h5", 0), ("store.other", 1)):
        (folder / "text").write_bytes(bytes(range(start, 200)) * 2)
        build([folder / "text"], folder / name)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """One process imports torch and forks a child for each scenario."""
    (folder / "answers").mkdir()
    script = Path(__file__).with_name("data_loader_scenarios.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "store.h5"), str(folder / "answers")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in (folder / "answers").iterdir()}


def test_every_scenario_ended_by_itself(answers: Answers) -> None:
    codes = {name: result["exit_code"] for name, result in answers.items()}
    assert codes.pop("killed_parent") == -signal.SIGKILL
    assert set(codes.values()) == {0}, codes


def test_workers_change_nothing(answers: Answers) -> None:
    assert answers["without_workers"]["steps"] == answers["with_workers"]["steps"]


def test_ranks_together_get_the_cursors_batches_and_padding_weighs_nothing(
    answers: Answers, folder: Path
) -> None:
    store = TokenStore(folder / "kept.h5", LENGTH)
    cursor = Cursor(len(store), BATCH, 5, snapshot=store.snapshot)
    assert len(store) < BATCH * STEPS, "the test is to reach the second epoch"
    ranks = answers["without_workers"]["steps"]
    for step in range(STEPS):
        assert {len(rank[step]) for rank in ranks} == {2}
        rows = []
        for rank in ranks:
            for inputs, targets, weights in rank[step]:
                assert np.shape(inputs) == np.shape(targets) == np.shape(weights) == (2, LENGTH)
                counted = np.array(weights)
                assert set(counted.ravel()) <= {0.0, 1.0}
                rows += [
                    [*row, target[-1]]
                    for row, target, weight in zip(inputs, targets, counted)
                    if weight.all()
                ]
                assert (counted.min(axis=1) == counted.max(axis=1)).all()
        assert rows == store.read(cursor.batch_indices()).tolist()
        cursor.advance()


@pytest.mark.parametrize("name", ["without_workers", "with_workers"])
def test_torchs_random_generator_is_left_alone(answers: Answers, name: str) -> None:
    assert answers[name]["generator_untouched"]
    assert not answers[name]["left"]


def test_reading_ahead_moves_no_cursor_and_a_restored_one_is_followed(answers: Answers) -> None:
    result = answers["restore"]
    assert result["before_load"] == {"epoch": 0, "samples": 0}
    assert result["resumed"] == result["straight"]


def test_stop_signals_do_not_end_workers(answers: Answers) -> None:
    result = answers["signals"]
    assert result["same"]
    assert result["workers"] == [2, True]
    assert result["handlers_kept"]
    assert not result["left"]


def test_a_worker_that_does_not_answer_is_killed_at_the_deadline(answers: Answers) -> None:
    result = answers["stuck_worker"]
    assert not result["alive"]
    assert result["seconds"] < 30


def test_workers_end_with_a_rank_that_forgot_to_close(answers: Answers) -> None:
    result = answers["exit_without_close"]
    assert len(result["pids"]) == 2
    assert not result["alive_after"]


def test_workers_end_with_a_rank_that_is_killed(answers: Answers) -> None:
    result = answers["killed_parent"]
    assert len(result["pids"]) == 2
    assert not result["alive_after"]


def test_an_error_in_a_worker_reaches_the_loop_as_ours(answers: Answers) -> None:
    assert answers["data_error"]["said"]
    assert not answers["data_error"]["left"]
