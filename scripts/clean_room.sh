#!/usr/bin/env bash
# Proves that a fresh clone needs nothing prepared: clones HEAD into an empty folder and runs the two
# commands of the README there, with an empty environment, a temporary HOME and no pip cache.
#
#     scripts/clean_room.sh [--test-only | --demo-only]
#
# pip finds its index as its machine-wide configuration says; that of the user is out of sight.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
  "") scripts=(demo test) ;;
  --test-only) scripts=(test) ;;
  --demo-only) scripts=(demo) ;;
  *)
    echo "usage: clean_room.sh [--test-only | --demo-only]" >&2
    exit 2
    ;;
esac

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
mkdir "$room/home" "$room/tmp"
git clone --quiet --no-hardlinks "$repository" "$room/tierzero"
if [[ -n $(git -C "$repository" status --porcelain) ]]; then
  echo "clean_room: changes that are not committed are not tested"
fi

enter() {
  env -i HOME="$room/home" TMPDIR="$room/tmp" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
    PIP_NO_CACHE_DIR=1 ${PYTHON:+PYTHON="$PYTHON"} "$@"
}

cd "$room/tierzero"
for script in "${scripts[@]}"; do
  echo "clean_room: bash scripts/$script.sh"
  enter bash "scripts/$script.sh" </dev/null
done
if [[ -n $(git status --porcelain) ]]; then
  echo "clean_room: the commands left files behind that git does not ignore:" >&2
  git status --short >&2
  exit 1
fi
echo "clean_room: passed"
