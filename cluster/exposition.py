"""One scrape for the whole fleet: the exposition texts of its processes, joined, each sample with its origin.

Knows Prometheus' text format and no metric; their names are in metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Exposition:
    """One process's exposition text and who it is."""

    replica: str
    rank: int
    text: str


def merge(expositions: Iterable[Exposition], model: str) -> str:
    """One text for one scrape: every sample gets `model`, `replica` and `rank`, every family its HELP and TYPE once."""
    families: dict[str, Metric] = {}
    for exposition in expositions:
        labels = {"model": model, "replica": exposition.replica, "rank": str(exposition.rank)}
        for family in text_string_to_metric_families(exposition.text):
            if family.name.endswith("_created"):  # the client library's birth times: noise in a scrape
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [Sample(s.name, {**labels, **s.labels}, s.value) for s in family.samples]
    return generate_latest(_Families(families.values())).decode()


class _Families(CollectorRegistry):
    """Families that are already collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
