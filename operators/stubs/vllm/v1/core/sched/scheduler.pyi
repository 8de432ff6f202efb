from vllm.config import CacheConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.request import Request

class Scheduler:
    aux_output_connector: AuxOutputSchedulerConnector | None
    cache_config: CacheConfig
    hash_block_size: int
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def add_request(self, request: Request) -> None: ...
