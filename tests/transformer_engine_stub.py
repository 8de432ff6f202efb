"""Transformer Engine without kernels: modules that register parameters, but cannot compute.

Call `install()` before Megatron-core is imported. Megatron's wrappers around Transformer Engine
then use these modules. Parameters have the same names and shapes as in Transformer Engine 2.11
(transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear,rmsnorm}.py). All other
names that Megatron imports are empty classes.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

VERSION = "2.11.0"
_NAME = "transformer_engine"


class _Module(torch.nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def register(self, name: str, *shape: int) -> None:
        empty = torch.empty(shape, dtype=self.arguments.get("params_dtype", torch.float32))
        self.register_parameter(name, torch.nn.Parameter(empty))

    def forward(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a stub: its kernels need a GPU")


def _cut(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return the output and input features of this tensor-parallel rank, as Linear splits them."""
    outs, ins = arguments["out_features"], arguments["in_features"]
    mode, size = arguments.get("parallel_mode"), arguments.get("tp_size", 1)
    return outs // (size if mode == "column" else 1), ins // (size if mode == "row" else 1)


class Linear(_Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register("weight", *_cut(arguments))
        if arguments.get("bias", True):
            self.register("bias", _cut(arguments)[0])


class LayerNormLinear(Linear):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register("layer_norm_weight", arguments["in_features"])
        if arguments["normalization"] != "RMSNorm":
            self.register("layer_norm_bias", arguments["in_features"])


class GroupedLinear(_Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_gemms = arguments["num_gemms"]
        for gemm in range(self.num_gemms):
            self.register(f"weight{gemm}", *_cut(arguments))
            if arguments.get("bias", True):
                self.register(f"bias{gemm}", _cut(arguments)[0])


class RMSNorm(_Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register("weight", arguments["hidden_size"])


class DotProductAttention(_Module):
    def __init__(self, *_: Any, **arguments: Any) -> None:
        super().__init__(**arguments)


def get_cpu_offload_context(*_: Any) -> tuple[contextlib.nullcontext[None], None]:
    return contextlib.nullcontext(), None


class _Empty:
    """Takes the place of every other imported name; it is never called."""

    apply = None


class _Stub(ModuleType):
    """A module in which every name exists: as a class of this file, an empty class or a module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = globals().get(name)
        if found is None:
            of_module = name.islower()
            found = _Stub(f"{self.__name__}.{name}") if of_module else type(name, (_Empty,), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != _NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _NAME:
            module.__dict__["__version__"] = VERSION


def install() -> None:
    """Replace Transformer Engine with the stub in this process.

    Raises RuntimeError if Megatron-core has already been imported.
    """
    if any(name.startswith("megatron") for name in sys.modules):
        raise RuntimeError("Megatron-core is already imported; call install() before its import")
    sys.meta_path.insert(0, _Finder())
    for module in ("pytorch", "pytorch.fp8", "common.recipe"):
        __import__(f"{_NAME}.{module}")
