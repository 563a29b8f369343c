"""What runs inside vLLM's own environment: the worker extension and the server's entry. Nothing here imports AReaL."""
