"""Export: sealed trajectories, exactly as they lie in the log, in the layouts that other tools of the field read.

select    which trajectories, as plain rules
trained   which version trained a trajectory
sample    one trajectory as layouts are given it
gather    samples out of the log, group by group, in bounded memory
layouts   one way of writing each
sinks     a file or a directory, whole or not at all
run       all of it, with the manifest
"""

from millrace.formats.exports.run import ExportSummary, export, export_from

__all__ = ["ExportSummary", "export", "export_from"]
