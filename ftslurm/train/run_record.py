"""run.json as a rank reads it: what was asked for and what was frozen at submit. Never writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import FormatError, SpecError
from ftslurm.files import read_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, check, from_dict


@dataclass(frozen=True)
class RunRecord:
    """The part of run.json that training depends on."""

    run_id: str
    spec: RunSpec
    emergency_deadline_s: float
    """Seconds an emergency save may take, from the site's grace."""
    data_path: Optional[str]
    dataset_snapshot: Optional[str]
    """Content digest of the token store when the run was submitted."""
    tokenizer_digest: Optional[str]
    config_digest: str
    image_digest: Optional[str]
    code_commit: str

    @classmethod
    def read(cls, layout: RunLayout) -> RunRecord:
        try:
            record = read_json(layout.run_json)
        except FileNotFoundError:
            raise SpecError(
                f"`{layout.run_json}` is not there; FTSLURM_RUN_DIR has to name a run directory "
                "made by `ftslurm submit`"
            ) from None
        try:
            return _make(record)
        except (KeyError, TypeError) as error:
            raise FormatError(f"`{layout.run_json}` lacks a field ({error})") from None


def _make(record: dict[str, Any]) -> RunRecord:
    spec = from_dict(record["spec"])
    check(spec)
    return RunRecord(
        run_id=record["run_id"],
        spec=spec,
        emergency_deadline_s=float(record["emergency_deadline_s"]),
        data_path=record.get("data_path"),
        dataset_snapshot=record.get("dataset_snapshot"),
        tokenizer_digest=record.get("tokenizer_digest"),
        config_digest=record.get("config_digest") or "",
        image_digest=record.get("image_digest"),
        code_commit=(record.get("code") or {}).get("commit") or "",
    )
