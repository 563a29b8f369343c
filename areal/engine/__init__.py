"""Train engines and inference engines."""
