"""Imports: episodes that happened elsewhere, out of files into `raw`, where all that follows is as for any other event.

readers  rows out of files, one at a time
rows     one row, and why one cannot be imported
messages chats, checked
spans    OTLP in JSON
genai    what a GenAI span says
episode  what a layout makes of rows
layouts  how the rows of one tool are read
events   episodes as events
check    a whole file, before anything of it is sent
send     what was checked, in transactions
run      all of it
"""

from millrace.formats.imports.run import ImportOptions, ImportSummary, import_files, import_into

__all__ = ["ImportOptions", "ImportSummary", "import_files", "import_into"]
