#!/usr/bin/env bash
# Installs the packages of packages.txt whose probe fails. Silent when nothing is missing.
set -euo pipefail
list=$(dirname "$0")/packages.txt

# The folders in which the distributions, and an administrator, put headers.
header_folders=(/usr/include /usr/include/*-linux-gnu /usr/include/*-linux-gnu/* /usr/include/hdf5/serial
  /usr/lib/*-linux-gnu/openmpi/include /usr/local/include)

header_is_there() {
  local folder
  for folder in "${header_folders[@]}"; do
    if [ -e "$folder/$1" ]; then return 0; fi
  done
  return 1
}

is_there() { # kind name
  case $1 in
    command) command -v "$2" >/dev/null ;;
    header) header_is_there "$2" ;;
    library) [ "$(g++ -print-file-name="lib$2.so" 2>/dev/null)" != "lib$2.so" ] && command -v g++ >/dev/null ;;
    path) [ -e "$2" ] ;;
    *) echo "packages.txt: unknown probe $1" >&2 && exit 1 ;;
  esac
}

missing=()
while read -r package kind name; do
  case $package in '' | '#'*) continue ;; esac
  is_there "$kind" "$name" || missing+=("$package")
done <"$list"
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

if ! command -v apt-get >/dev/null; then
  echo "octet needs these packages of Debian or Ubuntu, or what stands for them here: ${missing[*]}" >&2
  exit 1
fi
root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
    echo "octet needs packages that only root may install. Run this, then the same make again:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  root=(sudo -n)
fi
echo "installing: ${missing[*]}"
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
