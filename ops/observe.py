"""`make observe`: a local Prometheus that scrapes the running server and evaluates the rules, until Ctrl-C.

python -m ops.observe --target 127.0.0.1:8000
python -m ops.observe --grafana http://127.0.0.1:3000 --grafana-token-file token     # and puts the dashboards there
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ops import grafana, prometheus
from ops.rules.__main__ import FILE
from ops.serve import port_is_taken

WELCOME = """
Prometheus scrapes {target} every {seconds:g} s.

  graphs and queries   {url}/graph
  alerts               {url}/alerts
  the dashboards       python -m ops.dashboards.preview --prometheus {url}     # PNGs, once there is traffic
  with a Grafana       {grafana}

Ctrl-C ends it; its data stay in {folder}.
"""
BY_HAND = "give --grafana URL, or add this Prometheus as a data source and import ops/dashboards/json/*.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target", default="127.0.0.1:8000", help="where the application answers (host:port, or host:port/prefix)"
    )
    parser.add_argument("--listen", default="127.0.0.1:9090", help="where Prometheus shall listen (host:port)")
    parser.add_argument("--scrape-seconds", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/prometheus"), help="data and log")
    parser.add_argument("--grafana", help="URL of a Grafana that reaches this Prometheus: it gets the dashboards")
    parser.add_argument("--grafana-token-file", type=Path, help="token of a service account that may edit them")
    options = parser.parse_args()
    host, _, port = options.listen.partition(":")
    if port_is_taken(host, int(port)):
        print(f"{options.listen} is in use: stop what listens there, or choose another --listen", file=sys.stderr)
        return 2
    # However it is told to end, Prometheus ends with it; a shell starts background jobs with Ctrl-C ignored.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    config = prometheus.configuration(options.target, FILE, options.scrape_seconds)
    try:
        with prometheus.running(options.folder, options.listen, config) as server:
            places = dashboards(options, server.url)
            print(
                WELCOME.format(
                    target=options.target,
                    seconds=options.scrape_seconds,
                    url=server.url,
                    folder=options.folder,
                    grafana="\n                       ".join(places),
                ),
                flush=True,
            )
            signal.pause()
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def dashboards(options: argparse.Namespace, prometheus_url: str) -> list[str]:
    """Where to see the dashboards in Grafana, or how to get them there. Raises GrafanaError."""
    if options.grafana is None:
        return [BY_HAND]
    return grafana.provision(options.grafana, grafana.read_token(options.grafana_token_file), prometheus_url)


if __name__ == "__main__":
    sys.exit(main())
