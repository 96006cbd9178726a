#!/usr/bin/env bash
# Install sparse decode into a Python environment that has SGLang, and compile the CUDA kernels ahead of time.
# These are the install steps of docker/Dockerfile; on a machine of your own run them in SGLang's environment.
#
#     docker/install.sh --geometries "32x4x128 32x8x128"
set -euo pipefail

python=python3
geometries=
formats=r6h
arch=90a
tier=gpu
isolation=()

usage() {
    cat <<'HELP'
usage: docker/install.sh [--python PYTHON] [--geometries LIST] [--formats LIST] [--arch SM]
                         [--tier gpu|host] [--no-build-isolation]

  --python PYTHON       interpreter of the environment that has SGLang (default: python3)
  --geometries LIST     query heads x KV heads x head dimension of the models to compile kernels for, such as
                        "32x4x128 32x8x128"; without it kernels compile at first use
  --formats LIST        record formats to compile for (default: r6h)
  --arch SM             compute capability to compile for (default: 90a)
  --tier gpu|host       where the servers will have their KV pool (--sparse-decode-kv-tier; default: gpu)
  --no-build-isolation  build the wheel with the setuptools that is installed, without downloads
HELP
}

while [ $# -gt 0 ]; do
    case $1 in
        --python | --geometries | --formats | --arch | --tier)
            [ $# -ge 2 ] || { echo "install: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"
            shift 2
            ;;
        --no-build-isolation) isolation=(--no-build-isolation); shift ;;
        -h | --help) usage; exit 0 ;;
        *) echo "install: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
done

case $tier in
    gpu | host) ;;
    *) echo "install: --tier is '$tier'; legal: gpu, host" >&2; exit 2 ;;
esac

# The steps below change folder.
case $python in
    /*) ;;
    */*) python=$PWD/$python ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() {
    echo "install: $*"
}

# Distributions of today mark their Python as theirs; an image is ours.
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

step "1/4 SGLang"
"$python" - <<'CODE'
from importlib.metadata import PackageNotFoundError, version

try:
    print(f"sglang {version('sglang')}, torch {version('torch')}")
except PackageNotFoundError as error:
    raise SystemExit(f"install: {error}; install SGLang first, or name its interpreter with --python")
CODE

step "2/4 wheel, from a copy since a build leaves folders behind"
mkdir "$work/source"
cp -r "$root"/{python,kernels,requirements,pyproject.toml,README.md,LICENSE} "$work/source"
"$python" -m pip wheel --quiet --no-deps "${isolation[@]}" --wheel-dir "$work" "$work/source"
# What is installed must work without the checkout, so nothing below runs in it.
cd "$work"
"$python" -m pip install --quiet --no-deps --force-reinstall "$work"/locks_sglang-*.whl

step "3/4 CUDA kernels"
arguments=()
for geometry in $geometries; do arguments+=(--geometry "$geometry"); done
for format in $formats; do arguments+=(--format "$format"); done
if [ "$tier" = host ]; then arguments+=(--host-tier); fi
if [ -n "$geometries" ]; then
    "$python" -m locks_kernels.precompile --arch "$arch" "${arguments[@]}"
else
    echo "none named; they compile at first use"
fi

step "4/4 check"
"$python" -m locks_sglang check
