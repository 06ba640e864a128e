"""What of a composed spec may be written down: values that JSON can hold, and no secrets. Pure but
for the environment that it is held against.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ftslurm.errors import SpecError
from ftslurm.run.secret import held_secret, references, texts
from ftslurm.run.spec import RunSpec, to_dict


def check_keepable(spec: RunSpec) -> None:
    """SpecError for a value that run.json may not or cannot hold."""
    values = to_dict(spec)
    _check_storable(values)
    _check_secrets(values)
    _check_held(values)


def _check_secrets(values: dict[str, Any]) -> None:
    for key, name in references(values):
        if not key.startswith("user."):
            raise SpecError(
                f"{key} takes its value from {name}, which may be a secret; only values below "
                "`user` are looked up where the ranks run, all others are written down: leave it "
                "to the environment, which the job inherits from the shell that submits"
            )


def _check_held(values: dict[str, Any]) -> None:
    """The shell expands `user.key=$WANDB_API_KEY`, and all that is left is the secret."""
    environ = dict(os.environ)  # which decodes every name and value at each look
    found = list(texts(values))
    # No variable's value holds a NUL, so none of them begins in one text and ends in the next.
    if held_secret("\0".join(text for _, text in found), environ) is None:
        return
    for key, text in found:
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


def _check_storable(values: dict[str, Any]) -> None:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"a value cannot be kept in run.json ({error}); use null, true, false, finite numbers, "
            "text, lists and maps"
        ) from None
