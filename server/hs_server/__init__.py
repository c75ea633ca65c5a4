"""The HTTP surface: OpenAI and SGLang routes whose requests choose their own KV sparsity.

Importing this package, or any module of it, imports neither torch nor SGLang.
"""
