"""What of a composed spec may be written down: values that JSON can hold, and no secrets. Pure but
for the environment that it is held against.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ftslurm.errors import SpecError
from ftslurm.run.secret import held_secret, references, texts


def check_keepable(values: dict[str, Any]) -> None:
    """SpecError for one of a spec's values that run.json may not or cannot hold."""
    text = _stored(values)
    if "oc.env" in text:
        _check_secrets(values)
    # What stands in a text stands in its JSON, written alike.
    in_json = {
        name: value
        for name, value in os.environ.items()
        if json.dumps(value, ensure_ascii=False)[1:-1] in text
    }
    if any(held_secret(value, {name: value}) for name, value in in_json.items()):
        _check_held(values, in_json)


def _check_secrets(values: dict[str, Any]) -> None:
    for key, name in references(values):
        if not key.startswith("user."):
            raise SpecError(
                f"{key} takes its value from {name}, which may be a secret; only values below "
                "`user` are looked up where the ranks run, all others are written down: leave it "
                "to the environment, which the job inherits from the shell that submits"
            )


def _check_held(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """The shell expands `user.key=$WANDB_API_KEY`, and all that is left is the secret."""
    for key, text in texts(values):
        name = held_secret(text, environ)
        if name is not None:
            way_out = (
                f"write '${{oc.env:{name}}}', in quotes that keep the shell from it"
                if key.partition(".")[0] == "user"
                else "leave it to the environment, which the job inherits from the shell that "
                "submits, or, in a command, quote it so that the node's shell expands it"
            )
            raise SpecError(
                f"{key} holds the value of {name}, which may be a secret and would be written "
                f"down; {way_out} (if it is none: env -u {name} ftslurm ...)"
            )


def _stored(values: dict[str, Any]) -> str:
    try:
        return json.dumps(values, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"a value cannot be kept in run.json ({error}); use null, true, false, finite numbers, "
            "text, lists and maps"
        ) from None
