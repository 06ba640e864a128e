"""What follows when one node reads other bytes of a checkpoint than the others: that node is left
out, and no step."""

from dataclasses import replace

import failure_clues as texts
from fakes.recovering import PLAIN

from ftslurm.diagnosis.causes import NODE
from ftslurm.diagnosis.classify import classify
from ftslurm.recovery.policy import decide
from ftslurm.run.spec import RecoverySpec


def test_a_node_that_reads_what_was_not_saved_is_blamed_by_its_own_rank() -> None:
    said = "step 20 was read wrongly (rank 3 on n2: `w` does not have the digest it was saved with)"
    others = [texts.error(f"MisreadElsewhereError: {said}", rank=rank, at=1) for rank in (0, 1, 2)]
    found = classify([*others, texts.error(f"MisreadError: {said}", rank=3, at=9)], texts.FACTS)
    assert (found.cause, found.blamed_node) == (NODE, "n2")


def test_a_node_of_rank_0_that_misreads_is_left_behind_and_the_run_goes_on() -> None:
    said = (
        "step 20 was read wrongly (rank 0 on n1: `w` does not have the digest it was saved with), "
        "and rank 2 on n2 finds these files whole; it was not rejected"
    )
    others = [texts.error(f"MisreadElsewhereError: {said}", rank=rank, at=1) for rank in (1, 2, 3)]
    found = classify([*others, texts.error(f"MisreadError: {said}", rank=0, at=9)], texts.FACTS)
    decision = decide([], replace(PLAIN, finding=found), RecoverySpec())
    assert (found.cause, found.blamed_node) == (NODE, "n1")
    assert (decision.action, decision.exclude) == ("restart", ("n1",))
