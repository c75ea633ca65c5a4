"""Decide once for each batch (`plan`), then run straight through the layers (`backend`)."""
