"""Starts what `telemetry` measures with, for a process that is asked to export; the SDK is loaded only then."""

from __future__ import annotations

from millrace.infra import telemetry
from millrace.infra.config import Settings


def setup(settings: Settings, role: str) -> None:
    """Start exporting for this process as `role`; with exporter `none` nothing happens. Once a process."""
    if settings.telemetry.exporter == "none" or telemetry.is_exporting():
        return
    from millrace.infra import telemetry_export

    telemetry.start(*telemetry_export.setup(settings, role), settings.telemetry.sample)
