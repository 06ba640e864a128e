"""What of a composed spec may be written down: values that JSON can hold, and no secrets. Pure but
for the environment that it is held against.
"""

from __future__ import annotations

import json
import os

from ftslurm.errors import SpecError
from ftslurm.run.secret import held_secret, references, texts
from ftslurm.run.spec import RunSpec, to_dict


def check_keepable(spec: RunSpec) -> None:
    """SpecError for a value that run.json may not or cannot hold."""
    _check_storable(spec)
    _check_secrets(spec)
    _check_held(spec)


def _check_secrets(spec: RunSpec) -> None:
    for key, name in references(to_dict(spec)):
        if not key.startswith("user."):
            raise SpecError(
                f"{key} takes its value from {name}, which may be a secret; only values below "
                "`user` are looked up where the ranks run, all others are written down: leave it "
                "to the environment, which the job inherits from the shell that submits"
            )


def _check_held(spec: RunSpec) -> None:
    """The shell expands `user.key=$WANDB_API_KEY`, and all that is left is the secret."""
    environ = dict(os.environ)  # which decodes every name and value at each look
    for key, text in texts(to_dict(spec)):
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


def _check_storable(spec: RunSpec) -> None:
    try:
        json.dumps(to_dict(spec), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"a value cannot be kept in run.json ({error}); use null, true, false, finite numbers, "
            "text, lists and maps"
        ) from None
