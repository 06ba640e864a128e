"""One task's configuration, resolved at submit and kept in RUN/submit until the task runs.

Everything is settled here: `${now:}`, random numbers, whatever resolvers an app registers. Left as
they are: values that were missing, `${oc.env:NAME}` where NAME may be a secret, is not set here, or
is one that each rank has of its own (RANK, SLURM_PROCID), and what a resolver makes of those; the
node looks them up (settle.py).

The file is a pickle, the one of ours. YAML would lose what an app relies on: enums, paths and the
dataclasses that check assignments, which may be the script's own. It is trusted exactly like the
submitted call beside it: the folder has to be ours alone (run/trust.py).

Private names used of OmegaConf: `_get_full_key`. Of Hydra: none.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, cast

from ftslurm.errors import RunError, SpecError
from ftslurm.hydra_app.common_part import Common, take_options, take_what_is_not_for_tasks
from ftslurm.hydra_app.settle import noting, settle_noted
from ftslurm.run.layout import RunLayout
from ftslurm.run.secret import held_secret, is_secret, texts
from ftslurm.run.trust import require_own

CONFIG = "hydra_config.pkl"
"""In RUN/submit."""

_OF_RANK = re.compile(
    r"(SLURM|FTSLURM|PMI|PMIX|OMPI|TORCHELASTIC)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
)


@dataclass(frozen=True)
class Frozen:
    """One task's configuration."""

    data: bytes
    """The file."""
    options: dict[str, Any]
    """The launcher's."""
    overrides: tuple[str, ...]
    """The task's own, as typed."""
    working_dir: str
    """Where its function runs."""


def copier(config: Any) -> Callable[[], Any]:
    """What makes copies of `config` as it now is, by pickle, in a fifth of the time that deepcopy
    takes; where it cannot be pickled, by deepcopy."""
    try:
        data = pickle.dumps(config)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - somebody's objects may raise what they like
        kept = copy.deepcopy(config)
        return lambda: copy.deepcopy(kept)
    return lambda: pickle.loads(data)


def freeze_config(
    config: Any,
    *,
    run_id: str,
    number: int,
    overrides: Sequence[str],
    common: Optional[Common] = None,
) -> Frozen:
    """`config`: as Hydra composed it; it is changed. `common`: of one whose common part is settled.
    SpecError for what cannot be resolved or kept."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    hydra = config.hydra
    before = HydraConfig.instance().cfg
    try:
        with noting(_is_left) as asked:
            options = _settled(config, asked, common, run_id=run_id, number=number)
            working_dir = _working_dir(hydra, asked)
    except OmegaConfBaseException as error:
        raise SpecError(_sentence(error, number, overrides)) from None
    except SpecError as error:
        raise SpecError(f"task {number}: {error}") from None
    finally:
        HydraConfig.instance().cfg = before
    try:
        data = pickle.dumps(config)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SpecError(
            f"task {number}: its configuration cannot be kept in a file ({error}); a resolver or a "
            "default has put an object into it that is no plain value"
        ) from None
    _refuse_held(config, data, number)
    own = cast("list[str]", OmegaConf.to_container(hydra.overrides.task))
    return Frozen(data, options, tuple(own), working_dir)


def _settled(
    config: Any, asked: list[str], common: Optional[Common], *, run_id: str, number: int
) -> dict[str, Any]:
    """The launcher's options; `config` is changed."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra = config.hydra
    if common is None:
        OmegaConf.set_readonly(hydra, False)
        take_what_is_not_for_tasks(hydra)
    hydra.job.id, hydra.job.num = run_id, number
    # Not by `set_config`, which would copy it.
    HydraConfig.instance().cfg = config
    hydra.runtime.output_dir = _output_dir(hydra, asked)
    if common is not None:
        settle_noted(config, asked, common.places)
        OmegaConf.set_readonly(hydra, True)
        return common.options
    # Overrides stay as typed: what they refer to is relative to where they were put.
    kept = cast("dict[str, Any]", OmegaConf.to_container(hydra.overrides))
    hydra.overrides.task, hydra.overrides.hydra = [], []
    _refuse_left_options(settle_noted(config, asked))
    hydra.overrides.task, hydra.overrides.hydra = kept["task"], kept["hydra"]
    options = take_options(hydra)
    OmegaConf.set_readonly(hydra, True)
    return options


