"""What a model is to Hugging Face, for engines whose modules are their own: class name, configs, directories to read.

Called by the layouts of the Archon and Megatron engines.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal.engine.core.hf_checkpoint import HfDirectory
from areal.engine.core.hf_load import check_model_type, weights_directory
from areal.engine.core.value_head import classifier_config, classifier_name
from areal.utils.errors import CheckpointError

__all__ = ["HfKind"]


class HfKind:
    """The kind of one model.

    Args:
        config: that it was made from.
        path: directory or hub id where ``config`` is from; exports keep its generation config, if it has one.
        is_critic: exports are sequence classifiers with one label.
    """

    def __init__(self, config: PretrainedConfig, path: str, *, is_critic: bool) -> None:
        self.config, self.is_critic = config, is_critic
        self.model_type: str = config.model_type
        self._generation_config = None if is_critic else _generation_config(path)

    @property
    def class_name(self) -> str:
        """Of the transformers model."""
        if self.is_critic:
            return classifier_name(self.model_type)
        name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]
        return name

    def configs(self) -> tuple[Any, Any]:
        """See ``ModelLayout``."""
        config = copy.deepcopy(self.config)
        if self.is_critic:
            return classifier_config(config), None
        config.architectures = [self.class_name]
        return config, copy.deepcopy(self._generation_config)

    def directory(self, path: str | os.PathLike[str]) -> HfDirectory:
        """The weights at ``path``, of this model's type.

        Raises:
            CheckpointError: there are no plain safetensors files, or they are another model's.
        """
        root = weights_directory(os.fspath(path))
        if root is None:
            raise CheckpointError(
                f"{path} has no plain safetensors weights, which this engine reads; load and save it with "
                "transformers, or train it with backend fsdp"
            )
        found = HfDirectory(root)
        check_model_type(path, found.model_type, self.model_type, self.class_name)
        return found


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(path)
    except OSError:  # no such file
        return None
    return config
