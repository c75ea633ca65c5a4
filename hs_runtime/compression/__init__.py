"""Where policies meet storage: what each request holds (`RequestStorage`), and the device work that
turns dense pages into sparse ones (`Compressor`)."""

from hs_runtime.compression.compressor import Compressor
from hs_runtime.compression.request_storage import ChunkWork, RequestState, RequestStorage

__all__ = ["ChunkWork", "Compressor", "RequestState", "RequestStorage"]
