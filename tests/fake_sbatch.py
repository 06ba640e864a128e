#!/usr/bin/env python3
"""sbatch for tests: parses as sbatch does, keeps what it was given, submits nothing.

Options are those our executor may use; any other one fails loudly, as does a `#SBATCH` line that
sbatch could not read. Records go to $FAKE_SBATCH/call-N.json. $FAKE_SBATCH/answer.json, if there,
holds rc, stdout and stderr.
"""

import json
import os
import shlex
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SBATCH"])
WITH_VALUE = {
    "job-name", "account", "partition", "qos", "reservation", "constraint", "exclude", "comment",
    "output", "array", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time",
    "signal", "open-mode", "dependency", "licenses", "switches", "mail-user", "mail-type", "gres",
}  # fmt: skip
FLAGS = {"parsable", "requeue", "no-requeue", "no-kill", "exclusive"}


def parse(words):
    options, rest = {}, []
    for word in words:
        if rest or not word.startswith("--"):
            rest.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        if (name in WITH_VALUE) != bool(equals) or name not in WITH_VALUE | FLAGS:
            sys.exit(f"sbatch: error: unrecognized option '{word}'")
        options[name] = value
    return options, rest


def directives(script):
    """`#SBATCH` lines before the first command, with sbatch's shell-like quotes."""
    words = []
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH"):
            words += shlex.split(line[len("#SBATCH") :], comments=True)
        elif line and not line.startswith("#"):
            break
    return words


def main():
    options, rest = parse(sys.argv[1:])
    script = Path(rest[0])
    in_script, stray = parse(directives(script))
    if stray:
        sys.exit(f"sbatch: error: stray words in #SBATCH lines: {stray}")
    number = len(list(FOLDER.glob("call-*.json")))
    record = {
        "argv": sys.argv[1:],
        "options": {**in_script, **options},
        "script": str(script),
        "text": script.read_text(),
        "environ": dict(os.environ),
    }
    (FOLDER / f"call-{number}.json").write_text(json.dumps(record))
    answer = {"rc": 0, "stdout": f"{4000 + number}\n", "stderr": ""}
    if (FOLDER / "answer.json").exists():
        answer.update(json.loads((FOLDER / "answer.json").read_text()))
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    return answer["rc"]


if __name__ == "__main__":
    sys.exit(main())
