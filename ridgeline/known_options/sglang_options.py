"""Options of SGLang (its server arguments in August 2026), with the answers of vllm_llama_cpp_options.py where they fit.

A name of ours with `no_` in front is a switch turned round: `--disable-radix-cache` is `--no-enable-prefix-caching`.
"""

from __future__ import annotations

from typing import Any

from ridgeline.known_options.vllm_llama_cpp_options import (
    DRAFT,
    INTERNAL,
    LOGS,
    MACHINES,
    METRICS,
    NO_CODE,
    NO_EXPERTS,
    NO_HEADS,
    NO_LORA,
    NO_MEDIA,
    NO_PARALLEL,
    PER_REQUEST,
    PROXY,
)

SAME = """
context_length= max_model_len  mem_fraction_static= gpu_memory_utilization  max_running_requests= max_num_seqs
chunked_prefill_size= max_num_batched_tokens  page_size= block_size  random_seed= seed  tokenizer_path= tokenizer
tp= tensor_parallel_size  tp_size= tensor_parallel_size  pp= pipeline_parallel_size  pp_size= pipeline_parallel_size
dp= data_parallel_size  dp_size= data_parallel_size  dcp_size= decode_context_parallel_size
grammar_backend= structured_outputs_backend  preferred_sampling_params= override_generation_config
speculative_draft_model_path= speculative_config  speculative_draft_model= speculative_config
fastapi_root_path= root_path  watchdog_timeout= engine_timeout
disable_radix_cache no_enable_prefix_caching  disable_prefix_caching no_enable_prefix_caching
disable_overlap_schedule no_async_scheduling  disable_cuda_graph enforce_eager
enable_deterministic_inference deterministic  enable_layerwise_nvtx_marker nvtx
"""

