"""What follows when one node reads other bytes of a checkpoint than the others: that node is left
out, and no step."""

import failure_clues as texts

from ftslurm.diagnosis.causes import NODE
from ftslurm.diagnosis.classify import classify


def test_a_node_that_reads_what_was_not_saved_is_blamed_by_its_own_rank() -> None:
    said = "step 20 was read wrongly (rank 3 on n2: `w` does not have the digest it was saved with)"
    others = [texts.error(f"MisreadElsewhereError: {said}", rank=rank, at=1) for rank in (0, 1, 2)]
    found = classify([*others, texts.error(f"MisreadError: {said}", rank=3, at=9)], texts.FACTS)
    assert (found.cause, found.blamed_node) == (NODE, "n2")
