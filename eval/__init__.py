"""Tree-verified speculative sampling, and its measurement."""
