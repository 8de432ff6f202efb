"""`pipeline` stays light: looking at traces, or driving a run, needs no engine."""

import subprocess
import sys


def test_importing_every_module_of_pipeline_loads_no_engine():
    program = (
        "import importlib, pkgutil, sys, pipeline\n"
        "for module in pkgutil.walk_packages(pipeline.__path__, 'pipeline.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = {'torch', 'vllm', 'megatron', 'mbridge', 'operators'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
