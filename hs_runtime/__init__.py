"""Serving long contexts from a KV cache whose blocks are dense or 2:4-sparse, on top of SGLang.

Importing this package imports neither torch nor SGLang: SGLang's processes import it first, before
they know which device they run on.
"""

__version__ = "0.1.0"
