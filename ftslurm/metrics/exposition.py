"""Samples of runs as Prometheus text (format 0.0.4), written out by prometheus-client."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ftslurm.errors import RunError
from ftslurm.metrics.families import COUNTER, FAMILIES, PREFIX
from ftslurm.metrics.samples import Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def require_client() -> None:
    """RunError without prometheus-client."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise RunError(
            f"prometheus-client is not installed for {sys.executable}; `{sys.executable} -m pip"
            " install prometheus-client` (or ftslurm with its extra `metrics`) brings it"
        ) from None


def render(runs: Mapping[str, Sequence[Sample]]) -> bytes:
    """`runs`: samples by run id. Each family once, however many runs have it."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Found:
        def collect(self) -> Iterable[Metric]:
            return families(runs)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found())
    return generate_latest(registry)


def families(runs: Mapping[str, Sequence[Sample]]) -> list[Metric]:
    from prometheus_client.core import Metric

    made: dict[str, Metric] = {}
    for name, family in FAMILIES.items():
        # The client puts _total behind a counter by itself.
        base = name.removesuffix("_total") if family.kind == COUNTER else name
        made[name] = Metric(PREFIX + base, family.help, family.kind)
    for run_id, samples in runs.items():
        for one in samples:
            labels = {"run_id": run_id, **{key: text for key, text in one.labels.items() if text}}
            made[one.family].add_sample(PREFIX + one.family + one.suffix, labels, one.value)
    return [metric for metric in made.values() if metric.samples]
