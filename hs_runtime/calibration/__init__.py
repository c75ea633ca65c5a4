"""What is measured once of a model, so that pruning costs little: channel order, query statistics,
and what pruning costs in each layer.

`file` reads and writes it; `calibrate` makes it, with the model's own forward pass. No CUDA, and no
transformers until `calibrate` runs.
"""

from hs_runtime.calibration.file import (
    FILE_NAME,
    Calibration,
    default_file,
    digest,
    fingerprint,
    how_to_make,
    load_calibration,
    read_layer_costs,
    save_calibration,
)

__all__ = [
    "FILE_NAME",
    "Calibration",
    "default_file",
    "digest",
    "fingerprint",
    "how_to_make",
    "load_calibration",
    "read_layer_costs",
    "save_calibration",
]
