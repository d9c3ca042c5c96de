"""Export: sealed trajectories, exactly as they lie in the log, in the layouts that other tools of the field read.

select  which trajectories, as plain rules
gather  samples out of the log, group by group, in bounded memory
run     all of it, with the manifest
"""

from millrace.formats.exports.run import ExportSummary, export, export_from

__all__ = ["ExportSummary", "export", "export_from"]
