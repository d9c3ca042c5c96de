"""How good a version is on questions that it did not train on."""
