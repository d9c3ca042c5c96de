"""The page: the summary, its charts and the audit, in one file that loads nothing.

Invariants: no script and no link to anywhere; everything that a record says is escaped; written by one rename, for
nobody but its owner to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from millrace.consumers.audit import AuditReport, audit
from millrace.consumers.audit.command import spot
from millrace.consumers.report.charts import drawn, shortened
from millrace.consumers.report.summary import Summary, summary
from millrace.infra import durable
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.base import Bus
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.schemas.ids import now_micros

TEMPLATE = "page.html.jinja"
SHOWN = 300
"""newest versions listed one by one"""


def write(settings: Settings, out: Path, *, files: bool = False) -> AuditReport:
    """Write the page of the configured policy to `out`, computed from topics alone; gives the audit that is in it.

    files: also hash every kept checkpoint. Raises AuditError when the policy has no topics, BusError when the log
    cannot be read."""
    with history(settings) as bus:
        names = (settings.namespace, settings.policy.name)
        resolve = claims(settings).resolve
        return write_from(bus, *names, out, settings.policy.release, resolve, files=files, root=settings.weights)


def write_from(
    bus: Bus,
    namespace: str,
    policy: str,
    out: Path,
    release: str = "reserve",
    resolve: Resolve = as_stored,
    *,
    files: bool = False,
    root: str = "",
) -> AuditReport:
    """The same for any bus. release: the policy's first release policy; resolve: reads claims of large records; root:
    where the policy's versions lie now."""
    report = audit(bus, namespace, policy, release=release, resolve=resolve, files=files, root=root)
    found = summary(bus, namespace, policy, now_micros(), resolve)
    durable.write(out, render(found, report), sync=False)
    return report


def render(found: Summary, report: AuditReport) -> str:
    """The whole page."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "moment": moment,
        "clock": clock,
        "duration": duration,
        "number": lambda value: f"{value:,}",
        "decimal": decimal,
        "spot": spot,
        "member": shortened,
        "spans": spans,
    }
    environment.filters.update(filters)
    charts = {name: (Markup(chart.svg), chart.legend) for name, chart in drawn(found).items()}
    return environment.get_template(TEMPLATE).render(found=found, charts=charts, report=report, shown=SHOWN)


def moment(micros: int) -> str:
    """Date and time, UTC; a dash for what no calendar has."""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "–"


def clock(micros: int) -> str:
    """Time of day, UTC; a dash like `moment`."""
    return moment(micros)[11:] or "–"


def decimal(value: float, digits: int = 3) -> str:
    """A number with so many digits behind the point, a dash for NaN."""
    return "–" if value != value else f"{value:,.{digits}f}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, those that follow each other as one span: `4–6, 9`."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1] = [out[-1][0], number]
        else:
            out.append([number])
    return ", ".join("–".join(map(str, span)) for span in out)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
