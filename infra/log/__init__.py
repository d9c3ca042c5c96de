"""The bus seam: `base` is the contract, `kafka` and `memory` are its siblings."""
