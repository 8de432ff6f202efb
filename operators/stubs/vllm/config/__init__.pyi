class ModelConfig:
    max_model_len: int
    use_mla: bool
    def get_total_num_hidden_layers(self) -> int: ...
    def get_num_experts(self) -> int: ...
    def get_num_experts_per_tok(self) -> int: ...

class CacheConfig:
    block_size: int
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str

class SchedulerConfig:
    max_num_seqs: int

class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
