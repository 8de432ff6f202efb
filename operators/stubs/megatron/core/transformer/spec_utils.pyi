from typing import Any

class ModuleSpec:
    # Another ModuleSpec, or a dataclass of ModuleSpecs that depends on the kind of module.
    submodules: Any
