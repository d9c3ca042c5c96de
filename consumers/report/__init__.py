"""The report: one self-contained HTML page about a policy, computed from its topics alone.

reading   the records of the small topics
summary   what they come to, as plain values
faults    what went wrong on the way, read from generations and silences
charts    the values as SVG that follows the page's colours
page      values and charts in one file
"""

from millrace.consumers.report.page import write, write_from
from millrace.consumers.report.summary import Summary, summary

__all__ = ["Summary", "summary", "write", "write_from"]
