"""From the log to rows: blocks of a partition, one insert each, exactly once in what a query sees."""