# Why it changes nothing -> names.
IGNORED: dict[str, str] = {
    INTERNAL: """
        tokenizer_backend= tokenizer_worker_num= detokenizer_worker_num= model_config_parser= enable_fp32_lm_head
        enable_tf32_matmul prefill_decode_interval= enable_dynamic_chunking prefill_max_requests= retraction_policy=
        schedule_conservativeness= c128_page_size= swa_full_tokens_ratio= disable_hybrid_swa_memory radix_eviction_policy=
        prefill_only_disable_kv_cache enable_page_major_kv_layout enable_unified_memory disable_chunked_prefix_cache
        num_continuous_decode_steps= scheduler_recv_interval= enable_mixed_chunk mlx_enable_sampling
        soft_watchdog_timeout= sleep_on_idle custom_sigquit_handler= numa_node= gc_threshold= skip_server_warmup warmups=
        weight_version= batch_notify_size= incremental_streaming_output stream_output enable_session_radix_cache
        decode_attention_backend= prefill_attention_backend= sampling_backend= radix_cache_backend= mm_attention_backend=
        fp8_gemm_runner_backend= fp4_gemm_runner_backend= bf16_gemm_backend= dsa_prefill_backend= dsv4_prefill_backend=
        dsa_decode_backend= dsa_paged_mqa_logits_backend= dsa_topk_backend= nsa_prefill_backend= nsa_decode_backend=
        disable_flashinfer_autotune flashinfer_autotune_skip_ops= cuda_graph_config= cuda_graph_backend_decode=
        cuda_graph_backend_prefill= cuda_graph_max_bs_decode= cuda_graph_max_bs_prefill= cuda_graph_bs_decode=
        cuda_graph_bs_prefill= cuda_graph_tc_compiler= cuda_graph_max_bs= cuda_graph_bs= disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_breakable_cuda_graph disable_piecewise_cuda_graph enforce_piecewise_cuda_graph piecewise_cuda_graph_tokens=
        piecewise_cuda_graph_compiler= piecewise_cuda_graph_max_tokens= triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits= triton_attention_split_tile_size= flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_precise_embedding_interpolation enable_fused_moe_sum_all_reduce
        enable_deepseek_v4_fp4_indexer enable_scattered_sconv enable_torch_compile enable_torch_compile_debug_mode
        torch_compile_max_bs= max_mamba_cache_size= mamba_ssm_dtype= mamba_max_states_per_path= mamba_full_memory_ratio=
        mamba_radix_cache_strategy= mamba_scheduler_strategy= mamba_track_interval= enable_int8_mamba_checkpoint
        int8_mamba_ckpt_size= linear_attn_backend= linear_attn_decode_backend= linear_attn_prefill_backend=
        linear_attn_verify_backend= enable_linear_replayssm linear_replayssm_cache_len= enable_linear_replayssm_spec
        enable_gdn_replayssm_spec enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold=
        startup_weight_load_mode= weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads= weight_loader_drop_cache_after_load enable_prefill_delayer
        prefill_delayer_max_delay_passes= prefill_delayer_token_usage_low_watermark=
        prefill_delayer_forward_passes_buckets= prefill_delayer_wait_seconds_buckets= prefill_delayer_queue_min_ratio=
        prefill_delayer_max_delay_ms= min_free_slots_delay= kv_canary= kv_canary_real_data= kv_canary_sweep_interval=
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size= dynamic_batch_tokenizer_batch_timeout=
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode disable_outlines_disk_cache enable_mis
        weight_cache_mode= weight_cache_socket= weight_cache_timeout= constrained_json_whitespace_pattern=
        constrained_json_disable_any_whitespace num_reserved_decode_tokens= optimistic_prefill_attempts=
        disable_shared_experts_fusion enforce_shared_experts_fusion file_storage_path= default_priority_value=
        abort_on_priority_when_disabled disable_priority_preemption priority_scheduling_preemption_threshold=
        strip_thinking_cache enable_strict_thinking
    """,
    "--max-num-batched-tokens bounds the tokens of a step": "max_prefill_tokens=",
    "waiting requests run in the order of --scheduling-policy": "schedule_policy=",
    LOGS: """
        log_requests log_requests_level= log_requests_format= log_requests_target= uvicorn_access_log_exclude_prefixes=
        crash_dump_folder=
    """,
    "RIDGELINE_LOG sets the level, and the log goes to stderr": "log_level= log_level_http= show_time_cost",
    METRICS: """
        enable_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval= decode_log_interval=
        tokenizer_metrics_custom_labels_header= tokenizer_metrics_allowed_custom_labels= extra_metric_labels=
        bucket_time_to_first_token= bucket_inter_token_latency= bucket_e2e_request_latency= prompt_tokens_buckets=
        generation_tokens_buckets= gc_warning_threshold_secs= enable_request_time_stats_logging
        enable_forward_pass_metrics forward_pass_metrics_worker_id= forward_pass_metrics_ipc_name=
        export_metrics_to_file export_metrics_to_file_dir= collect_tokens_histogram enable_expert_distribution_metrics
        expert_distribution_recorder_mode= expert_distribution_recorder_buffer_size= expert_balancedness_report_mode=
    """,
    "--otlp-traces-endpoint always sends full traces": "enable_trace trace_modules=",
    "usage always has prompt_tokens_details": "enable_cache_report",
    "/v1/embeddings and /v1/score are always there": "is_embedding",
    NO_LORA: """
        max_loaded_loras= max_loras_per_batch= lora_eviction_policy= lora_backend= max_lora_chunk_size=
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold=
        enable_lora_overlap_loading
    """,
    NO_MEDIA: """
        enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder
        mm_process_config= mm_processor_worker_num= mm_io_worker_num= media_url_max_file_size_mb=
        mm_preprocess_cache_size_mb= trust_mm_content_hashes limit_mm_data_per_request= enable_mm_global_cache
        image_processor_backend= mm_global_cache_backend= disable_fast_image_processor mm_feature_transport=
        keep_mm_feature_on_device language_only enable_adaptive_dispatch_to_encoder asr_max_buffer_seconds=
        asr_max_concurrent_sessions= encoder_transfer_backend= encoder_urls= encoder_bootstrap_port=
        encoder_register_urls=
    """,
    NO_EXPERTS: """
        moe_a2a_backend= enable_w4a4_mxfp4_megamoe moe_runner_backend= flashinfer_mxfp4_moe_precision= deepep_mode=
        fuseep_mode= deepep_dispatcher_output_dtype= ep_num_redundant_experts= ep_dispatch_algorithm=
        init_expert_location= eplb_algorithm= eplb_rebalance_num_iterations= eplb_rebalance_layers_per_chunk=
        eplb_min_rebalancing_utilization_threshold= deepep_config= moe_dense_tp_size= moe_dp_size=
        moe_data_parallel_size= mooncake_ib_device= enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
    """,
    NO_PARALLEL: """
        nccl_port= dist_timeout= pp_max_micro_batch_size= pp_async_batch_depth= load_balance_method= dwdp_size=
        dcp_replicate_q_proj cp_strategy= dsa_prefill_cp_mode= nsa_prefill_cp_mode= prefill_cp_mode=
        enable_dsa_cache_layer_split enable_cp_decode_attn_tp enable_dp_attention
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_attn_tp_input_scattered disable_attn_tp_gather enable_p2p_check enable_nccl_nvls enable_symm_mem
        enable_mscclpp enable_torch_symm_mem pre_warm_nccl enable_quant_communications prefill_round_robin_balance
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend= enable_aiter_allreduce_fusion
        enable_flashinfer_allreduce_fusion
    """,
    DRAFT: """
        speculative_draft_load_format= speculative_num_steps= speculative_eagle_topk= speculative_num_draft_tokens=
        speculative_dflash_block_size= speculative_dflash_draft_window_size= speculative_dspark_block_size=
        speculative_dspark_sps_table_path= speculative_dspark_confidence_sts_path=
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single=
        speculative_accept_threshold_acc= speculative_use_rejection_sampling speculative_token_map=
        speculative_attention_mode= speculative_draft_attention_backend= speculative_draft_kv_cache_dtype=
        speculative_draft_window_size= speculative_moe_runner_backend= speculative_moe_a2a_backend=
        speculative_draft_model_quantization= speculative_skip_dp_mlp_sync enable_multi_layer_eagle
        speculative_adaptive speculative_adaptive_config= spec_trace_dir= speculative_ngram_min_bfs_breadth=
        speculative_ngram_max_bfs_breadth= speculative_ngram_match_type= speculative_ngram_max_trie_depth=
        speculative_ngram_capacity= speculative_ngram_external_corpus_path= speculative_ngram_external_sam_budget=
        speculative_ngram_external_corpus_max_tokens=
    """,
}

