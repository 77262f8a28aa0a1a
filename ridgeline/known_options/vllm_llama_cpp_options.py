"""Options of vLLM and llama.cpp: which of ours means the same, which change nothing here, which are refused and why.

Names are written as in Python; a name that ends in "=" takes a value on the command line, one without it is a switch.
"""

from __future__ import annotations

from typing import Any

# Another engine's name -> ours. A name of ours that a command does not have is refused by that command.
SAME = """
guided_decoding_backend= structured_outputs_backend  hf_repo= model  model_path= model
ctx_size= max_model_len  parallel= max_num_seqs  batch_size= max_num_batched_tokens  alias= served_model_name
chat_template_file= chat_template  timeout= request_timeout  ssl_key_file= ssl_keyfile  ssl_cert_file= ssl_certfile
cors_origins= allowed_origins  api_prefix= root_path  shutdown_timeout= drain_timeout  system_prompt= system
server_base= url  temp= temperature  predict= max_tokens  n_predict= max_tokens  repeat_penalty= repetition_penalty
model_draft= speculative_config  spec_draft_model= speculative_config  hf_repo_draft= speculative_config
spec_draft_hf= speculative_config  speculative_model= speculative_config  spec_model= speculative_config
"""

LOGS = "prompts are never logged; --access-log FILE has a line for every request"
INTERNAL = "it concerns internals of the other engine"
NO_LORA = "LoRA adapters are not applied at run time"
NO_MEDIA = "prompts are text only"
DRAFT = "drafts are switched by --speculative-config, and how many are verified is decided step by step"
NO_HEADS = "drafts are switched by --speculative-config, and no trained head runs yet"
NO_EXPERTS = "experts stay on the ranks that --enable-expert-parallel gives them"
ONE_DEVICE = "all layers are on one device; --device cpu or cuda chooses it"
MEMORY = "files are read and memory is used in one way, which cannot be chosen"
CORS = "--allowed-origins sends the headers that browsers need"
TEMPLATES = "chat templates are always Jinja, sandboxed"
METRICS = "/metrics always has the counters"
ONE_MACHINE = "--data-parallel-size has engines of one machine; `ridgeline route` is for several machines"
MACHINES = "one engine's ranks run on several machines with --distributed-executor-backend ray (docs/cluster.md)"
NO_PARALLEL = "ranks find each other, and divide the work evenly"

