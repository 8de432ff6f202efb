from collections.abc import Callable

class Request:
    _block_hasher: Callable[[Request], list[bytes]] | None
    def update_block_hashes(self) -> None: ...
