"""What only the FSDP engine knows: its mesh, its shards, and how to gather them."""
