#!/usr/bin/env bash
# Installs the parsers of frameworks into FOLDER, for `pytest -m frameworks` with OVERLAPSIM_FRAMEWORKS=FOLDER.
# No GPU is needed. About 3 GB and a few minutes; what does not install is said, and its tests are skipped.
set -uo pipefail
folder=${1:?usage: install.sh FOLDER [NCCL_SOURCES [TE_SOURCES]]}
sources=${2:-}
transformer_engine=${3:-}
mkdir -p "$folder"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# torch first, pinned; then everything without dependencies, so that no resolver chooses another torch.
make_venv() {
  python3 -m venv "$folder/$1" && "$folder/$1/bin/python" -m pip install -q torch==2.13.0 triton numpy pyyaml einops packaging
}
install() {
  local name=$1
  shift
  "$folder/$name/bin/python" -m pip install -q "$@" || echo "not installed in $name: $*" >&2
}

make_venv main
install main --no-deps torchtitan==0.2.2 tomli tyro docstring-parser typeguard rich shtab markdown-it-py mdurl pygments tokenizers
install main torchdata datasets pandas tensorboard
install main psutil tqdm hjson msgpack pydantic py-cpuinfo
install main --no-deps deepspeed==0.19.8
install main --no-deps --ignore-requires-python megatron-core==0.19.2

for version in 0.3.1 0.6.2; do
  install main --no-deps --ignore-requires-python --target "$folder/bridge/$version" "megatron-bridge==$version"
done

make_venv torchtitan-0.3.0
install torchtitan-0.3.0 --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing tyro docstring-parser typeguard rich \
  shtab markdown-it-py mdurl pygments tokenizers safetensors
install torchtitan-0.3.0 tensorboard torchdata datasets pandas

# The tuner that ships as an example with NCCL's sources (2.30.7: plugins/tuner/example); its own headers are enough.
if [ -n "$sources" ]; then
  example="$sources/plugins/tuner/example"
  gcc -I "$example/nccl" -fPIC -shared -o "$folder/libnccl-tuner-example.so" "$example/plugin.c" || echo "no NCCL tuner" >&2
fi

# Transformer Engine does not import without CUDA: the one Python file that reads userbuffer settings, at five versions.
if [ -n "$transformer_engine" ]; then
  mkdir -p "$folder/te"
  for version in 1.11 2.2 2.8 2.11 2.18; do
    git -C "$transformer_engine" show "v$version:transformer_engine/pytorch/module/base.py" > "$folder/te/$version.py" ||
      echo "no Transformer Engine $version" >&2
  done
fi
