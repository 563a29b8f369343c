"""Model families written in plain PyTorch."""
