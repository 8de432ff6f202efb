from typing import Any

class ModuleSpec:
    # Another ModuleSpec's, or a dataclass of them, for each kind of module another one.
    submodules: Any
