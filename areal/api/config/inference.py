"""Inference engines: the embedded one, and the flags of vLLM and SGLang servers; read by ``areal.engine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config import server_args
from areal.api.config.fields import ConfigSection, DefaultFloat, DefaultInt, DefaultStr, opt


@dataclass
class NativeConfig(ConfigSection):
    """The embedded inference engine (backend ``native``)."""

    max_running_requests: int = opt(64, "Requests decoded at the same time; more wait.", unit="requests", ge=1)
    max_seq_len: int | None = opt(
        None,
        "Longest prompt plus output of one request; null = the model's max_position_embeddings, at most 4096.",
        unit="tokens",
        ge=1,
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = opt(None, "Compute dtype; null = the one of the actor.")
    recompute_tokens_per_step: int = opt(
        8192,
        "After a weight update, most tokens of running requests recomputed between two decode steps.",
        unit="tokens",
        ge=1,
    )
    prefill_tokens_per_step: int = opt(
        8192, "Most prompt tokens of newly admitted requests computed between two decode steps.", unit="tokens", ge=1
    )
    num_threads: int | None = opt(
        None, "CPU threads of the engine; null = the number torch uses in this process.", unit="threads", ge=1
    )
    share_prefill: bool = opt(True, "Compute equal prompts of running requests once and copy the cache.")


@dataclass
class vLLMConfig(ConfigSection):
    """Flags of the vLLM servers."""

    model: str = opt("", "Model path; server flag --model.")
    seed: int = opt(1, "Base seed; each server adds its index; server flag --seed.", ge=0)
    dtype: str = opt(DefaultStr("bfloat16"), "Compute dtype; not written: the actor's; server flag --dtype.")
    max_num_seqs: int = opt(256, "Max sequences in flight; server flag --max-num-seqs.", ge=1)
    max_model_len: int | None = opt(
        DefaultInt(32768),
        "Context length; not written: at most the model's; server flag --max-model-len.",
        unit="tokens",
        ge=1,
    )
    no_enable_prefix_caching: bool = opt(
        True,
        "True = prefix cache off (needed for correctness across weight updates); server flag "
        "--no-enable-prefix-caching.",
    )
    gpu_memory_utilization: float = opt(
        DefaultFloat(0.9), "Share of device memory; server flag --gpu-memory-utilization.", gt=0, le=1
    )
    worker_extension_cls: str = opt(
        "areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension",
        "Import path of the class that adds weight-update RPCs to vLLM workers; server flag --worker-extension-cls.",
    )
    skip_tokenizer_init: bool = opt(False, "Server flag --skip-tokenizer-init.")
    enforce_eager: bool = opt(False, "Do not compile; always on on a CPU; server flag --enforce-eager.")
    distributed_executor_backend: str = opt("mp", "Server flag --distributed-executor-backend.")
    block_size: int = opt(DefaultInt(16), "Server flag --block-size.", unit="tokens", ge=1)
    cpu_offload_gb: float = opt(DefaultFloat(0.0), "Server flag --cpu-offload-gb.", unit="GB", ge=0)
    disable_sliding_window: bool = opt(True, "Server flag --disable-sliding-window.")
    no_enable_chunked_prefill: bool = opt(
        False, "True = pass --no-enable-chunked-prefill; server flag --no-enable-chunked-prefill."
    )
    enable_sleep_mode: bool = opt(False, "Allow /sleep and /wake_up; server flag --enable-sleep-mode.")
    uvicorn_log_level: str = opt("warning", "Server flag --uvicorn-log-level.")
    enable_lora: bool = opt(False, "Server flag --enable-lora.")
    max_lora_rank: int = opt(16, "Server flag --max-lora-rank.", ge=1)
    max_loras: int = opt(8, "Server flag --max-loras.", ge=1)
    lora_modules: list[str] | None = opt(None, "Filled by the trainer: 'name-v0=path'; server flag --lora-modules.")
    kv_cache_gb: float = opt(1.0, "Memory of the key-value cache where the device is a CPU.", unit="GiB", gt=0)
    python: str = opt("", "Interpreter of the environment that vLLM is installed in; empty = the running one.")

    @staticmethod
    def build_args(  # noqa: PLR0913  the public signature of 1.x
        vllm_config: vLLMConfig,
        tp_size: int = 1,
        pp_size: int = 1,
        host: str | None = None,
        port: int | None = None,
        dist_init_addr: str | None = None,
        n_nodes: int = 1,
        node_rank: int = 0,
    ) -> dict[str, Any]:
        """Flags of one server on GPUs, by name with underscores."""
        place = server_args.ServerPlace(
            host=host,
            port=port,
            tensor=tp_size,
            pipeline=pp_size,
            dist_init_addr=dist_init_addr,
            n_nodes=n_nodes,
            node_rank=node_rank,
        )
        return server_args.vllm_flags(vllm_config, place).args

    @staticmethod
    def build_cmd_from_args(args: dict[str, Any], python: str = "") -> list[str]:
        """The command that starts a server with ``args``."""
        return server_args.command(python, server_args.VLLM_MODULE, args)

    @staticmethod
    def build_cmd(vllm_config: vLLMConfig, *args: Any, **kwargs: Any) -> list[str]:
        """The command that starts one server; arguments as :meth:`build_args`."""
        flags = vLLMConfig.build_args(vllm_config, *args, **kwargs)
        return vLLMConfig.build_cmd_from_args(flags, vllm_config.python)


@dataclass
class SGLangConfig(ConfigSection):
    """Flags of the SGLang servers."""

    model_path: str = opt("", "Model path; server flag --model-path.")
    random_seed: int = opt(1, "Base seed; each server adds its index; server flag --random-seed.", ge=0)
    skip_tokenizer_init: bool = opt(False, "Server works on token ids only; server flag --skip-tokenizer-init.")
    disable_radix_cache: bool = opt(True, "Prefix cache off; server flag --disable-radix-cache.")
    context_length: int | None = opt(
        DefaultInt(32768),
        "Context length; not written: at most the model's; server flag --context-length.",
        unit="tokens",
        ge=1,
    )
    mem_fraction_static: float | None = opt(
        DefaultFloat(0.9), "Static memory share; server flag --mem-fraction-static.", gt=0, le=1
    )
    max_running_requests: int | None = opt(None, "Max requests in flight; server flag --max-running-requests.", ge=1)
    dtype: str = opt(DefaultStr("bfloat16"), "Compute dtype; not written: the actor's; server flag --dtype.")
    log_level: str = opt("warning", "Server log level; server flag --log-level.")
    disable_cuda_graph: bool = opt(False, "Server flag --disable-cuda-graph.")
    disable_cuda_graph_padding: bool = opt(False, "Server flag --disable-cuda-graph-padding.")
    enable_nccl_nvls: bool = opt(False, "NVLS; server flag --enable-nccl-nvls.")
    disable_outlines_disk_cache: bool = opt(False, "Server flag --disable-outlines-disk-cache.")
    disable_custom_all_reduce: bool = opt(False, "Server flag --disable-custom-all-reduce.")
    disable_overlap_schedule: bool = opt(False, "Server flag --disable-overlap-schedule.")
    enable_mixed_chunk: bool = opt(False, "Server flag --enable-mixed-chunk.")
    enable_dp_attention: bool = opt(False, "Server flag --enable-dp-attention.")
    enable_ep_moe: bool = opt(False, "Server flag --enable-ep-moe.")
    enable_torch_compile: bool = opt(False, "Server flag --enable-torch-compile.")
    torch_compile_max_bs: int = opt(32, "Server flag --torch-compile-max-bs.", ge=1)
    cuda_graph_max_bs: int | None = opt(None, "Server flag --cuda-graph-max-bs.", ge=1)
    cuda_graph_bs: list[int] | None = opt(None, "Server flag --cuda-graph-bs.")
    torchao_config: str = opt("", "Server flag --torchao-config.")
    enable_nan_detection: bool = opt(False, "Server flag --enable-nan-detection.")
    enable_p2p_check: bool = opt(False, "Server flag --enable-p2p-check.")
    triton_attention_reduce_in_fp32: bool = opt(False, "Server flag --triton-attention-reduce-in-fp32.")
    triton_attention_num_kv_splits: int = opt(8, "Server flag --triton-attention-num-kv-splits.", ge=1)
    num_continuous_decode_steps: int = opt(1, "Server flag --num-continuous-decode-steps.", unit="steps", ge=1)
    enable_memory_saver: bool = opt(False, "Allow release/resume of memory; server flag --enable-memory-saver.")
    allow_auto_truncate: bool = opt(False, "Server flag --allow-auto-truncate.")
    attention_backend: str | None = opt(
        DefaultStr("fa3"),
        "Attention kernel (fa3 = Hopper); not written, on a CPU: SGLang's choice; server flag --attention-backend.",
    )
    enable_multimodal: bool = opt(False, "Server flag --enable-multimodal.")
    sampling_backend: str | None = opt(None, "Server flag --sampling-backend.")
    chunked_prefill_size: int | None = opt(-1, "-1 = off; server flag --chunked-prefill-size.", unit="tokens", ge=-1)
    max_prefill_tokens: int = opt(32768, "Server flag --max-prefill-tokens.", unit="tokens", ge=1)
    schedule_policy: str = opt("lpm", "Server flag --schedule-policy.")
    schedule_conservativeness: float = opt(1.0, "Server flag --schedule-conservativeness.", gt=0)
    cpu_offload_gb: int = opt(DefaultInt(0), "Server flag --cpu-offload-gb.", unit="GB", ge=0)
    kv_cache_dtype: str = opt("auto", "Server flag --kv-cache-dtype.")
    dp_size: int = opt(1, "Server flag --dp-size.", ge=1)
    ep_size: int = opt(1, "Server flag --ep-size.", ge=1)
    enable_lora: bool | None = opt(None, "Server flag --enable-lora.")
    max_lora_rank: int | None = opt(None, "Server flag --max-lora-rank.", ge=1)
    max_loaded_loras: int = opt(8, "Server flag --max-loaded-loras.", ge=1)
    lora_paths: list[str] | None = opt(None, "Filled by the trainer: 'name-v0=path'; server flag --lora-paths.")
    lora_backend: str = opt(DefaultStr("triton"), "Server flag --lora-backend.")
    log_level_http: str | None = opt("warning", "Server flag --log-level-http.")
    log_requests: bool = opt(False, "Server flag --log-requests.")
    log_requests_level: int = opt(0, "Server flag --log-requests-level.", ge=0, le=3)
    show_time_cost: bool = opt(False, "Server flag --show-time-cost.")
    enable_metrics: bool = opt(True, "Prometheus metrics; server flag --enable-metrics.")
    decode_log_interval: int = opt(1, "Server flag --decode-log-interval.", unit="decode steps", ge=1)
    enable_multithread_load: bool = opt(False, "Not a flag: becomes model_loader_extra_config JSON.")
    enable_return_routed_experts: bool = opt(
        False, "Internal; set from rollout.return_routed_experts; server flag --enable-return-routed-experts."
    )
    kv_cache_gb: float = opt(1.0, "Memory of the key-value cache where the device is a CPU.", unit="GiB", gt=0)
    python: str = opt("", "Interpreter of the environment that SGLang is installed in; empty = the running one.")

    @staticmethod
    def build_args(  # noqa: PLR0913  the public signature of 1.x
        sglang_config: SGLangConfig,
        tp_size: int = 1,
        base_gpu_id: int = 0,
        host: str | None = None,
        port: int | None = None,
        dist_init_addr: str | None = None,
        n_nodes: int = 1,
        node_rank: int = 0,
        pp_size: int = 1,
    ) -> dict[str, Any]:
        """Flags of one server on GPUs, by name with underscores."""
        place = server_args.ServerPlace(
            host=host,
            port=port,
            tensor=tp_size,
            pipeline=pp_size,
            base_gpu_id=base_gpu_id,
            dist_init_addr=dist_init_addr,
            n_nodes=n_nodes,
            node_rank=node_rank,
        )
        return server_args.sglang_flags(sglang_config, place).args

    @staticmethod
    def build_cmd_from_args(args: dict[str, Any], python: str = "") -> list[str]:
        """The command that starts a server with ``args``."""
        return server_args.command(python, server_args.SGLANG_MODULE, args)

    @staticmethod
    def build_cmd(sglang_config: SGLangConfig, *args: Any, **kwargs: Any) -> list[str]:
        """The command that starts one server; arguments as :meth:`build_args`."""
        flags = SGLangConfig.build_args(sglang_config, *args, **kwargs)
        return SGLangConfig.build_cmd_from_args(flags, sglang_config.python)
