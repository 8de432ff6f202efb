from collections.abc import Callable

from vllm.v1.request import Request

def init_none_hash(hash_fn: Callable[[object], bytes]) -> None: ...
def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[object], bytes]
) -> Callable[[Request], list[bytes]]: ...
