"""Each example in a verb's help and in the README is a command line that the verb takes."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ftslurm import cli

ROOT = Path(__file__).resolve().parent.parent
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s(])(ftslurm(?:-health)? [a-z-].*)")


def command_lines(text):
    """The words behind `ftslurm` of each line that holds such a command: without what the shell
    does with its output, and without what is said of it at the end of the line."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = COMMAND.search(re.split(r"(?:^|\s)#\s", line)[0])
        if match is None:
            continue
        typed = re.split(r"\s\s\s+|\s\|\s|\s>\s|\)$", match[1])[0]
        words = shlex.split(typed)
        found.append(["health", *words[1:]] if words[0] == "ftslurm-health" else words[1:])
    return found


def help_of(verb):
    done = subprocess.run(
        [sys.executable, "-m", "ftslurm", verb, "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("example")[2]


class Parsed(BaseException):
    """The parser was content; what the verb would do is not done."""


@pytest.fixture
def parses(monkeypatch):
    def only(name):
        original = getattr(argparse.ArgumentParser, name)

        def parse(self, args=None, namespace=None):
            original(self, args, namespace)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)

    only("parse_args")
    only("parse_intermixed_args")

    def check(words):
        with pytest.raises(Parsed):
            cli.main(words)

    return check


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_the_examples_of_a_verb_are_taken_by_it(verb, parses):
    examples = command_lines(help_of(verb))
    assert examples
    for words in examples:
        assert words[0] in (verb, "resume"), "an example is of the verb that gives it, or undoes it"
        parses(words)


def test_the_examples_of_the_readme_are_taken(parses):
    examples = command_lines("\n".join(BASH.findall((ROOT / "README.md").read_text())))
    assert len(examples) > 15
    for words in examples:
        parses(words)
