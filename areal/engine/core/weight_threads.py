"""Threads that copy weights, each with one thread of torch: many tensors are moved at once instead of one by all.

Small operators gain nothing from several threads inside. Used by the writer of shared memory and by the native engine.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from areal.utils import threads

TASK_BYTES = 16 << 20  # a task for every small tensor costs more than its copy
_kept = threading.local()


def torch_threads(count: int) -> ThreadPoolExecutor:
    """A pool of ``count`` threads for inference; to be closed by its user."""
    return ThreadPoolExecutor(max(1, count), thread_name_prefix="weights", initializer=_begin)


def _begin() -> None:
    torch.get_num_threads()  # the thread takes over the setting of the process: only then it can have one of its own
    library = threads._openmp()
    if library is not None:
        library.omp_set_num_threads(1)
    _kept.mode = torch.inference_mode()  # ends with the thread
    _kept.mode.__enter__()
