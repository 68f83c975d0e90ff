"""Trees, verification, the decoding loop, metrics and the report."""
