"""`make observe`: a local Prometheus that scrapes the running server and evaluates the rules, until Ctrl-C.

python -m ops.observe --target 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ops import prometheus
from ops.rules.__main__ import FILE
from ops.serve import port_is_taken

WELCOME = """
Prometheus scrapes {target} every {seconds:g} s.

  graphs and queries   {url}/graph
  alerts               {url}/alerts
  the dashboards       python -m ops.dashboards.preview --prometheus {url}     # PNGs, once there is traffic
  with a Grafana       add {url} as a Prometheus data source and import ops/dashboards/json/*.json

Ctrl-C ends it; its data stay in {folder}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:8000", help="where the server listens (host:port)")
    parser.add_argument("--listen", default="127.0.0.1:9090", help="where Prometheus shall listen (host:port)")
    parser.add_argument("--scrape-seconds", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/prometheus"), help="data and log")
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
            print(
                WELCOME.format(
                    target=options.target, seconds=options.scrape_seconds, url=server.url, folder=options.folder
                )
            )
            signal.pause()
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
