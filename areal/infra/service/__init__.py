"""HTTP services of a run."""
