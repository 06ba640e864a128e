"""Situations that other people have met: no good node is drained, no sick one is kept.

The cases are data (tests/data/health/cases.jsonl) and go through parser and judgement as a reading
would; a case can expect a verdict, but cannot set one. Its `source` is a public report
(OWNER/REPOSITORY#NUMBER of GitHub) where `report` is true; `read` is the month in which the report
was looked up last, and found to tell of this.
"""

import json
from pathlib import Path

import pytest
from health_nodes import of_case

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "health" / "cases.jsonl").read_text().splitlines()
]
GOOD = [case for case in CASES if case["class"] in ("healthy", "user")]
SICK = [case for case in CASES if case["class"] == "sick"]
DRAINS = ("drain", "after", "reset")


def worst(case: dict) -> str:
    verdicts = of_case(case)
    return verdicts[0].word if verdicts else "ignore"


def named(case: dict) -> str:
    return case["name"]


@pytest.mark.parametrize("case", GOOD, ids=named)
def test_a_good_node_is_not_drained(case: dict) -> None:
    found = [one for one in of_case(case) if one.word in DRAINS]
    assert not found, found


@pytest.mark.parametrize("case", SICK, ids=named)
def test_a_sick_node_is_caught(case: dict) -> None:
    assert worst(case) in case["words"]


@pytest.mark.parametrize("case", [case for case in CASES if case["class"] == "user"], ids=named)
def test_what_a_program_did_is_handed_to_its_run(case: dict) -> None:
    assert any(one.hands_to_run for one in of_case({**case, "looks": 1}))


def test_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    false_drains = sum(worst(case) in DRAINS for case in GOOD)
    caught = sum(worst(case) in case["words"] for case in SICK)
    reports = [sum(case["report"] for case in part) for part in (GOOD, SICK)]
    again = [sum("read" in case for case in part) for part in (GOOD, SICK)]
    with capsys.disabled():
        print(f"\nhealth corpus: {false_drains} false drains of {len(GOOD)} good situations, "
              f"{caught} of {len(SICK)} sick ones caught; {reports[0]} and {reports[1]} of them "
              f"from public reports, {again[0]} and {again[1]} of these read again")  # fmt: skip
    assert (false_drains, caught) == (0, len(SICK))


def test_the_corpus_is_large_and_mostly_from_public_reports() -> None:
    assert len(GOOD) >= 60 and len(SICK) >= 40
    assert all(case["source"] for case in CASES)
    for part in (GOOD, SICK):
        assert sum("read" in case for case in part) >= len(part) / 2
    assert all(case["report"] for case in CASES if "read" in case)
    assert all("#" in case["source"] for case in CASES if case["report"])
    assert len({case["name"] for case in CASES}) == len(CASES)


def test_no_case_can_say_what_the_verdict_is() -> None:
    known = {"name", "class", "source", "report", "read", "words", "model", "log", "times", "seen",
             "rotated", "reboot", "boot", "signals", "baseline", "failures", "looks",
             "users"}  # fmt: skip
    assert {key for case in CASES for key in case} <= known
    case = {**SICK[0], "class": "healthy", "words": ["ignore"], "word": "ignore"}
    assert worst(case) == worst(SICK[0])
