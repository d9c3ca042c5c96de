"""The formats of other tools: which files Millrace reads as episodes, and as which it writes trajectories.

episodes what a row of a file becomes, and the events of an episode
spans    what spans of OpenTelemetry say
layouts  one file a format: its reader and its writer
imports  `millrace import`: files into `raw`
exports  `millrace export`: sealed trajectories into files
"""
