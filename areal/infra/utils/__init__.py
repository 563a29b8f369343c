"""Facts about the machines and clusters that workers run on."""
