"""Controllers: one object in the script's process for each role that lives in worker processes."""
