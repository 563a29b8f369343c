"""Command-line tools: installation check and the checks of the code base (layers, sizes)."""
