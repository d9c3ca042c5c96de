"""Several gateway processes behind one port: which of them a request belongs to, and how it gets there."""
