#!/usr/bin/env bash
# Make or update a virtual environment; returns at once when nothing has changed since the last time.
#
#     tools/env.sh VENV SGLANG_VERSION REQUIREMENTS
#
# Without a GPU: REQUIREMENTS, then SGLang without its dependencies (they would bring the CUDA stack). With one
# (nvidia-smi answers): SGLang with all that it asks for, and REQUIREMENTS is not used.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 sglang=$2 requirements=$3
torchvision=0.28.0 # the release that goes with the torch in the requirements
torch_cpu_index=https://download.pytorch.org/whl/cpu
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

fail() {
    printf 'env: %s\n' "$@" >&2
    exit 1
}

step() { # step TITLE COMMAND...: run with a line before and the duration after
    local title=$1 start=$SECONDS
    shift
    echo "env: $title ..."
    "$@" || fail "'$title' failed (see above)"
    echo "env: $title done in $((SECONDS - start)) s"
}

pip() {
    local quiet=()
    [ -t 1 ] || quiet=(-qq)
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" "${quiet[@]}"
}

# pip's default index has CUDA builds of torch only; where pip is set up to find a CPU build, keep to that.
torch_needs_cpu_index() {
    local wanted found
    wanted=$(grep -E '^torch==' "$requirements")
    found=$("$venv/bin/python" -m pip --disable-pip-version-check install -q --dry-run --no-deps \
        --ignore-installed --report - "$wanted" 2>/dev/null) || true
    [[ $found != *"+cpu\""* ]]
}

[ -n "$python" ] || fail "no python3 found; install Python 3.11 (on Debian: apt-get install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' ||
    fail "$("$python" --version) found; Python 3.10, 3.11 or 3.12 is needed (set PYTHON=/path/to/python3.11)"

kind=cpu
if nvidia-smi -L >/dev/null 2>&1; then kind=gpu; fi

stamp=$venv/.stamp
key=$({ echo "$kind $sglang $torchvision"; "$python" --version; cat "$requirements" requirements/test.txt pyproject.toml "$0"; } | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    echo "env: $venv is up to date ($kind, sglang $sglang)"
    exit 0
fi

start=$SECONDS
echo "env: $venv ($kind, sglang $sglang); the first time takes 2 to 5 minutes, most of it downloads"
rm -f "$stamp"
if ! "$python" -m venv "$venv"; then
    fail "python3 -m venv failed; on Debian: apt-get install python3-venv (then run this again)"
fi
if [ "$kind" = gpu ]; then
    step "1/2 sglang with its CUDA packages" pip install "sglang==$sglang" accelerate gguf
    step "2/2 this project and its test tools" pip install -e '.[test]'
else
    index=()
    if torch_needs_cpu_index; then index=(--extra-index-url "$torch_cpu_index"); fi
    step "1/3 torch for the CPU and what SGLang imports" pip install -r "$requirements" "${index[@]}"
    step "2/3 sglang" pip install --no-deps "sglang==$sglang" "torchvision==$torchvision" "${index[@]}"
    # pip would list all that SGLang's CUDA stack lacks here, in red, as if something had failed.
    step "3/3 this project and its test tools" pip install --no-warn-conflicts -e '.[test]'
fi
echo "$key" >"$stamp"
echo "env: $venv made in $((SECONDS - start)) s"
