"""Every dashboard there is."""

from __future__ import annotations

from ops.dashboards import overview, scheduler, sla, speculation

DASHBOARDS = (overview.DASHBOARD, speculation.DASHBOARD, scheduler.DASHBOARD, sla.DASHBOARD)
