"""When a page is compressed and what a request costs: pure functions, and their SGLang adaptors."""