# Why it changes nothing -> names.
IGNORED: dict[str, str] = {
    INTERNAL: """
        disable_cascade_attn max_seq_len_to_capture= compilation_config= use_v2_block_manager
        ray_workers_use_nsight optimization_level= performance_mode= kernel_config= additional_config= profiler_config=
        attention_backend= attention_config= moe_backend= linear_backend= mamba_backend= gdn_prefill_backend=
        kda_prefill_backend= ir_op_priority= enable_flashinfer_autotune enable_bf16x3_router_gemm use_fp64_gumbel
        max_parallel_loading_workers= safetensors_load_strategy= safetensors_prefetch_num_threads=
        safetensors_prefetch_block_size= pt_load_map_location= ignore_patterns= model_loader_extra_config=
        model_impl= renderer_num_workers= prefix_caching_hash_algo= prefix_cache_retention_interval= prefix_match_unit=
        kv_sharing_fast_prefill disable_hybrid_kv_cache_manager num_lookahead_slots= num_scheduler_steps=
        multi_step_stream_outputs disable_async_output_proc preemption_mode= scheduler_delay_factor= watermark=
        scheduler_reserve_full_isl prefill_schedule_interval= long_prefill_token_threshold= max_num_partial_prefills=
        max_long_partial_prefills= max_num_scheduled_tokens= stream_interval= cudagraph_capture_sizes=
        cuda_graph_sizes= enable_trace_replay jit_monitor_mode= jit_monitor_verbose
        distributed_timeout_seconds= cpu_distributed_timeout_seconds= numa_bind numa_bind_nodes= numa_bind_cpus=
        disable_nccl_for_dp_synchronization enable_cumem_allocator fail_on_environ_validation
        engine_use_ray disable_frontend_multiprocessing aggregate_engine_logging allow_deprecated_quantization
        enable_fault_tolerance fault_tolerance_config= fingerprint_mode= fingerprint_value= tokens_only
        mamba_ssu_algorithm= enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds= mamba_cache_dtype=
        mamba_ssm_cache_dtype= mamba_block_size= mamba_cache_mode= replayssm_buffer_len= use_replayssm
        cohere_is_reasoning_model cohere_format= enable_flash_late_interaction
        ubatch_size= keep= swa_full ctx_checkpoints= swa_checkpoints= checkpoint_min_step= kv_unified cache_idle_slots
        perf show_timings escape samplers= sampler_seq= sampling_seq= backend_sampling repack no_host defrag_thold=
        check_tensors op_offload spm_infill special skip_chat_parsing slot_prompt_similarity= cache_reuse= simple_io
        threads_http= reuse_port fit= fit_print= fit_target= fit_ctx= lookup_cache_static= lookup_cache_dynamic= warmup
        prompt_cache= prompt_cache_all prompt_cache_ro tags= display_prompt verbose_prompt multiline_input
        sse_ping_interval= list_devices log_prompts_dir= print_token_count= in_prefix_bos in_prefix= in_suffix=
    """,
    "a request that loses its KV blocks is computed again": "swap_space=",
    "a quantised KV cache has a scale per token and head, unless the checkpoint has calibrated ones": "calculate_kv_scales",
    "the KV cache is always on the model's device": "kv_offload",
    "tool choice is always on": "enable_auto_tool_choice",
    "reasoning is split off where the chat template has it; see --reasoning-parser": """
        enable_reasoning reasoning_format= reasoning= reasoning_preserve reasoning_config= prefill_assistant
    """,
    "the format of a template's content is found from the template": "chat_template_content_format=",
    "tools are left out of the prompt as the request asks": "exclude_tools_when_tool_choice_none",
    TEMPLATES: "jinja",
    LOGS: """
        disable_log_requests enable_log_requests enable_log_outputs enable_log_deltas max_log_len= log_error_stack
        disable_uvicorn_access_log disable_access_log_for_endpoints= log_disable log_prefix log_timestamps
    """,
    "RIDGELINE_LOG sets the level, and the log goes to stderr": """
        uvicorn_log_level= log_config_file= log_file= log_colors= verbose log_verbose verbosity= log_verbosity= color=
        enable_logging_iteration_details
    """,
    METRICS: """
        disable_log_stats metrics enable_server_load_tracking enable_per_request_metrics kv_cache_metrics
        kv_cache_metrics_sample= cudagraph_metrics enable_mfu_metrics show_hidden_metrics_for_version=
        per_request_spec_decode_metrics
    """,
    "--otlp-traces-endpoint always sends full traces": "collect_detailed_traces=",
    "usage always has prompt_tokens_details": "enable_prompt_tokens_details",
    "x-request-id is always sent": "enable_request_id_headers",
    CORS: "allow_credentials allowed_methods= allowed_headers= cors_methods= cors_headers= cors_credentials",
    "/openapi.json is always there, and needs no network": "disable_fastapi_docs enable_offline_docs",
    "/tokenize and /detokenize are always there": "enable_tokenizer_info_endpoint",
    "there is one front-end process": "api_server_count=",
    "requests may ask for up to 20 logprobs": "max_logprobs=",
    "a bar is shown on a terminal": "use_tqdm_on_load",
    "names of models are looked up in the local cache only": "offline",
    NO_LORA: """
        max_loras= max_lora_rank= lora_dtype= enable_tower_connector_lora max_cpu_loras= fully_sharded_loras
        lora_target_modules= default_mm_loras= specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras lora_extra_vocab_size= lora_init_without_apply
    """,
    NO_MEDIA: """
        limit_mm_per_prompt= mm_processor_kwargs= allowed_local_media_path= allowed_media_domains= language_model_only
        media_io_kwargs= mm_processor_cache_gb= mm_processor_cache_type= mm_hasher_algorithm=
        mm_shm_cache_max_object_size_mb= mm_encoder_only mm_encoder_tp_mode= mm_encoder_attn_backend=
        mm_encoder_attn_dtype= mm_encoder_fp8_scale_path= mm_encoder_fp8_scale_save_path=
        mm_encoder_fp8_scale_save_margin= interleave_mm_strings skip_mm_profiling video_pruning_rate=
        video_pruning_method= mm_tensor_ipc= mm_processor_device= mm_ipc_gpu_memory_gb= mm_device_do_normalize
        disable_chunked_mm_input mmproj_auto mmproj_offload image_min_tokens= image_max_tokens=
        mtmd_batch_max_tokens= media_path=
    """,
    NO_EXPERTS: """
        enable_ep_weight_filter all2all_backend= dbo_decode_token_threshold= dbo_prefill_token_threshold= eplb_config=
        expert_placement_strategy= cpu_moe n_cpu_moe=
    """,
    NO_PARALLEL: """
        master_addr= master_port= data_parallel_rpc_port= data_parallel_supervisor_port=
        dp_supervisor_probe_interval_s= dp_supervisor_probe_timeout_s= dp_supervisor_probe_failure_threshold=
        dcp_comm_backend= dcp_q_replicate dcp_kv_cache_interleave_size= cp_kv_cache_interleave_size=
        split_mode= tensor_split= main_gpu=
    """,
    DRAFT: """
        num_speculative_tokens= spec_tokens=
        spec_draft_threads= threads_draft= spec_draft_threads_batch= threads_batch_draft= spec_draft_cpu_mask=
        cpu_mask_draft= spec_draft_cpu_range= cpu_range_draft= spec_draft_cpu_strict= cpu_strict_draft= spec_draft_prio=
        prio_draft= spec_draft_poll= poll_draft= spec_draft_cpu_mask_batch= cpu_mask_batch_draft=
        spec_draft_cpu_range_batch= cpu_range_batch_draft= spec_draft_cpu_strict_batch= cpu_strict_batch_draft=
        spec_draft_prio_batch= prio_batch_draft= spec_draft_poll_batch= poll_batch_draft= spec_draft_type_k=
        cache_type_k_draft= spec_draft_type_v= cache_type_v_draft= spec_draft_override_tensor= override_tensor_draft=
        spec_draft_cpu_moe cpu_moe_draft spec_draft_n_cpu_moe= spec_draft_ncmoe= n_cpu_moe_draft= spec_draft_n_max=
        spec_draft_n_min= spec_draft_p_split= draft_p_split= spec_draft_p_min= draft_p_min= spec_draft_backend_sampling
        spec_draft_device= device_draft= spec_draft_ngl= gpu_layers_draft= n_gpu_layers_draft= draft= draft_n=
        draft_max= draft_min= draft_n_min= spec_ngram_mod_n_min= spec_ngram_mod_n_max= spec_ngram_mod_n_match=
        spec_ngram_simple_size_n= spec_ngram_simple_size_m= spec_ngram_simple_min_hits= spec_ngram_map_k_size_n=
        spec_ngram_map_k_size_m= spec_ngram_map_k_min_hits= spec_ngram_map_k4v_size_n= spec_ngram_map_k4v_size_m=
        spec_ngram_map_k4v_min_hits= spec_ngram_size_n= spec_ngram_size_m= spec_ngram_min_hits=
    """,
    "torch's threads are set with OMP_NUM_THREADS": """
        threads= threads_batch= cpu_mask= cpu_range= cpu_strict= prio= poll= cpu_mask_batch= cpu_range_batch=
        cpu_strict_batch= prio_batch= poll_batch= numa=
    """,
    "paged attention kernels are always used": "flash_attn=",
    "continuous batching is always on; --batching static turns it off": "cont_batching",
    "the prefix cache does this; --no-enable-prefix-caching turns it off": "cache_prompt cache_ram=",
    MEMORY: "mlock mmap direct_io load_mode=",
    ONE_DEVICE: "gpu_layers= n_gpu_layers= override_tensor=",
    "/metrics and /dashboard show the server's state": """
        props slots ui webui ui_config= webui_config= ui_config_file= webui_config_file=
    """,
    "/v1/embeddings and /v1/score are always there": """
        embedding embeddings rerank reranking embd_normalize= pooler_config=
    """,
}