_MEMORY = "weights and KV must fit into the device's memory; use a smaller model or fp8"
_WEIGHTS = "weights are read from the model's directory or file, once"
_HIDDEN = "hidden states of each token are not returned; /v1/embeddings has the last one"

# (names, values that ask for nothing, why not and what to do instead)
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("json_model_override_args=", ({}, "{}"), "edit a copy of the model's config.json"),
    ("max_total_tokens=", (), "use --num-gpu-blocks-override (blocks of --block-size tokens) or --kv-cache-memory-bytes"),
    ("enable_priority_scheduling", (False,), "use --scheduling-policy priority"),
    ("schedule_low_priority_values_first", (False,), "with --scheduling-policy priority the lowest value already comes first"),
    ("ep= ep_size= expert_parallel_size=", (1,), "use --enable-expert-parallel, which divides the experts among all ranks"),
    ("attn_cp_size= attention_context_parallel_size=", (1,), "use --decode-context-parallel-size"),
    ("enable_prefill_cp enable_dsa_prefill_context_parallel enable_nsa_prefill_context_parallel enable_prefill_context_parallel",
     (False,), "prompts are divided as contexts are: use --decode-context-parallel-size"),
    ("base_gpu_id=", (0,), "set CUDA_VISIBLE_DEVICES"),
    ("gpu_id_step=", (1,), "set CUDA_VISIBLE_DEVICES"),
    ("dist_init_addr= nccl_init_addr= use_ray", (False,), MACHINES),
    ("elastic_ep_backend= enable_elastic_expert_backup ep_join_mode= ep_join_rank_offset= elastic_ep_initial_size= max_ep_size="
     " elastic_ep_scale_timeout= elastic_ep_rejoin", (False, 0), "the number of ranks does not change while a server runs"),
    ("speculative_algorithm=", ("standalone",),
     "use --speculative-config with ngram, suffix, or the path of a draft model; no trained head runs yet"),
    ("speculative_draft_model_revision=", (), "`ridgeline pull NAME --revision REV` prints a directory; give that"),
    ("decoupled_spec_bind_endpoint= decoupled_spec_connect_endpoints= decoupled_spec_rank= decoupled_spec_role=", ("null",),
     NO_HEADS),
    ("dllm_algorithm= dllm_algorithm_config= dllm_fdfo=", (True,), "diffusion models are not supported"),
    ("modelopt_quant= modelopt_checkpoint_restore_path= modelopt_checkpoint_save_path= modelopt_export_path= quantize_and_serve"
     " torchao_config=", (False, ""), "use --quantization, or `ridgeline quantize`; quantised checkpoints need no option"),
    ("quantization_param_path=", (), "scales of the KV cache are read from the checkpoint; leave it out"),
    ("rl_quant_profile= rl_on_policy_target= checkpoint_engine_wait_weights_before_ready engine_info_bootstrap_port=", (False,),
     "weights do not change while a server runs"),
    ("lora_paths=", (), f"{NO_LORA}; merge the adapter into the weights first (peft: merge_and_unload)"),
    ("enable_hierarchical_cache hicache_host_memory_mode= hicache_ratio= hicache_size= hicache_write_policy= hicache_io_backend="
     " hicache_mem_layout= hicache_storage_backend= hicache_storage_prefetch_policy= hicache_storage_backend_extra_config="
     " enable_lmcache lmcache_config_file= enable_flexkv flexkv_config_file= offload_mode= kt_weight_path= kt_method="
     " kt_cpuinfer= kt_threadpool_count= kt_num_gpu_experts= kt_max_deferred_experts_per_token=", (False, 0), _MEMORY),
    ("enable_hisparse hisparse_config= hierarchical_sparse_attention_extra_config=", (False,), "attention is not sparse"),
    ("disaggregation_mode= disaggregation_transfer_backend= disaggregation_bootstrap_port= disaggregation_ib_device="
     " disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache"
     " disaggregation_decode_retraction_backup= disaggregation_decode_extra_slots= disaggregation_decode_polling_interval="
     " enable_pdmux pdmux_config_path= sm_group_num=", ("null", False), "prefill and decode run in one engine"),
    ("encoder_only", (False,), f"{NO_MEDIA}: use a text model"),
    ("custom_weight_loader= enable_custom_logit_processor forward_hooks= stat_loggers= sidecar= sidecar_args=", (False,),
     f"{NO_CODE}; leave it out"),
    ("remote_instance_weight_loader_seed_instance_ip= remote_instance_weight_loader_seed_instance_service_port="
     " remote_instance_weight_loader_send_weights_group_ports= remote_instance_weight_loader_backend="
     " remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config= decrypted_config_file="
     " decrypted_draft_config_file= delete_ckpt_after_loading model_checksum=", (False,), _WEIGHTS),
    ("enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup", (False,),
     "stop the server to free its memory"),
    ("debug_tensor_dump_output_folder= debug_tensor_dump_layers= debug_tensor_dump_input_file= msprobe_dump_config=", (),
     "use `ridgeline diagnose`, or --kernels reference to find a faulty kernel"),
    ("enable_return_hidden_states return_hidden_states_mode= enable_return_indexer_topk", (False,), _HIDDEN),
    ("smg_grpc_mode grpc_mode grpc_port= smg_http_sidecar_port= grpc_http_sidecar_port= enable_http2"
     " http2_max_concurrent_streams=", (False,), f"the server speaks HTTP/1.1; {PROXY}"),
    ("ssl_keyfile_password=", (), f"give a key file without a password, or {PROXY}"),
    ("admin_api_key=", (), "use --admin-socket and `ridgeline admin`"),
    ("hf_chat_template_name= completion_template=", (), "use --chat-template"),
    ("sampling_defaults=", ("model",), "use --generation-config vllm for neutral sampling defaults"),
    ("allow_auto_truncate", (False,), f"{PER_REQUEST}: truncate_prompt_tokens"),
    ("stream_response_default_include_usage", (False,), "use --enable-force-include-usage"),
    ("enable_streaming_session", (False,), "send the whole conversation; the prefix cache keeps what was computed"),
]
