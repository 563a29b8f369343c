"""vLLM's public API server under the name that 1.x gave its own: ``python -m areal.engine.vllm_ext.areal_vllm_server``.

In: vLLM's flags, which go on unchanged. The generation, pause and weight routes that AReaL uses are vLLM's own, opened
by its settings; updates go through the worker extension beside this file. Runs where vLLM is installed, from this
folder too (``python -m areal_vllm_server``), and needs nothing of AReaL.
"""

from __future__ import annotations

import runpy

SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run the server until it ends."""
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
