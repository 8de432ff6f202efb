"""Run one step of the quickstart under a profiler, and list the modules that handle its samples.

    python -m scripts.crossing

A module counts if one of its functions receives a sample in one of its forms: the engine's answer,
the sample, its routes in memory or in a decoded row group, or its place in a micro-batch.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.crossing import watch

EXAMPLE = "examples/quickstart.yaml"


def main() -> None:
    """Run the step and print the modules, with the processes in which they handled samples."""
    with tempfile.TemporaryDirectory(prefix="retrace-crossing-") as folder:
        found = Path(folder) / "found"
        found.mkdir()
        hook = Path(folder) / "sitecustomize.py"
        hook.write_text("from scripts.crossing import watch\n\nwatch.begin()\n")
        paths = os.pathsep.join([folder, str(Path.cwd())])
        subprocess.run(
            [
                *(sys.executable, "-c", "from pipeline.cli import main; main()", "run", EXAMPLE),
                *("trainer.experiment_name=crossing", "trainer.total_training_steps=1"),
                *(f"store.uri={folder}/store", f"trainer.default_local_dir={folder}/local"),
                *("data.val_files=null", "trainer.val_before_train=false", "trainer.logger=[]"),
            ],
            check=True,
            env={**os.environ, "PYTHONPATH": paths, watch.FOLDER: str(found)},
        )
        crossed: dict[str, set[str]] = {}
        for file in found.iterdir():
            for line in file.read_text().splitlines():
                crossed.setdefault(line, set()).add(file.name.partition("-")[0])
    for module in sorted(crossed):
        print(f"{module:45} {', '.join(sorted(crossed[module]))}")
    print(f"{len(crossed)} modules")


if __name__ == "__main__":
    main()