PULL = "fetch it first with: ridgeline pull NAME"
NO_CODE = "no code is loaded by options"
PER_REQUEST = "send it with each request"
PROXY = "put a reverse proxy in front (docs/operations.md)"

# (names, values that ask for nothing, why not and what to do instead)
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("trust_remote_code", (False,), "Ridgeline never runs code from model directories; leave it out"),
    ("revision= code_revision= tokenizer_revision=", (), "`ridgeline pull NAME --revision REV` prints a directory; give that"),
    ("download_dir=", (), "set HF_HOME for `ridgeline pull`, or give a local directory"),
    ("hf_token=", (), f"set the variable HF_TOKEN and {PULL}"),
    ("hf_file=", (), "write the file behind the repository: -hf REPO:FILE.gguf"),
    ("model_url= docker_repo=", (), "nothing is downloaded while serving; fetch the file and give its path"),
    ("hf_config_path= config_format=", ("auto", "hf"), "config.json is read from the model's directory"),
    ("tokenizer_mode=", ("auto", "hf"), "the model's fast tokenizer is used; leave it out"),
    ("hf_overrides= model_class_overrides= override_kv=", ({}, "{}"), "edit a copy of the model's config.json"),
    ("rope_scaling= rope_theta= rope_scale= rope_freq_base= rope_freq_scale= yarn_orig_ctx= yarn_ext_factor= yarn_attn_factor="
     " yarn_beta_slow= yarn_beta_fast= grp_attn_n= grp_attn_w=", ({}, "{}", "none"),
     "edit rope_scaling in a copy of config.json"),
    ("disable_sliding_window", (False,), "leave it out; --max-model-len limits the context"),
    ("task= runner= convert=", ("auto", "generate", "none"),
     "this engine generates text; /v1/embeddings and /v1/score work beside it"),
    ("pooling= attention=", ("none", "last", "causal"), "embeddings come from the last token; send pooling with each request"),
    ("enable_lora lora_modules= lora= lora_scaled=", (False,),
     f"{NO_LORA}; merge the adapter into the weights first (peft: merge_and_unload)"),
    ("control_vector= control_vector_scaled= control_vector_layer_range=", (), "control vectors are not applied"),
    ("spec_method= spec_type= spec_default diffusion_config= mtp dflash eagle3", (), NO_HEADS),
    ("prefill_context_parallel_size=", (1,), "prompts are divided as contexts are: use --decode-context-parallel-size"),
    ("data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb enable_elastic_ep", (False,),
     ONE_MACHINE),
    ("data_parallel_size_local= data_parallel_rank= data_parallel_start_rank= data_parallel_address=", (), ONE_MACHINE),
    ("data_parallel_backend=", ("mp",), ONE_MACHINE),
    ("nnodes=", (1,), MACHINES),
    ("node_rank= headless rpc= worker_use_ray", (0, False), MACHINES),
    ("enable_eplb enable_dbo", (False,), f"{NO_EXPERTS}; leave it out"),
    ("device_ids=", (), "set CUDA_VISIBLE_DEVICES"),
    ("cpu_offload_gb= kv_offloading_size= offload_group_size= offload_num_in_group= offload_prefetch_step=", (0,),
     "weights and KV must fit into the device's memory; use a smaller model or fp8"),
    ("kv_offloading_backend= offload_backend= cpu_offload_params= offload_params=", (),
     "weights and KV must fit into the device's memory"),
    ("kv_transfer_config= kv_events_config= ec_transfer_config= ec_manager_config= weight_transfer_config=", (),
     "prefill and decode run in one engine"),
    ("quantization_config=", ({}, "{}"), "use --quantization"),
    ("cache_type_k= cache_type_v=", ("f16", "bf16", "f32"), "use --kv-cache-dtype fp8, int8 or k=FORMAT,v=FORMAT"),
    ("enable_sleep_mode sleep_idle_seconds=", (False, -1), "stop the server to free its memory"),
    ("enable_prompt_embeds enable_mm_embeds", (False,), "prompts are text or token ids"),
    ("mmproj= mmproj_url= image= audio= video=", (), f"{NO_MEDIA}: use a text model"),
    ("logits_processors= worker_cls= worker_extension_cls= scheduler_cls= middleware= tool_parser_plugin="
     " reasoning_parser_plugin= io_processor_plugin=", ([], "", "auto"), f"{NO_CODE}; leave it out"),
    ("tool_server= tools= tools_runtime= mcp_servers_config= mcp_servers_json= agent ui_mcp_proxy webui_mcp_proxy", (False,),
     "the server calls no tools itself; the client runs them"),
    ("logprobs_mode=", ("raw_logprobs",), "logprobs are those of the raw logits"),
    ("trust_request_chat_template", (False,), "requests bring no chat template; use --chat-template"),
    ("return_tokens_as_token_ids", (False,), f"{PER_REQUEST}: return_tokens_as_token_ids"),
    ("return_sampling_mask enable_return_routed_experts", (False,), "leave it out"),
    ("default_chat_template_kwargs= chat_template_kwargs=", ({}, "{}"), f"{PER_REQUEST}: chat_template_kwargs"),
    ("reasoning_effort= reasoning_budget= reasoning_budget_message=", (-1,), f"{PER_REQUEST}: reasoning_effort"),
    ("response_role=", ("assistant",), "answers have the role assistant"),
    ("grammar= grammar_file= json_schema= json_schema_file=", (), f"{PER_REQUEST}: structured_outputs or response_format"),
    ("logit_bias= reverse_prompt= ignore_eos", (False,), f"{PER_REQUEST}: logit_bias, stop, ignore_eos"),
    ("presence_penalty= frequency_penalty=", (0, 0.0), PER_REQUEST),
    ("typical= typical_p=", (1, 1.0), PER_REQUEST),
    ("repeat_last_n=", (), "penalties cover the whole prompt and answer"),
    ("top_nsigma= top_n_sigma= xtc_probability= xtc_threshold= dry_multiplier= dry_base= dry_allowed_length="
     " dry_penalty_last_n= dry_sequence_breaker= adaptive_target= adaptive_decay= dynatemp_range= dynatemp_exp="
     " mirostat= mirostat_lr= mirostat_ent=", (0,), "there are temperature, top_k, top_p, min_p and typical_p"),
    ("uds=", (), f"the server listens on TCP; {PROXY}"),
    ("ssl_ca_certs= ssl_cert_reqs= ssl_ciphers= enable_ssl_refresh", (0, False),
     f"TLS has a certificate and a key only; {PROXY}"),
    ("grpc", (False,), "the server speaks HTTP"),
    ("path=", (), "the server serves no files"),
    ("slot_save_path=", (), "the prefix cache lives in memory"),
    ("models_dir= models_preset= models_max= models_autoload", (), "one server serves one model; start another on another port"),
    ("context_shift", (False,), "an answer ends at --max-model-len"),
    ("prompt= file= binary_file= in_file= system_prompt_file= conversation single_turn interactive interactive_first", (False,),
     "`ridgeline chat MODEL PROMPT` answers one, `ridgeline generate` a file of prompts"),
    ("cache_list", (), "use `ridgeline list`"),
    ("completion_bash", (), "use `ridgeline completion bash`"),
    ("output= output_file=", (), "`ridgeline generate` writes answers to a file"),
    ("embd_gemma_default fim_qwen_1.5b_default fim_qwen_3b_default fim_qwen_7b_default fim_qwen_7b_spec fim_qwen_14b_spec"
     " fim_qwen_30b_default gpt_oss_20b_default gpt_oss_120b_default vision_gemma_4b_default vision_gemma_12b_default", (),
     "give the model: ridgeline serve MODEL"),
    ("enable_layerwise_nvtx_tracing", (False,), "use --nvtx"),
]

