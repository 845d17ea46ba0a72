"""Turns a Dashboard into Grafana's JSON with grafana-foundation-sdk, which knows the schema. Knows no query."""

from __future__ import annotations

import itertools

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from ops.dashboards.model import Dashboard, Panel, Unit

RUNBOOK = "ops/runbook.md"
"""Default of the dashboards' `runbook` variable; the chart puts a URL in its place."""
GRAFANA_UNITS: dict[Unit, str] = {
    "short": "short",
    "s": "s",
    "percentunit": "percentunit",
    "reqps": "reqps",
    "ops": "ops",
    "tokens/s": "suffix: tok/s",
    "tokens": "suffix: tok",
    "x": "suffix:x",
}
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
STAT_HEIGHT, PANEL_HEIGHT = 4, 8

Builder = timeseries.Panel | stat.Panel | bargauge.Panel


def to_json(dashboard: Dashboard) -> str:
    """The file that Grafana imports."""
    builder = (
        grafana.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.question)
        .tags(["dspark"])
        .readonly()
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(grafana.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_label_variable("model", "Model", "label_values(dspark_requests_total, model)"))
        .with_variable(
            _label_variable("replica", "Replica", 'label_values(dspark_requests_running{model=~"$model"}, replica)')
        )
        .with_variable(grafana.ConstantVariable("runbook").label("Runbook").value(RUNBOOK))
        .link(grafana.DashboardLink("DSpark").type(DashboardLinkType.DASHBOARDS).tags(["dspark"]).keep_time(True))
        .link(grafana.DashboardLink("Runbook").type(DashboardLinkType.LINK).url("${runbook}").target_blank(True))
    )
    ids = itertools.count(1)
    for row in dashboard.rows:
        builder.with_row(grafana.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder.with_panel(_panel(panel).id(next(ids)))
    return JSONEncoder(sort_keys=True, indent=1).encode(builder.build()) + "\n"


def _label_variable(name: str, label: str, query: str) -> grafana.QueryVariable:
    return (
        grafana.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Builder:
    builder = _of_kind(panel)
    (
        builder.title(panel.title)
        .description(panel.description)
        .unit(GRAFANA_UNITS[panel.unit])
        .datasource(SOURCE)
        .span(panel.width)
        .height(STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT)
        .thresholds(
            grafana.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(value=value, color=color) for value, color in panel.thresholds])
        )
    )
    if panel.minimum is not None:
        builder.min(panel.minimum)
    if panel.maximum is not None:
        builder.max(panel.maximum)
    if panel.runbook:
        url = "${runbook}#" + panel.runbook
        builder.links([grafana.DashboardLink("Runbook").type(DashboardLinkType.LINK).url(url).target_blank(True)])
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + index))
        builder.with_target(target if panel.kind == "timeseries" else target.instant())
    return builder


def _of_kind(panel: Panel) -> Builder:
    if panel.kind == "stat":
        return stat.Panel().color_mode(BigValueColorMode.BACKGROUND)
    if panel.kind == "bargauge":
        return bargauge.Panel().orientation(VizOrientation.HORIZONTAL).display_mode(BarGaugeDisplayMode.BASIC)
    lines = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["mean", "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .fill_opacity(30 if panel.stacked else 0)
    )
    if panel.stacked:
        lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return lines
