#!/usr/bin/env bash
# What only a GPU can show, on a machine that has one and no network:
#
#   scripts/gpu_check.sh                      all stages
#   scripts/gpu_check.sh tests                tests marked gpu
#   scripts/gpu_check.sh bench [CASE…] [-- OPTIONS…]   scripts/bench_model.py, all cases if none is named
#   scripts/gpu_check.sh ops [NAME…] [-- OPTIONS…]     scripts/bench_NAME.py of moe, attention, head, optimizer
#                                             and elementwise, all if none is named, each a stage of its own
#
# Wheels in .whl/ are put on PYTHONPATH for this run alone, but for nvidia_cutlass_dsl*, which finds its parts only
# where packages are installed and is installed for good. A wheel may come in pieces, NAME.whl.part-*, also in
# several runs: they wait in ${TMPDIR:-/var/tmp}/manyhead-wheels. Results are appended to $OUT/bench_*.jsonl if OUT
# names a directory, else to benchmarks/. Each stage ends after STAGE_SECONDS (570). Exit code: 0; 1 if a stage
# failed; 3 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

operations=(moe attention head optimizer elementwise)
stage=${1:-all}
case $stage in
  tests | bench | ops | all) ;;
  *) echo "unknown stage '$stage': tests, bench or ops, or none for all" >&2; exit 2 ;;
esac
[ $# -gt 0 ] && shift

names=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  names+=("$1")
  shift
done
[ $# -gt 0 ] && shift

if [ "$stage" = ops ]; then
  for name in ${names[@]+"${names[@]}"}; do
    case " ${operations[*]} " in
      *" $name "*) ;;
      *) echo "unknown operation '$name': ${operations[*]}" >&2; exit 2 ;;
    esac
  done
  [ ${#names[@]} -gt 0 ] && operations=("${names[@]}")
fi

if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no GPU that torch can use: nothing is checked" >&2
  exit 3
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
pip_install() {
  python3 -m pip install -q --no-index --no-deps "$@" || exit 1
}
found=$(python3 -B -m src.bench.wheels .whl "${TMPDIR:-/var/tmp}/manyhead-wheels") || exit 1
aside=() for_good=()
while IFS= read -r wheel; do
  case ${wheel##*/} in
    '') ;; # There is none.
    nvidia_cutlass_dsl*) for_good+=("$wheel") ;;
    *) aside+=("$wheel") ;;
  esac
done <<<"$found"
[ ${#for_good[@]} -gt 0 ] && pip_install "${for_good[@]}"
[ ${#aside[@]} -gt 0 ] && pip_install --no-compile --no-cache-dir --upgrade --target "$site" "${aside[@]}"
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

summary=()
worst=0
run_stage() { # NAME COMMAND…
  local name=$1 started=$SECONDS code=0
  shift
  timeout --signal=INT --kill-after=20 "${STAGE_SECONDS:-570}" "$@" || code=$?
  [ $code -ne 0 ] && worst=1
  summary+=("$(printf '%-15s  exit %3d  %4d s' "$name" "$code" $((SECONDS - started)))")
}

if [ "$stage" = tests ] || [ "$stage" = all ]; then
  run_stage tests python3 -m pytest -m gpu -q -p no:cacheprovider
fi
if [ "$stage" = bench ] || [ "$stage" = all ]; then
  words=(--out "${OUT:-benchmarks}/bench_model.jsonl")
  [ ${#names[@]} -gt 0 ] && words+=(--cases "$(IFS=,; echo "${names[*]}")")
  run_stage bench python3 scripts/bench_model.py "${words[@]}" "$@"
fi
if [ "$stage" = ops ] || [ "$stage" = all ]; then
  [ "$stage" = all ] && set -- # Options are those of bench then.
  for name in "${operations[@]}"; do
    run_stage "ops $name" python3 "scripts/bench_$name.py" --out "${OUT:-benchmarks}/bench_$name.jsonl" "$@"
  done
fi

echo
printf '%s\n' "${summary[@]}"
exit $worst
