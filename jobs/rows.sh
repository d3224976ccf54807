# shellcheck shell=bash
# Sourced by node.sh and tests/gpu_session.sh, behind works.sh: rows of measurements and checks, each with a time limit, that fit a
# short loan of a machine. Needs `wanted`, the words that name parts or rows (none: all), `title`, a line about the machine, and
# `results`, the stem of the files that tables go to in OUT. A failed row is a row, and never the end; rows that BUDGET (570 s) has no time for are left.
: "${title:?}" "${results:?}" "${device:?}"
declare -a wanted
budget=${BUDGET:-570}
checks="check|found|beside|verdict"
left=()         # "part row" of those without time
declare -A ran  # parts of which some row had time
failures=0

# The table of works with a last column of what others published, where the script has a function that knows.
works_table() {
  local line number=0 columns=1-8
  if [ -n "${RIVAL:-}" ]; then columns=1-12; fi
  if ! declare -F published >/dev/null; then
    cut -d '|' -f "$columns" <<<"${table:?}"
    return
  fi
  while IFS= read -r line; do
    if [ "$number" -eq 0 ]; then echo "$line|published"; else echo "$line|$(published "${line%%|*}")"; fi
    number=1
  done < <(cut -d '|' -f "$columns" <<<"${table:?}")
}

markdown() { # a table with | between columns
  sed -e 's/^/| /' -e 's/|/ | /2g' -e 's/$/ |/' -e '1{p;s/[^|]/-/g;}'
}

json_rows() { # a table with | between columns, as objects by the headings; numbers where a cell is one
  awk -F'|' 'NR == 1 { for (i = 1; i <= NF; ++i) key[i] = $i; next }
    { row = ""
      for (i = 1; i <= NF; ++i) {
        value = $i; gsub(/[\\"]/, "\\\\&", value)
        if (value !~ /^-?[0-9]+(\.[0-9]+)?$/) value = "\"" value "\""
        row = row (i > 1 ? ", " : "") "\"" key[i] "\": " value
      }
      printf "%s  {%s}", (NR > 2 ? ",\n" : ""), row }'
}

# The words for another call: whole parts where none of their rows had time.
left_words() {
  local entry part
  for entry in "${left[@]}"; do
    part=${entry% *}
    if [ ${#wanted[@]} -eq 0 ] && [ -z "${ran[$part]:-}" ]; then echo "$part"; else echo "${entry#* }"; fi
  done | uniq | xargs
}

write_results() {
  [ -n "${OUT:-}" ] || return 0
  {
    printf '%s\n\n' "$title"
    works_table | markdown
    echo
    markdown <<<"$checks"
    printf '\nleft for another call: %s\n' "$(left_words)"
  } >"$OUT/$results.md"
  printf '{"title": "%s",\n "works": [\n%s\n ],\n "checks": [\n%s\n ]}\n' "$title" "$(works_table | json_rows)" \
    "$(json_rows <<<"$checks")" >"$OUT/$results.json"
}

check() { # what found beside verdict
  checks+=$'\n'"$1|$2|$3|$4"
  case $4 in ok | measured | "no room" | "not run") ;; *) failures=$((failures + 1)) ;; esac
}

# Runs a row if it is wanted and there is time: row PART NAME SECONDS COMMAND…
row() {
  local part=$1 name=$2 seconds=$3 rest=$((budget - SECONDS - 5)) begun=$SECONDS
  shift 3
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $part "* && " ${wanted[*]} " != *" $name "* ]]; then return; fi
  if [ "$rest" -lt $((seconds / 2)) ]; then
    left+=("$part $name")
    return
  fi
  ran[$part]=1
  LIMIT=$((seconds < rest ? seconds : rest))
  printf '\n== %s: %s (at %s s, at most %s s)\n' "$part" "$name" "$SECONDS" "$LIMIT"
  "$@" || {
    echo "$name failed"
    failures=$((failures + 1))
  }
  echo "$name took $((SECONDS - begun)) s"
  write_results
}

work_row() { row "$1" "$2" "$3" measure "$2"; } # part work seconds

# The tables, and what was left; fails where any row did.
finish() {
  write_results
  printf '\n%s\n' "$title"
  if [[ $table == *$'\n'* ]]; then works_table | { column -t -s '|' 2>/dev/null || cat; }; fi
  if [[ $checks == *$'\n'* ]]; then column -t -s '|' <<<"$checks" 2>/dev/null || echo "$checks"; fi
  if [ ${#left[@]} -gt 0 ]; then printf '\nleft for want of time: %s %s\n' "${again:-$0}" "$(left_words)"; fi
  [ "$failures" -eq 0 ]
}
