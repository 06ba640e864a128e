"""One task's configuration, resolved at submit and kept in RUN/submit until the task runs.

Everything is settled here: `${now:}`, random numbers, whatever resolvers an app registers. Left as
they are: values that were missing, and `${oc.env:NAME}` where NAME may be a secret, is not set
here, or is one that each rank has of its own (RANK, SLURM_PROCID); the node looks those up.

The file is a pickle, the one of ours. YAML would lose what an app relies on: enums, paths and the
dataclasses that check assignments, which may be the script's own. It is trusted exactly like the
submitted call beside it: the folder has to be ours alone (run/trust.py).

Private names used of OmegaConf: none. Of Hydra: none.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, cast

from ftslurm.errors import RunError, SpecError
from ftslurm.run.layout import RunLayout
from ftslurm.run.secret import held_secret, is_secret, texts
from ftslurm.submit.compose import left_as_references

CONFIG = "hydra_config.pkl"
"""In RUN/submit."""

_OF_RANK = re.compile(
    r"(SLURM|FTSLURM|PMI|PMIX|OMPI|TORCHELASTIC)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
)
_GUARD = "ftslurm"
"""Of hydra.callbacks: it has no say on a node."""


def freeze_config(
    config: Any, *, run_id: str, number: int, overrides: Sequence[str]
) -> tuple[bytes, dict[str, Any]]:
    """(the task's configuration as a file, the launcher's options in it). `config`: as Hydra
    composed it; it is changed. SpecError for what cannot be resolved or kept."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, flag_override
    from omegaconf.errors import OmegaConfBaseException

    hydra = config.hydra
    before = HydraConfig.instance().cfg
    try:
        with flag_override(hydra, ["readonly", "struct"], [False, False]):
            _settle_hydra(hydra, run_id=run_id, number=number)
            HydraConfig.instance().set_config(config)
        # It has just made that part read-only.
        OmegaConf.set_readonly(hydra, False)
        hydra.runtime.output_dir = os.path.abspath(  # noqa: PTH100 - no links are followed by Hydra
            Path(str(hydra.sweep.dir), str(hydra.sweep.subdir))
        )
        # Overrides stay as typed: what they refer to is relative to where they were put.
        kept = cast("dict[str, Any]", OmegaConf.to_container(hydra.overrides))
        hydra.overrides.task, hydra.overrides.hydra = [], []
        with left_as_references(_is_left):
            OmegaConf.resolve(config)
        hydra.overrides.task, hydra.overrides.hydra = kept["task"], kept["hydra"]
        options = cast("dict[str, Any]", OmegaConf.to_container(hydra.launcher))
        # Of a class that is made when Hydra starts, and of no use to the task.
        hydra.launcher = {"_target_": hydra.launcher._target_}
        OmegaConf.set_readonly(hydra, True)
        plain = OmegaConf.to_container(config)
    except OmegaConfBaseException as error:
        raise SpecError(_sentence(error, number, overrides)) from None
    finally:
        HydraConfig.instance().cfg = before
    _refuse_held(plain, number)
    try:
        return pickle.dumps(config), options
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SpecError(
            f"task {number}: its configuration cannot be kept in a file ({error}); a resolver or a "
            "default has put an object into it that is no plain value"
        ) from None


def read_config(layout: RunLayout) -> Any:
    """On the node, once the script has defined what the configuration is made of. Whoever calls
    has seen to it that the folder is ours alone."""
    path = layout.submit / CONFIG
    try:
        return pickle.loads(path.read_bytes())
    except (AttributeError, ImportError) as error:
        raise RunError(
            f"`{path}` needs what this program does not define here ({error}); where the code has "
            "changed since the sweep was submitted, submit it again"
        ) from None


def _settle_hydra(hydra: Any, *, run_id: str, number: int) -> None:
    hydra.job.id = run_id
    hydra.job.num = number
    hydra.callbacks.pop(_GUARD, None)
    for name in hydra.job.env_copy:
        # The job inherits the environment of the shell that submits.
        if is_secret(name, os.environ.get(name)):
            hydra.job.env_set.pop(name, None)


def _is_left(name: str, value: Optional[str], *, has_default: bool) -> bool:
    if is_secret(name, value) or _OF_RANK.fullmatch(name):
        return True
    return value is None and not has_default


def _refuse_held(plain: Any, number: int) -> None:
    """The shell expands `key=$WANDB_API_KEY`, and all that is left is the secret."""
    environ = dict(os.environ)
    for key, text in texts(plain):
        name = held_secret(text, environ)
        if name is not None:
            raise SpecError(
                f"task {number}: `{key}` holds the value of {name}, which may be a secret and "
                f"would be written down; write '${{oc.env:{name}}}', in quotes that keep the shell "
                f"from it (if it is none: env -u {name} ...)"
            )


def _sentence(error: Exception, number: int, overrides: Sequence[str]) -> str:
    key = getattr(error, "full_key", None)
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    where = f" at `{key}`" if key else ""
    return f"task {number} ({' '.join(overrides)}) cannot be settled{where}: {said}"
