"""Print the dashboard: `python docker/grafana/dashboard.py > docker/grafana/dashboards/trainer.json`.

Every panel and row is data in panels.py.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    BigValueTextMode,
    GraphDrawStyle,
    LegendDisplayMode,
    StackingMode,
    TimeZoneBrowser,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from panels import ROWS, Kind, Panel, expression

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
#: Kinds that show the present alone.
NOW: set[Kind] = {"name", "bars", "table"}


def build() -> Dashboard:
    """Return the dashboard."""
    dashboard = (
        Dashboard("Trainer")
        .uid("trainer")
        .description("Runs of the trainer: how far, how well, how fast, and what keeps them from going faster.")
        .tags(["trainer", "pytorch"])
        .readonly()
        .timezone(TimeZoneBrowser)
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("15s")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("job", "Job", "trainer_phase"))
        .with_variable(_choice("job_name", "Run in Kubernetes", 'trainer_phase{job=~"$job"}'))
        .with_variable(_choice("instance", "Instance", 'trainer_phase{job=~"$job", job_name=~"$job_name"}'))
    )
    numbers, top = itertools.count(1), 0
    for title, panels in ROWS.items():
        dashboard = dashboard.with_row(Row(title).id(next(numbers)).grid_pos(GridPos(h=1, w=COLUMNS, x=0, y=top)))
        top, left = top + 1, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                top, left = top + _height(panel), 0
            dashboard = dashboard.with_panel(_panel(panel, left=left, top=top).id(next(numbers)))
            left += panel.width
        top += _height(panels[-1])
    return dashboard


def _choice(name: str, label: str, series: str) -> QueryVariable:
    """Return a variable of a label's values. All of them is anything: what has no such label, too."""
    return (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({series}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _height(panel: Panel) -> int:
    """Return a panel's height; those side by side have the same."""
    return 4 if panel.kind in ("value", "name") else 8


def _panel(panel: Panel, *, left: int, top: int) -> Any:
    drawn = _draw(panel.kind)
    place = GridPos(h=_height(panel), w=panel.width, x=left, y=top)
    drawn = drawn.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE).grid_pos(place)
    if panel.unit == "percentunit" and panel.kind != "value":
        drawn = drawn.min(0)
    for number, (template, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression(template)).legend_format(legend).ref_id("ABCDEFGH"[number])
        query = query.instant() if panel.kind in NOW else query.range()
        if panel.kind in ("heat", "table"):
            query = query.format(PromQueryFormat.HEATMAP if panel.kind == "heat" else PromQueryFormat.TABLE)
        drawn = drawn.with_target(query.datasource(SOURCE))
    return drawn


def _draw(kind: Kind) -> Any:
    """Return an empty panel of a kind."""
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
    if kind in ("value", "name"):
        text = BigValueTextMode.NAME if kind == "name" else BigValueTextMode.AUTO
        return stat.Panel().reduce_options(last).text_mode(text).graph_mode(BigValueGraphMode.NONE)
    if kind == "heat":
        return heatmap.Panel().calculate(False).y_axis(heatmap.YAxisConfig().unit("s")).show_legend()
    if kind == "bars":
        return bargauge.Panel().reduce_options(last).orientation(VizOrientation.HORIZONTAL)
    if kind == "states":
        return statetimeline.Panel().legend(legend.show_legend(False)).show_value(VisibilityMode.NEVER)
    if kind == "table":
        return table.Panel()
    lines = timeseries.Panel().legend(legend).draw_style(GraphDrawStyle.LINE).show_points(VisibilityMode.NEVER)
    lines = lines.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    if kind == "stack":
        return lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60)
    return lines


if __name__ == "__main__":
    sys.stdout.write(JSONEncoder(sort_keys=True, indent=2).encode(build().build()) + "\n")
