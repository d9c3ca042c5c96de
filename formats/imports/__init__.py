"""Imports: episodes that happened elsewhere, out of files into `raw`, where all that follows is as for any other event.

check          a whole file, before anything of it is sent
group_records  the records of a group
send           what was checked, in transactions
run            all of it
"""

from millrace.formats.imports.run import ImportOptions, ImportSummary, import_files, import_into

__all__ = ["ImportOptions", "ImportSummary", "import_files", "import_into"]
