from typing import Any

def extract_sharded_tensors_and_factories(
    sharded_state_dict: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]: ...
