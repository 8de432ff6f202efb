from collections.abc import Iterator
from typing import Any

def nested_values(x: dict[str, Any]) -> Iterator[Any]: ...
