"""The read-only ClickHouse HTTP endpoint over the warehouse."""
