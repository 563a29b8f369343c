"""Generation, agents and rollout control; read by workflows, inference engines and ``areal.infra.rollout``."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.fields import MISSING, ConfigSection, DefaultInt, check_fields, opt, section
from areal.api.config.scheduling import SchedulingSpec, SchedulingStrategy, check_placement


@dataclass
class GenerationHyperparameters(ConfigSection):
    """How one request is sampled."""

    n_samples: int = opt(
        1, "Rollouts per prompt (the trainer passes it as group_size); a single agenerate call must have 1.", ge=1
    )
    max_new_tokens: int = opt(16384, "Cap on generated tokens of one request.", unit="tokens", ge=0)
    max_tokens: int = opt(
        32768, "Cap on prompt plus generated tokens; shrinks max_new_tokens per request.", unit="tokens", ge=1
    )
    greedy: bool = opt(False, "Always take the most likely token; the temperature is then not used.")
    top_p: float = opt(1.0, "Nucleus sampling mass; 1 = off.", gt=0, le=1)
    top_k: int = opt(100_000_000, "Keep k best tokens; the huge default means off.", unit="tokens", ge=1)
    temperature: float = opt(1.0, "Logits are divided by it before sampling; 0 = greedy.", ge=0)
    stop_token_ids: list[int] = opt(
        help="Extra stopping token ids; workflows add pad and eos themselves.", factory=list
    )
    ignore_eos: bool = opt(False, "Keep generating after EOS.")
    skip_special_tokens: bool = opt(True, "Leave special tokens out of the text that the engine returns.")
    min_new_tokens: int = opt(
        0, "Least generated tokens of one request: stop tokens are not drawn before.", unit="tokens", ge=0
    )
    stop: list[str] | None = opt(None, "Stop strings; generation ends when one appears in the text.")
    frequency_penalty: float = opt(0.0, "Lowers the logit of a token per occurrence in the output.", ge=-2, le=2)
    lora_name: str = opt("default_lora", "Base name of the adapter; the request uses '<name>-v<version>'.")
    use_beam_search: bool = opt(False, "Beam search instead of sampling (vLLM only).")

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Copy with changes; lists are copied too."""
        copies = {
            name: list(value) for name in ("stop_token_ids", "stop") if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **{**copies, **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Copy with ``tokenizer``'s pad and eos ids (if it has them) added to the stop ids."""
        ids = list(self.stop_token_ids)
        for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        return self.new(stop_token_ids=ids)

    def to_openai_args_dict(
        self, exclude_args: Sequence[str] | None = None, api_format: str = "completions"
    ) -> dict[str, Any]:
        """Return the arguments of an OpenAI-compatible request.

        Args:
            exclude_args: names (ours or OpenAI's) to leave out.
            api_format: ``completions``, ``responses`` or ``openai-agents``.
        Raises:
            ValueError: unknown format.
        """
        limits = {
            "completions": "max_completion_tokens",
            "responses": "max_output_tokens",
            "openai-agents": "max_tokens",
        }
        if api_format not in limits:
            raise ValueError(f"api_format={api_format!r} is not valid; allowed: {', '.join(limits)}")
        excluded = set(exclude_args or ())
        dropped = [
            spec.name
            for spec in dataclasses.fields(self)
            if spec.name in _NOT_IN_OPENAI and spec.name not in excluded and not _at_default(self, spec)
        ]
        if dropped:
            warnings.warn(f"the OpenAI API has no {', '.join(dropped)}; not sent", stacklevel=2)
        renamed = {"n_samples": "n", "max_new_tokens": limits[api_format]}
        names = ("n_samples", "max_new_tokens", "top_p", "temperature", "stop", "frequency_penalty")
        values = {name: getattr(self, name) for name in names if name not in excluded}
        if self.greedy and "temperature" in values:
            values["temperature"] = 0.0
        sent = {renamed.get(name, name): value for name, value in values.items()}
        return {name: value for name, value in sent.items() if name not in excluded}

    def to_openai_completions_args_dict(self, exclude_args: Sequence[str] | None = None) -> dict[str, Any]:
        """Arguments of a chat completions request."""
        return self.to_openai_args_dict(exclude_args, api_format="completions")

    def to_openai_responses_args_dict(self, exclude_args: Sequence[str] | None = None) -> dict[str, Any]:
        """Arguments of a responses request."""
        return self.to_openai_args_dict(exclude_args, api_format="responses")

    def to_openai_agents_model_settings_dict(self, exclude_args: Sequence[str] | None = None) -> dict[str, Any]:
        """Model settings of the OpenAI Agents SDK."""
        return self.to_openai_args_dict(exclude_args, api_format="openai-agents")


_NOT_IN_OPENAI = (
    "min_new_tokens",
    "top_k",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "lora_name",
    "use_beam_search",
    "max_tokens",
)


def _at_default(config: object, spec: dataclasses.Field[Any]) -> bool:
    default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
    return bool(getattr(config, spec.name) == default)


@dataclass
class AgentConfig(ConfigSection):
    """Agent workflows and the OpenAI-compatible proxy they talk to."""

    admin_api_key: str = opt("areal-admin-key", "Management key of the proxy; may not be blank.", secret=True)
    mode: Literal["inline", "subproc", "online"] = opt(
        "inline", "Run the agent in process, in a subprocess pool, or wait for outside users."
    )
    tool_call_parser: str = opt("qwen", "Name of the tool-call format parser.")
    reasoning_parser: str = opt("qwen3", "Name of the reasoning-tag parser.")
    chat_template_type: Literal["hf", "concat"] = opt(
        "hf", "hf = re-template all messages every turn; concat = append to the parent's tokens."
    )
    turn_discount: float = opt(1.0, "Factor for passing reward to earlier turns.", ge=0, le=1)
    export_style: Literal["individual", "concat"] = opt("individual", "Every interaction, or only leaves.")
    agent_cls_path: str = opt("", "Import path of the agent class (v2 agent service); may not be empty.")
    scheduling_spec: list[SchedulingSpec] = opt(
        help="Exactly one spec of agent worker processes.",
        factory=lambda: [SchedulingSpec(gpu=0, cmd="python -m areal.experimental.agent_service.guard")],
    )
    engine_max_tokens: int | None = opt(None, "Cap on prompt + completion in the proxy.", unit="tokens", ge=1)
    subproc_max_workers: int = opt(4, "Size of the pool (first creation wins).", unit="processes", ge=1)
    session_timeout_seconds: int = opt(3600, "Idle sessions are dropped after this.", unit="s", gt=0)
    set_reward_finish_timeout: float = opt(
        0.0, "Wait for further rewards before a trajectory is closed.", unit="s", ge=0
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.scheduling_spec = list(self.scheduling_spec)
        if not self.agent_cls_path:
            raise self.fail("agent_cls_path", "the import path of an agent class")
        if len(self.scheduling_spec) != 1:
            raise self.fail("scheduling_spec", "a list of exactly 1 spec")
        if not self.admin_api_key.strip():
            raise self.fail("admin_api_key", "a key that is not blank")


@dataclass
class InferenceEngineConfig(ConfigSection):
    """Rollout: inference backend, concurrency, staleness, limits."""

    backend: str = opt(MISSING, "Backend and layout: 'native:d1', 'vllm:d2t4' or 'sglang:d4t2'.")
    experiment_name: str | None = opt(None, "Experiment name; taken from the root when not given.")
    trial_name: str | None = opt(None, "Trial name; taken from the root when not given.")
    fileroot: str | None = opt(None, "Root of trajectory dumps; taken from cluster.fileroot when not given.")
    max_concurrent_rollouts: int | None = opt(
        None, "Episodes in flight; null = consumer_batch_size.", unit="episodes", ge=1
    )
    consumer_batch_size: int = opt(
        DefaultInt(1), "Training batch size. Not written: follows train_dataset.batch_size.", unit="prompts", ge=1
    )
    max_head_offpolicyness: int = opt(
        0, "How many versions old a sample may be at most; 0 = synchronous.", unit="weight versions", ge=0
    )
    tokenizer_path: str = opt("", "Tokenizer for dumps and the proxy; taken from the root's when empty.")
    dump_to_file: bool = opt(False, "Write trajectories as JSONL under the run's log directory.")
    dump_dir: str | None = opt(None, "Write trajectories as JSONL into this directory; null follows dump_to_file.")
    setup_timeout: float = opt(300.0, "Limit for starting and connecting to a server.", unit="s", gt=0)
    request_timeout: float = opt(3600.0, "Limit of one HTTP request to a server.", unit="s", gt=0)
    request_retries: int = opt(3, "Attempts per request to a server.", ge=1)
    scheduling_spec: list[SchedulingSpec] = opt(
        help="One or two specs of rollout worker processes.",
        factory=lambda: [SchedulingSpec(cmd="python -m areal.infra.rpc.rpc_server")],
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Separation / colocation.")
    agent: AgentConfig = opt(
        help="Agent workflows and their proxy.",
        factory=lambda: AgentConfig(agent_cls_path="areal.experimental.openai.proxy.online_agent._OnlineAgent"),
    )
    queue_size: int | None = opt(None, "Runner queue size; null = 16 x max_concurrent_rollouts.", unit="episodes", ge=1)
    enable_rollout_tracing: bool = opt(False, "Log each enqueue/submit/finish.")
    check_trajectory_format: bool = opt(
        False, "Log the shape of every trajectory; the format itself is always checked."
    )
    pause_grace_period: float = opt(0.0, "Sleep after the pause request to a server.", unit="s", ge=0)
    use_lora: bool = opt(
        False,
        "Samplers hold the base model and get the actor's adapters (on servers as '<gconfig.lora_name>-v<version>'); "
        "false = they get whole weights with adapters merged in.",
    )
    return_routed_experts: bool = opt(False, "MoE routing replay data (SGLang).")
    model: str = opt("default", "v2: public name of the model.")
    routing_strategy: Literal["round_robin"] = opt("round_robin", "v2: how requests are spread over servers.")
    poll_interval: float = opt(5.0, "v2: how often the router polls servers.", unit="s", gt=0)
    admin_api_key: str = opt("areal-admin-key", "Key of the v2 service; may not be blank.", secret=True)
    api_url: str | None = opt(None, "v2: base URL of an outside OpenAI-compatible API.")
    provider_api_key: str | None = opt(None, "v2: key for that provider.", secret=True)
    on_stale: Literal["wait", "drop", "train"] = opt(
        "wait",
        "What happens to a group that would exceed max_head_offpolicyness: wait = the step waits for it before the "
        "version moves on; drop = it is thrown away and its row generated again; train = it is used all the same.",
    )
    episode_timeout_s: float = opt(3600.0, "Limit of one episode; it then counts as failed.", unit="s", gt=0)
    max_row_retries: int = opt(2, "How often a row whose episodes failed is tried again.", unit="attempts", ge=0)
    max_failure_share: float = opt(
        0.5, "The run stops when more than this share of the last failure_window episodes failed.", gt=0, le=1
    )
    failure_window: int = opt(64, "Episodes over which max_failure_share is taken.", unit="episodes", ge=1)
    wait_timeout_s: float | None = opt(None, "Limit of the wait for one batch; null = none.", unit="s", gt=0)
    control_timeout: float = opt(
        60.0,
        "Limit of one call to a server that is answered at once (pause, resume, abort, health).",
        unit="s",
        gt=0,
    )
    on_weight_update: Literal["auto", "keep", "abort"] = opt(
        "auto",
        "Running requests during a weight update: keep = they stay in place and go on under the new weights; abort = "
        "they come back with what they have and are sent again; auto = keep where the server can (native, vllm).",
    )
    weight_probe_interval: int | None = opt(
        None,
        "Every so many weight updates the log-probs of a probe generation are compared with the trainer's; null = "
        "10 for sglang and for adapters in vllm, never for backends that return a record of every tensor.",
        unit="updates",
        ge=1,
    )
    weight_probe_tolerance: float | None = opt(
        None, "Largest difference of a probe's log-probs; null = 0.01 in float32, else 0.5.", unit="nats", gt=0
    )
    log_wait_interval_s: float = opt(30.0, "How often a waiting step logs what it waits for.", unit="s", gt=0)
    _version: Literal["v1", "v2"] = opt("v1", "Service generation of 1.x; only v1 exists here.")

    def __post_init__(self) -> None:
        check_fields(self)
        self.scheduling_spec = list(self.scheduling_spec)
        check_placement(self.scheduling_spec, (1, 2), self.scheduling_strategy)
        if not self.admin_api_key.strip():
            raise self.fail("admin_api_key", "a key that is not blank")

    @property
    def synchronous(self) -> bool:
        """Whether generation and training take turns: no sample may be older than the weights it trains."""
        return self.max_head_offpolicyness == 0
