#!/usr/bin/env bash
# What only a GPU can show, on a machine that has one and no network:
#
#   scripts/gpu_check.sh                      both stages
#   scripts/gpu_check.sh tests                tests marked gpu
#   scripts/gpu_check.sh bench [CASE…] [-- OPTIONS…]   scripts/bench_model.py, all cases if none is named
#
# Wheels in .whl/ are put on PYTHONPATH for this run alone. Results are appended to $OUT/bench_model.jsonl if OUT
# names a directory, else to benchmarks/. Each stage ends after STAGE_SECONDS (570). Exit code: 0; 1 if a stage
# failed; 3 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage=${1:-all}
case $stage in
  tests | bench | all) ;;
  *) echo "unknown stage '$stage': tests or bench, or neither for both" >&2; exit 2 ;;
esac
[ $# -gt 0 ] && shift

if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU that torch can use: nothing is checked" >&2
  exit 3
fi

cases=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  cases+=("$1")
  shift
done
[ $# -gt 0 ] && shift

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G '.whl/*.whl' >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl || exit 1
fi
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

summary=()
worst=0
run_stage() { # NAME COMMAND…
  local name=$1 started=$SECONDS code=0
  shift
  timeout --signal=INT --kill-after=20 "${STAGE_SECONDS:-570}" "$@" || code=$?
  [ $code -ne 0 ] && worst=1
  summary+=("$(printf '%-6s  exit %3d  %4d s' "$name" "$code" $((SECONDS - started)))")
}

if [ "$stage" != bench ]; then
  run_stage tests python3 -m pytest -m gpu -q -p no:cacheprovider
fi
if [ "$stage" != tests ]; then
  words=(--out "${OUT:-benchmarks}/bench_model.jsonl")
  [ ${#cases[@]} -gt 0 ] && words+=(--cases "$(IFS=,; echo "${cases[*]}")")
  run_stage bench python3 scripts/bench_model.py "${words[@]}" "$@"
fi

echo
printf '%s\n' "${summary[@]}"
exit $worst
