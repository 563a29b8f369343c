"""DAPO on GSM8K: ``python examples/math/gsm8k_dapo.py --config examples/math/gsm8k_dapo.yaml``."""

import sys
from typing import Any

from gsm8k_rl import main


def some_right_some_wrong(group: dict[str, Any]) -> bool:
    """Keep a prompt whose answers differ in reward: only they have an advantage."""
    return bool(group["rewards"].min() < group["rewards"].max())


if __name__ == "__main__":
    main(sys.argv[1:], dynamic_filter_fn="gsm8k_dapo.some_right_some_wrong")
