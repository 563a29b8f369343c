"""Calls and tensors between the processes of a run: typed messages over HTTP, tensors over a raw stream.

``server`` runs in every worker, ``client`` in whoever calls one; ``rtensor`` refers to tensors that stay where they
are. Nothing here imports torch before a tensor occurs.
"""
