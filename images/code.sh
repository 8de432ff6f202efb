#!/bin/sh
# code.sh: build Retrace's wheel in /wheel, and install only the wheel into the empty /opt/venv.
set -eu
. /pins/uv.sh

cd /src
python3 -m venv --without-pip /build
grep '^setuptools==' requirements/cpu.txt >/build/requirements.txt
uv_packages install --quiet --python /build/bin/python --requirements /build/requirements.txt
uv build --quiet --wheel --no-build-isolation --python /build/bin/python --out-dir /wheel
python3 -m venv --without-pip /opt/venv
uv pip install --quiet --offline --no-deps --compile-bytecode --python /opt/venv/bin/python \
  /wheel/*.whl
