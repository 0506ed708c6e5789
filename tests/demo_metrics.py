"""Metrics of the demo's exporters, read as Prometheus reads them: from the head, with its certificate."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from demo_site import DemoSite

FOLDER = "/etc/carme/monitoring/broker"
CURL = ("curl", "--silent", "--show-error", "--fail", "--max-time", "20")
READER = (*CURL, "--cert", f"{FOLDER}/tls.pem", "--cacert", f"{FOLDER}/ca.crt")


class Samples:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of the series with this name and these labels."""
        return [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]


def scrape_node(demo: DemoSite, name: str) -> Samples:
    """Scrape the exporter of a compute node."""
    address = next(machine.address for machine in demo.settings.machines() if machine.name == name)
    return Samples(demo.run("head", *READER, f"https://{address}:9750/metrics").stdout)


def scrape_cluster(demo: DemoSite) -> Samples:
    """Scrape the exporter of the whole cluster."""
    return Samples(demo.run("head", *READER, "https://127.0.0.1:9751/metrics").stdout)