def read_config(layout: RunLayout) -> Any:
    """Once the script has defined what the configuration is made of. RunError where it is not, or
    the folder not ours alone."""
    path = layout.submit / CONFIG
    require_own(layout)
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(
            f"`{path}` is not there, and the task's configuration was in it; where the sweep's "
            "folder was moved, move it back, else submit the sweep again"
        ) from None
    except (AttributeError, ImportError) as error:
        raise RunError(
            f"`{path}` needs what this program does not define here ({error}); where the code has "
            "changed since the sweep was submitted, submit it again"
        ) from None


def _output_dir(hydra: Any, asked: list[str]) -> str:
    parts = [str(_needed(hydra.sweep, key, asked)) for key in ("dir", "subdir")]
    return os.path.abspath(Path(*parts))  # noqa: PTH100 - no links are followed by Hydra


def _working_dir(hydra: Any, asked: list[str]) -> str:
    from hydra import version

    changes = _needed(hydra.job, "chdir", asked)
    if changes is None:
        changes = not version.base_at_least("1.2")
    return str(hydra.runtime.output_dir) if changes else os.getcwd()  # noqa: PTH109 - as Hydra has it


def _needed(group: Any, name: str, asked: list[str]) -> Any:
    """A value of Hydra's that counts here: SpecError where it would be looked up on the node.
    `asked`: of `noting`."""
    from omegaconf.errors import OmegaConfBaseException

    asked.clear()
    try:
        value = group[name]
    except OmegaConfBaseException:
        if not asked:
            raise
    if asked:
        raise _is_needed(group._get_full_key(name), asked[0])
    return value


def _is_needed(key: str, name: str) -> SpecError:
    """`name`: of the environment variable that `key` takes its value from."""
    if is_secret(name, os.environ.get(name)):
        return SpecError(
            f"`{key}` takes its value from {name}, which may be a secret and would be written "
            "down: leave it to the environment, which the job inherits from the shell that submits"
        )
    return SpecError(
        f"`{key}` takes its value from {name}, which is looked up where the task runs, and is "
        "needed here; give the value itself"
    )


def _is_left(name: str, value: Optional[str], *, has_default: bool) -> bool:
    if is_secret(name, value) or _OF_RANK.fullmatch(name):
        return True
    return value is None and not has_default


def _refuse_left_options(left: Mapping[str, str]) -> None:
    """`left`: as `settle` gives it."""
    for key, name in left.items():
        if not key.startswith("hydra.launcher."):
            continue
        if name:
            raise _is_needed(key, name)
        raise SpecError(f"`{key}` is an object; an option is a number, a text, a list or a map")


def _refuse_held(config: Any, data: bytes, number: int) -> None:
    """The shell expands `key=$WANDB_API_KEY`, and all that is left is the secret. `data`: the
    configuration as pickle has it, in which each text stands in UTF-8."""
    from omegaconf import OmegaConf

    environ = {
        name: value
        for name, value in os.environ.items()
        if _may_be_held(name, value) and value.encode("utf-8", "surrogatepass") in data
    }
    if not environ:
        return
    for key, text in texts(OmegaConf.to_container(config)):
        name = held_secret(text, environ)
        if name is not None:
            raise SpecError(
                f"task {number}: `{key}` holds the value of {name}, which may be a secret and "
                f"would be written down; write '${{oc.env:{name}}}', in quotes that keep the shell "
                f"from it (if it is none: env -u {name} ...)"
            )


@functools.lru_cache(maxsize=1000)
def _may_be_held(name: str, value: str) -> bool:
    return held_secret(value, {name: value}) is not None


def _sentence(error: Exception, number: int, overrides: Sequence[str]) -> str:
    key = getattr(error, "full_key", None)
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    where = f" at `{key}`" if key else ""
    return f"task {number} ({' '.join(overrides)}) cannot be settled{where}: {said}"