# Short options -> the long name. `-n` and `-r` of vLLM (nodes) give way to llama.cpp's.
SHORT: dict[str, str] = dict(
    pair.split("=") for pair in """
    -tp=tensor_parallel_size -pp=pipeline_parallel_size -dp=data_parallel_size -q=quantization -ep=enable_expert_parallel
    -dcp=decode_context_parallel_size -pcp=prefill_context_parallel_size -dpn=data_parallel_rank -dpr=data_parallel_start_rank
    -dpl=data_parallel_size_local -dpa=data_parallel_address -dpp=data_parallel_rpc_port -dpb=data_parallel_backend
    -dph=data_parallel_hybrid_lb -dpe=data_parallel_external_lb -dpm=data_parallel_multi_port_external_lb
    -sc=speculative_config -cc=compilation_config -ac=attention_config -dc=diffusion_config -asc=api_server_count
    -O=optimization_level
    -m=model -c=ctx_size -n=n_predict -b=batch_size -ub=ubatch_size -np=parallel -ngl=n_gpu_layers -t=threads -tb=threads_batch
    -C=cpu_mask -Cr=cpu_range -Cb=cpu_mask_batch -Crb=cpu_range_batch -fa=flash_attn -p=prompt -f=file -bf=binary_file
    -sys=system_prompt -sysf=system_prompt_file -e=escape -s=seed -l=logit_bias -j=json_schema -jf=json_schema_file
    -bs=backend_sampling -ctk=cache_type_k -ctv=cache_type_v -cb=cont_batching -nocb=no_cont_batching -kvu=kv_unified
    -no-kvu=no_kv_unified -kvo=kv_offload -nkvo=no_kv_offload -nr=no_repack -dt=defrag_thold -mm=mmproj -mmu=mmproj_url
    -dio=direct_io -ndio=no_direct_io -lm=load_mode -dev=device -ot=override_tensor -cmoe=cpu_moe -ncmoe=n_cpu_moe
    -sm=split_mode -ts=tensor_split -mg=main_gpu -fit=fit -fitp=fit_print -fitt=fit_target -fitc=fit_ctx -a=alias -mu=model_url
    -dr=docker_repo -hf=hf_repo -hfr=hf_repo -hff=hf_file -hft=hf_token -to=timeout -sps=slot_prompt_similarity -v=verbose
    -lv=verbosity -md=model_draft -hfd=hf_repo_draft -hfrd=hf_repo_draft -td=threads_draft -tbd=threads_batch_draft
    -ngld=n_gpu_layers_draft -devd=device_draft -ctkd=cache_type_k_draft -ctvd=cache_type_v_draft -cnv=conversation
    -no-cnv=no_conversation -st=single_turn -i=interactive -if=interactive_first -mli=multiline_input -r=reverse_prompt
    -sp=special -co=color -rea=reasoning -ctxcp=ctx_checkpoints -cms=checkpoint_min_step -cram=cache_ram
    -lcs=lookup_cache_static -lcd=lookup_cache_dynamic -ag=agent -no-ag=no_agent -gan=grp_attn_n -gaw=grp_attn_w
    -otd=override_tensor_draft -cmoed=cpu_moe_draft -ncmoed=n_cpu_moe_draft -Cd=cpu_mask_draft -Crd=cpu_range_draft
    -cl=cache_list -o=output -ptc=print_token_count -Cbd=cpu_mask_batch_draft -Crbd=cpu_range_batch_draft
    """.split()
)
