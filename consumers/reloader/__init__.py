"""The reloader: one beside each engine, it brings the newest weight version into it and says so."""
