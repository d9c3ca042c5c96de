"""The wire: the bus, topics, the stage runner, configuration, telemetry, local services and the command line."""
